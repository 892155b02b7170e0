//! candle's device memory as the slices that kernels take.

use candle_core::{
    CudaDevice, CudaStorage, DType, Layout, Shape, Storage, StorageRef, Tensor,
    backend::{BackendDevice, BackendStorage},
    cuda_backend::cudarc::driver::{CudaStream, DevicePtr as _, DevicePtrMut as _, SyncOnDrop},
    op::BackpropOp,
};
use half::{bf16, f16};
use twofour_cuda::{
    DataType, DevicePtr,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::{Error, Result};

/// The data type of a dtype that kernels read or write. Ids, u32, are 32-bit elements to them.
///
/// # Errors
/// [`Error::DType`] for all others.
pub(super) fn data_type(what: &'static str, dtype: DType) -> Result<DataType> {
    match dtype {
        DType::F32 => Ok(DataType::F32),
        DType::F16 => Ok(DataType::F16),
        DType::BF16 => Ok(DataType::BF16),
        DType::U32 => Ok(DataType::I32),
        found => Err(Error::DType { what, found, expected: "F32, BF16 or F16".to_owned() }),
    }
}

/// Runs `$body` with `$T` bound to the element type of a data type of [`data_type`].
macro_rules! for_element {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            DataType::F32 => {
                type $T = f32;
                $body
            }
            DataType::F16 => {
                type $T = f16;
                $body
            }
            DataType::BF16 => {
                type $T = bf16;
                $body
            }
            _ => {
                type $T = u32;
                $body
            }
        }
    };
}

/// Elements that launches read. While it lives the storage is borrowed; when it is dropped, candle notes that the
/// stream has read the memory.
#[derive(Debug)]
pub(super) struct Read<'a> {
    slice: DeviceSlice<'a>,
    _read: SyncOnDrop<'a>,
}

impl<'a> Read<'a> {
    pub(super) fn slice(&self) -> DeviceSlice<'a> {
        self.slice
    }
}

/// Elements that launches write.
#[derive(Debug)]
pub(super) struct Write<'a> {
    slice: DeviceSliceMut<'a>,
    _written: SyncOnDrop<'a>,
}

impl Write<'_> {
    pub(super) fn slice(&mut self) -> DeviceSliceMut<'_> {
        self.slice.reborrow()
    }
}

/// The elements of a contiguous argument of an operator.
///
/// # Errors
/// [`Error::Stream`] for memory of another stream, [`Error::DType`] for a dtype without kernels; a view that is not
/// contiguous.
pub(super) fn read<'a>(
    what: &'static str,
    context: &'a LayerContext,
    storage: &'a CudaStorage,
    layout: &Layout,
) -> Result<Read<'a>> {
    let (range, dtype) = checked(what, context, storage, layout)?;
    let (base, read) = base(storage, dtype, context.stream())?;
    let address = base + (range.start * dtype.bytes()) as u64;
    // SAFETY: the elements are within the storage, which is borrowed while the slice is; candle frees its memory in
    // stream order, on the stream that all calls with this context launch on.
    let slice = unsafe { DeviceSlice::from_raw(context.device(), address, range.len(), dtype) };
    Ok(Read { slice, _read: read })
}

/// The elements of a contiguous argument that an in-place operator overwrites.
///
/// # Errors
/// Those of [`read`].
pub(super) fn write<'a>(
    what: &'static str,
    context: &'a LayerContext,
    storage: &'a mut CudaStorage,
    layout: &Layout,
) -> Result<Write<'a>> {
    let (range, dtype) = checked(what, context, storage, layout)?;
    let stream: &CudaStream = context.stream();
    let (base, written) = for_element!(dtype, T => storage.as_cuda_slice_mut::<T>()?.device_ptr_mut(stream));
    let address = base + (range.start * dtype.bytes()) as u64;
    // SAFETY: the elements are within the storage, which is borrowed exclusively while the slice is; candle frees its
    // memory in stream order, on the stream that all calls with this context launch on.
    let slice = unsafe { DeviceSliceMut::from_raw(context.device(), address, range.len(), dtype) };
    Ok(Write { slice, _written: written })
}

fn base<'a>(storage: &'a CudaStorage, dtype: DataType, stream: &'a CudaStream) -> Result<(DevicePtr, SyncOnDrop<'a>)> {
    Ok(for_element!(dtype, T => storage.as_cuda_slice::<T>()?.device_ptr(stream)))
}

/// The range and the data type of the elements, after checking that they are contiguous and that their stream is the
/// context's.
fn checked(
    what: &'static str,
    context: &LayerContext,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<(std::ops::Range<usize>, DataType)> {
    let dtype = data_type(what, storage.dtype())?;
    if storage.device.cuda_stream().cu_stream() != context.stream().cu_stream() {
        return Err(Error::Stream { what });
    }
    let Some((start, end)) = layout.contiguous_offsets() else {
        let message = format!("{what}: expected a contiguous tensor, found strides {:?}", layout.stride());
        return Err(candle_core::Error::Msg(message).into());
    };
    Ok((start..end, dtype))
}

/// A tensor whose storage is locked for reading.
pub(crate) struct Locked<'a> {
    what: &'static str,
    storage: StorageRef<'a>,
    layout: &'a Layout,
}

impl<'a> Locked<'a> {
    /// Locks the storage of a contiguous tensor.
    pub(crate) fn new(what: &'static str, tensor: &'a Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Locked { what, storage, layout }
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::Device`] for a tensor that is not on a GPU; those of [`read`].
    pub(super) fn read<'s>(&'s self, context: &'s LayerContext) -> Result<Read<'s>> {
        match &*self.storage {
            Storage::Cuda(storage) => read(self.what, context, storage, self.layout),
            other => Err(Error::Device { what: self.what, found: other.device().location() }),
        }
    }
}

/// A result that launches write: memory that candle allocated on its stream.
#[derive(Debug)]
pub(super) struct Output {
    storage: CudaStorage,
    shape: Shape,
}

impl Output {
    /// Allocates it. Its elements are undefined until they are written.
    pub(super) fn new(device: &CudaDevice, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let shape = shape.into();
        // SAFETY: every operator of this module writes all elements of its results before anything reads them, in
        // stream order.
        let storage = unsafe { device.alloc_uninit(&shape, dtype) }?;
        Ok(Output { storage, shape })
    }

    /// The elements.
    pub(super) fn write<'a>(&'a mut self, context: &'a LayerContext) -> Result<Write<'a>> {
        let layout = Layout::contiguous(&self.shape);
        write("a result", context, &mut self.storage, &layout)
    }

    /// The elements, once they are written.
    pub(super) fn read<'a>(&'a self, context: &'a LayerContext) -> Result<Read<'a>> {
        read("a result", context, &self.storage, &Layout::contiguous(&self.shape))
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    /// What a custom operator returns.
    pub(super) fn into_parts(self) -> (CudaStorage, Shape) {
        (self.storage, self.shape)
    }

    /// A tensor that is on no tape.
    pub(super) fn into_tensor(self) -> Tensor {
        Tensor::from_storage(Storage::Cuda(self.storage), self.shape, BackpropOp::none(), false)
    }
}

/// The number of rows of `[.., n]`, and `n`.
pub(super) fn matrix(shape: &Shape) -> (usize, usize) {
    match shape.dims() {
        [] => (1, 1),
        [rows @ .., cols] => (rows.iter().product(), *cols),
    }
}
