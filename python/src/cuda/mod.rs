//! What kernels for tensors in the memory of a GPU share: launches on torch's current stream. They neither wait for the
//! device nor copy aligned, contiguous operands.

pub(crate) mod context;
mod masks;
pub(crate) mod wide;

use twofour_cuda::{
    DataType,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::torch::{Failure, Result, ScalarType, Tensor, operands::with_last};

pub(crate) use context::{load, set_tile_scheduler};
pub(crate) use masks::{new_mask, number, sampling, select_into, select_together_into};

impl From<twofour_cuda::Error> for Failure {
    fn from(error: twofour_cuda::Error) -> Self {
        use twofour_cuda::Error as E;
        match error {
            E::Core(error) => error.into(),
            E::NotANumber { .. } => Failure::value(error.to_string()),
            E::DataType { .. } | E::Types { .. } | E::NoMethod { .. } => Failure::not_implemented(error.to_string()),
            E::Capturing { action } => Failure::runtime(format!(
                "{action} while the stream is being captured: call twofour.warm for these shapes, or run the same call \
                 once, before the capture"
            )),
            other => Failure::runtime(other.to_string()),
        }
    }
}

/// The data type of a tensor whose elements kernels compute with.
pub(crate) fn data_type(tensor: &Tensor, what: &str) -> Result<DataType> {
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
pub(crate) fn half_type(tensor: &Tensor, what: &str) -> Result<DataType> {
    half(tensor.dtype()?, what)
}

/// The data type that a weight is packed as: floats of 16 or 8 bits.
pub(crate) fn packable(dtype: ScalarType) -> Result<DataType> {
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
pub(crate) fn slice<'a>(context: &LayerContext, tensor: &'a Tensor, what: &str) -> Result<DeviceSlice<'a>> {
    expect_device(context, tensor, what)?;
    let dtype = data_type(tensor, what)?;
    // SAFETY: the tensor keeps its memory alive during the call, and torch's allocator hands it out again only to work
    // that is later on the stream, on which all work of this call is launched.
    Ok(unsafe { DeviceSlice::from_raw(context.device(), tensor.address(), tensor.numel(), dtype) })
}

/// The indices of a contiguous tensor of int64, to be read: each as two elements of 32 bits.
pub(crate) fn indices<'a>(context: &LayerContext, tensor: &'a Tensor, what: &str) -> Result<DeviceSlice<'a>> {
    expect_device(context, tensor, what)?;
    let dtype = tensor.dtype()?;
    if dtype != ScalarType::I64 {
        return Err(Failure::runtime(format!("{what} must be int64, not {}", dtype.name())));
    }
    // SAFETY: as for `slice`; an index has two elements of 32 bits.
    Ok(unsafe { DeviceSlice::from_raw(context.device(), tensor.address(), 2 * tensor.numel(), DataType::I32) })
}

/// The elements of a tensor that this call made, to be written.
pub(crate) fn slice_mut<'a>(context: &LayerContext, tensor: &'a mut Tensor, what: &str) -> Result<DeviceSliceMut<'a>> {
    let dtype = data_type(tensor, what)?;
    // SAFETY: as for `slice`; nobody else has seen the tensor.
    Ok(unsafe { DeviceSliceMut::from_raw(context.device(), tensor.address(), tensor.numel(), dtype) })
}

/// The operands of a GEMM with a packed weight.
pub(crate) struct Product<'a> {
    pub(crate) input: DeviceSlice<'a>,
    pub(crate) packed: DeviceSlice<'a>,
    pub(crate) bias: Option<DeviceSlice<'a>>,
    pub(crate) output: DeviceSliceMut<'a>,
}

/// The result of a GEMM that `launch` launches: of the shape of `x`, but for the last dimension and the type.
pub(crate) fn multiply(
    context: &LayerContext,
    (x, packed, bias): (&Tensor, &Tensor, Option<&Tensor>),
    (features, dtype): (usize, ScalarType),
    launch: impl FnOnce(Product<'_>) -> Result<()>,
) -> Result<Tensor> {
    let (x, packed) = (x.contiguous("the input")?, packed.contiguous("the packed weight")?);
    let bias = bias.map(|bias| bias.contiguous("the bias")).transpose()?;
    let mut y = with_last(&x, x.device(), features, dtype)?;
    launch(Product {
        input: slice(context, &x, "the input")?,
        packed: slice(context, &packed, "the packed weight")?,
        bias: bias.as_ref().map(|bias| slice(context, bias, "the bias")).transpose()?,
        output: slice_mut(context, &mut y, "the output")?,
    })?;
    Ok(y)
}

/// An error unless a tensor is on the device of a context.
pub(crate) fn expect_device(context: &LayerContext, tensor: &Tensor, what: &str) -> Result<()> {
    let (found, ordinal) = (tensor.device(), context.device().context().ordinal());
    if !found.is_cuda() || found.index as usize != ordinal {
        return Err(Failure::runtime(format!(
            "{what} is on {found}, another operand on cuda:{ordinal}: move one to the other's device"
        )));
    }
    Ok(())
}
