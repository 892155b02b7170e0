//! Packed weights in torch's tensors: what kernels read, in the layout of a device. It is opaque and differs between
//! devices and versions; the canonical form is portable.
//!
//! On a CPU a packed weight of floats is `[strips, elements]` of its type, of other types a run of bytes. On a GPU it
//! is one dimension of its type; one of float32 is dense there ([`crate::cuda::wide`]).

mod float8;
pub(crate) mod int4;
pub(crate) mod int8;
mod shapes;

use twofour::{
    Compressed, Element,
    kernel::{SparseWeightMut, SparseWeightRef, packed_bytes},
};
use twofour_cuda::layer::borrowed::packed_len;

pub(crate) use shapes::{int4_parts_shapes, int4_shape, parts_shapes, shape, tiles_shape};

use crate::{
    cpu::{Float, Memory, on_pool},
    cuda::packable,
    torch::{Device, Result, ScalarType, Tensor},
};

/// Calls a generic function with the Rust type of a tensor's elements, which a packed weight may hold.
macro_rules! for_stored {
    ($dtype:expr, $what:expr, $function:ident::<$T:ident>($($argument:expr),*)) => {
        match $dtype {
            $crate::torch::ScalarType::I8 => $function::<i8>($($argument),*),
            $crate::torch::ScalarType::E4m3 => $function::<twofour::F8E4M3>($($argument),*),
            $crate::torch::ScalarType::E5m2 => $function::<twofour::F8E5M2>($($argument),*),
            dtype => $crate::cpu::for_floats!(dtype, $what, $function::<$T>($($argument),*)),
        }
    };
}
pub(crate) use for_stored;

/// The elements of a packed weight, as CPUs have it.
pub(crate) trait Stored: Element {
    /// torch's name for the type.
    const STORED: ScalarType;

    /// The packed form of a weight.
    fn pack(weight: &Compressed<Self>) -> Result<Tensor>;

    /// The canonical form of a packed weight.
    fn unpack(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<Self>>;
}

impl<T: Float> Stored for T {
    const STORED: ScalarType = T::SCALAR;

    fn pack(weight: &Compressed<T>) -> Result<Tensor> {
        let mut packed = new_on_cpu::<T>(weight.rows(), weight.cols())?;
        let memory = packed.bytes_mut()?;
        on_pool(|| SparseWeightMut::<T>::new(weight.rows(), weight.cols(), memory)?.pack(weight))??;
        Ok(packed)
    }

    fn unpack(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<T>> {
        Ok(SparseWeightRef::<T>::new(rows, cols, &Memory::of(packed)?)?.to_compressed())
    }
}

/// A tensor for a packed weight of floats on a CPU: a row for each strip.
pub(crate) fn new_on_cpu<T: Float>(rows: usize, cols: usize) -> Result<Tensor> {
    let elements = packed_bytes::<T>(rows, cols)? / size_of::<T>();
    let strips = rows.div_ceil(shapes::STRIP_ROWS);
    Tensor::empty(&[strips as i64, elements.checked_div(strips).unwrap_or(0) as i64], T::SCALAR)
}

/// A tensor for a packed weight of floats of 16 or 8 bits on a GPU.
pub(crate) fn new_on_gpu(device: Device, dtype: ScalarType, rows: usize, cols: usize) -> Result<Tensor> {
    Tensor::empty_on(device, &[packed_len(packable(dtype)?, rows, cols)? as i64], dtype)
}

/// The canonical form as tensors in the host's memory: values `[rows, 2 * groups]` and metadata `[rows, words]` of
/// int32.
pub(crate) fn to_parts<T: Element>(weight: &Compressed<T>, dtype: ScalarType) -> Result<(Tensor, Tensor)> {
    let (rows, per_row) = (weight.rows(), |len: usize| len.checked_div(weight.rows()).unwrap_or(0) as i64);
    let mut values = Tensor::empty(&[rows as i64, per_row(weight.values().len())], dtype)?;
    values.elements_mut::<T>()?.copy_from_slice(weight.values());
    let mut meta = Tensor::empty(&[rows as i64, per_row(weight.meta().len())], ScalarType::I32)?;
    meta.elements_mut::<u32>()?.copy_from_slice(weight.meta());
    Ok((values, meta))
}

/// The weight of such tensors.
///
/// # Errors
/// Where they break a rule of the canonical form.
pub(crate) fn from_parts<T: Stored>(values: &Tensor, meta: &Tensor, cols: usize) -> Result<Compressed<T>> {
    let (rows, _) = values.matrix("the values")?;
    let values = values.elements::<T>("the values", T::STORED)?.into_owned();
    let meta = meta.elements::<u32>("the metadata", ScalarType::I32)?.into_owned();
    Ok(Compressed::from_parts(rows, cols, values, meta)?)
}
