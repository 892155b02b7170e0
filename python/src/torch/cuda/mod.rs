//! Kernels for tensors in the memory of a GPU: launches on torch's current stream. They neither wait for the device nor copy aligned, contiguous operands.

mod context;
mod gradient;
mod int4;
mod linear;
mod pack;
mod wide;

use twofour_cuda::{
    DataType,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use super::{
    failure::{Failure, Result},
    operator::kernel,
    register::Definition,
    scalar_type::ScalarType,
    tensor::Tensor,
};

pub(super) use context::load;
pub(crate) use context::set_tile_scheduler;

/// The kernels, by the names of their operators, whose schemas stand beside the kernels for the host ([`super::cpu`]).
pub(super) const KERNELS: &[Definition] = &[
    ("linear", kernel!(linear::linear)),
    ("linear_bias", kernel!(linear::linear_bias)),
    ("input_gradient", kernel!(linear::input_gradient)),
    ("pack", kernel!(pack::pack)),
    ("pack_masked", kernel!(pack::pack_masked)),
    ("unpack", kernel!(pack::unpack)),
    ("canonical", kernel!(pack::canonical)),
    ("from_canonical", kernel!(pack::from_canonical)),
    ("select", kernel!(pack::select)),
    ("soft_threshold_scale", kernel!(pack::soft_threshold_scale)),
    ("estimate", kernel!(pack::estimate)),
    ("sampled_weight_gradient", kernel!(gradient::sampled_weight_gradient)),
    ("bias_gradient", kernel!(gradient::bias_gradient)),
    ("linear_float8", kernel!(linear::linear_float8)),
    ("linear_i8", kernel!(linear::linear_i8)),
    ("linear_quantized", kernel!(linear::linear_quantized)),
    ("linear_quantized_bias", kernel!(linear::linear_quantized_bias)),
    ("pack_int4", kernel!(int4::pack)),
    ("canonical_int4", kernel!(int4::canonical)),
    ("linear_int4", kernel!(int4::linear)),
    ("linear_int4_bias", kernel!(int4::linear_bias)),
];

impl From<twofour_cuda::Error> for Failure {
    fn from(error: twofour_cuda::Error) -> Self {
        use twofour_cuda::Error as E;
        match error {
            E::Core(error) => error.into(),
            E::NotANumber { .. } => Failure::value(error.to_string()),
            E::DataType { .. } | E::Types { .. } | E::NoMethod { .. } => Failure::not_implemented(error.to_string()),
            E::Capturing { action } => Failure::runtime(format!(
                "{action} while the stream is being captured: call twofour.warm for these shapes, or run the same call once, before the capture"
            )),
            other => Failure::runtime(other.to_string()),
        }
    }
}

/// The data type of a tensor whose elements kernels compute with.
fn data_type(tensor: &Tensor, what: &str) -> Result<DataType> {
    match tensor.dtype()? {
        // Masks: two bytes an element, whatever they mean.
        ScalarType::I16 => Ok(DataType::F16),
        // Exact sums of integers.
        ScalarType::I32 => Ok(DataType::I32),
        dtype => dtype.stored().element().ok_or_else(|| {
            Failure::not_implemented(format!("{what} has dtype {}, which no kernel takes", dtype.name()))
        }),
    }
}

/// The data type of a tensor of 16-bit floats.
fn half_type(tensor: &Tensor, what: &str) -> Result<DataType> {
    half(tensor.dtype()?, what)
}

/// The data type that a weight is packed as: floats of 16 or 8 bits.
fn packable(dtype: ScalarType) -> Result<DataType> {
    match dtype {
        ScalarType::E4m3 => Ok(DataType::E4M3),
        ScalarType::E5m2 => Ok(DataType::E5M2),
        other => half(other, "the packed weight"),
    }
}

fn half(dtype: ScalarType, what: &str) -> Result<DataType> {
    match dtype {
        ScalarType::F16 => Ok(DataType::F16),
        ScalarType::Bf16 => Ok(DataType::BF16),
        other => Err(Failure::not_implemented(format!(
            "{what} has dtype {}; on a GPU bfloat16 or float16 is required",
            other.name()
        ))),
    }
}

/// The elements of a contiguous tensor, to be read.
fn slice<'a>(context: &LayerContext, tensor: &'a Tensor, what: &str) -> Result<DeviceSlice<'a>> {
    expect_device(context, tensor, what)?;
    let dtype = data_type(tensor, what)?;
    // SAFETY: the tensor keeps its memory alive during the call, and torch's allocator hands it out again only to work that is later on the
    // stream, on which all work of this call is launched.
    Ok(unsafe { DeviceSlice::from_raw(context.device(), tensor.address(), tensor.numel(), dtype) })
}

/// The elements of a tensor that this call made, to be written.
fn slice_mut<'a>(context: &LayerContext, tensor: &'a mut Tensor, what: &str) -> Result<DeviceSliceMut<'a>> {
    let dtype = data_type(tensor, what)?;
    // SAFETY: as for `slice`; nobody else has seen the tensor.
    Ok(unsafe { DeviceSliceMut::from_raw(context.device(), tensor.address(), tensor.numel(), dtype) })
}

fn expect_device(context: &LayerContext, tensor: &Tensor, what: &str) -> Result<()> {
    let (found, ordinal) = (tensor.device(), context.device().context().ordinal());
    if !found.is_cuda() || found.index as usize != ordinal {
        return Err(Failure::runtime(format!(
            "{what} is on {found}, another operand on cuda:{ordinal}: move one to the other's device"
        )));
    }
    Ok(())
}
