//! A packed weight in device memory that a layer owns.

use cudarc::driver::{CudaSlice, DevicePtr as _};
use twofour::{Compressed, Element, compressed::lengths};

use super::{FreeNote, LayerContext, host_form::decode};
use crate::{
    DataType, Error, Result,
    raw::{
        MetaOrder, Packed,
        gemm::{Gemm, packed_bytes},
    },
};

/// Values and metadata of a `[rows, cols]` weight in the GEMM kernels' order, with its padding.
#[derive(Debug)]
pub(super) struct PackedBuffer {
    _freed: FreeNote,
    values: CudaSlice<u8>,
    meta: CudaSlice<u8>,
    packed: Packed,
    rows: usize,
    cols: usize,
    dtype: DataType,
}

impl PackedBuffer {
    /// Returns a weight of zeros; it must be written before it is read.
    pub(super) fn new(context: &LayerContext, dtype: DataType, rows: usize, cols: usize) -> Result<Self> {
        let bytes = packed_bytes(dtype, rows, cols);
        let (values, meta) = (context.allocate(bytes.values)?, context.allocate(bytes.meta)?);
        let stream = context.stream();
        let packed = Packed { values: values.device_ptr(stream).0, meta: meta.device_ptr(stream).0 };
        Ok(Self { _freed: context.free_note(), values, meta, packed, rows, cols, dtype })
    }

    /// Returns a copy in memory of its own.
    pub(super) fn copy(&self, context: &LayerContext) -> Result<Self> {
        let (values, meta) = (context.copy_of(&self.values)?, context.copy_of(&self.meta)?);
        let stream = context.stream();
        let packed = Packed { values: values.device_ptr(stream).0, meta: meta.device_ptr(stream).0 };
        let Self { rows, cols, dtype, .. } = *self;
        Ok(Self { _freed: context.free_note(), values, meta, packed, rows, cols, dtype })
    }

    /// Overwrites the weight with bytes of host memory, padding included; synchronizes the stream.
    pub(super) fn write(&mut self, context: &LayerContext, values: &[u8], meta: &[u8]) -> Result<()> {
        let failed = |error| Error::driver("copying a packed weight to the device", error);
        let stream = context.stream();
        stream.memcpy_htod(values, &mut self.values.slice_mut(..values.len())).map_err(failed)?;
        stream.memcpy_htod(meta, &mut self.meta.slice_mut(..meta.len())).map_err(failed)?;
        context.synchronize()
    }

    /// Returns the device pointers.
    pub(super) fn packed(&self) -> Packed {
        self.packed
    }

    /// Returns the memory of values and of metadata.
    pub(super) fn memory_mut(&mut self) -> (&mut CudaSlice<u8>, &mut CudaSlice<u8>) {
        (&mut self.values, &mut self.meta)
    }

    /// Returns the metadata's order.
    pub(super) fn order(&self) -> MetaOrder {
        Gemm::meta_order_of(self.dtype)
    }

    /// Returns the rows and columns, without padding.
    pub(super) fn shape(&self) -> (usize, usize) {
        (self.rows, self.cols)
    }

    /// Returns the bytes of values and metadata.
    pub(super) fn bytes(&self) -> usize {
        self.values.len() + self.meta.len()
    }

    /// Returns the weight in canonical form, as a copy in host memory; synchronizes the stream.
    pub(super) fn to_compressed<T: Element>(&self, context: &LayerContext) -> Result<Compressed<T>> {
        let found: DataType = T::DTYPE;
        if found != self.dtype {
            return Err(Error::SliceType { what: "the packed weight", expected: self.dtype, found });
        }
        if self.rows == 0 || self.cols == 0 {
            let (values, meta) = lengths(self.rows, self.cols)?;
            return Ok(Compressed::from_parts(self.rows, self.cols, vec![T::ZERO; values], vec![0; meta])?);
        }
        let failed = |error| Error::driver("copying a packed weight", error);
        let stream = context.stream();
        let (values, meta) =
            (stream.clone_dtoh(&self.values).map_err(failed)?, stream.clone_dtoh(&self.meta).map_err(failed)?);
        stream.synchronize().map_err(failed)?;
        decode(&values, &meta, self.rows, self.cols)
    }
}
