//! Packed weights in device memory that a layer owns.

use std::{ops::Range, sync::Arc};

use cudarc::driver::{CudaSlice, CudaView, DevicePtr as _, result};
use twofour::{Compressed, Element, compressed::lengths};

use super::{FreeNote, LayerContext, host_form::decode};
use crate::{
    DataType, DevicePtr, Error, Result,
    raw::{
        MetaOrder, Packed,
        gemm::{Gemm, PackedBytes, packed_bytes},
    },
};

/// Part of an allocation.
#[derive(Debug)]
struct Part {
    memory: Arc<CudaSlice<u8>>,
    range: Range<usize>,
    at: DevicePtr,
}

impl Part {
    /// Allocates parts of these sizes together, zeroed; each is aligned to 256 bytes and has at least 16.
    fn together<const N: usize>(context: &LayerContext, bytes: [usize; N]) -> Result<[Part; N]> {
        let mut total = 0;
        let ranges = bytes.map(|bytes| {
            let begin = usize::next_multiple_of(total, 256);
            total = begin + bytes.max(16);
            begin..total
        });
        let memory = Arc::new(context.allocate(total)?);
        let first = memory.device_ptr(context.stream()).0;
        Ok(ranges.map(|range| Part { memory: memory.clone(), at: first + range.start as u64, range }))
    }

    /// Returns a copy in memory of its own.
    fn copy(&self, context: &LayerContext) -> Result<Self> {
        context.expect_not_capturing("allocating memory")?;
        let memory = context.stream().clone_dtod(&self.view());
        let memory = Arc::new(memory.map_err(|error| Error::driver("copying device memory", error))?);
        let at = memory.device_ptr(context.stream()).0;
        Ok(Part { range: 0..memory.len(), memory, at })
    }

    fn view(&self) -> CudaView<'_, u8> {
        self.memory.slice(self.range.clone())
    }

    /// Launches a copy from host memory, which is read until the stream has passed the call.
    fn write(&mut self, context: &LayerContext, bytes: &[u8]) -> Result<()> {
        if bytes.len() > self.range.len() {
            return Err(Error::Length { what: "a packed weight", expected: self.range.len(), found: bytes.len() });
        }
        context.device().bind()?;
        // SAFETY: the part is as long, no other part has its bytes, and the stream is of its device.
        let copied = unsafe { result::memcpy_htod_async(self.at, bytes, context.stream().cu_stream()) };
        copied.map_err(|error| Error::driver("copying a packed weight to the device", error))
    }
}

/// Values and metadata of a `[rows, cols]` weight in the GEMM kernels' order, with its padding.
#[derive(Debug)]
pub(super) struct PackedBuffer {
    _freed: FreeNote,
    values: Part,
    meta: Part,
    rows: usize,
    cols: usize,
    dtype: DataType,
}

impl PackedBuffer {
    /// Returns a weight of zeros; it must be written before it is read.
    pub(super) fn new(context: &LayerContext, dtype: DataType, rows: usize, cols: usize) -> Result<Self> {
        let bytes = packed_bytes(dtype, rows, cols);
        let ([values], [meta]) = (Part::together(context, [bytes.values])?, Part::together(context, [bytes.meta])?);
        Ok(Self { _freed: context.free_note(), values, meta, rows, cols, dtype })
    }

    /// Returns weights of zeros of `[rows, cols]` and of its transpose. The values of both are one allocation: without
    /// padding as long as the dense weight, whose memory a layer that becomes sparse gives up. Memory in pieces of half
    /// its size would leave gaps.
    pub(super) fn with_transpose(
        context: &LayerContext,
        dtype: DataType,
        rows: usize,
        cols: usize,
    ) -> Result<[Self; 2]> {
        let [PackedBytes { values, meta }, transposed] =
            [packed_bytes(dtype, rows, cols), packed_bytes(dtype, cols, rows)];
        let [values, transposed_values] = Part::together(context, [values, transposed.values])?;
        let [meta, transposed_meta] = Part::together(context, [meta, transposed.meta])?;
        let of = |values, meta, rows, cols| Self { _freed: context.free_note(), values, meta, rows, cols, dtype };
        Ok([of(values, meta, rows, cols), of(transposed_values, transposed_meta, cols, rows)])
    }

    /// Returns a copy in memory of its own.
    pub(super) fn copy(&self, context: &LayerContext) -> Result<Self> {
        let (values, meta) = (self.values.copy(context)?, self.meta.copy(context)?);
        let Self { rows, cols, dtype, .. } = *self;
        Ok(Self { _freed: context.free_note(), values, meta, rows, cols, dtype })
    }

    /// Overwrites the weight with bytes of host memory, padding included; synchronizes the stream.
    pub(super) fn write(&mut self, context: &LayerContext, values: &[u8], meta: &[u8]) -> Result<()> {
        self.values.write(context, values)?;
        self.meta.write(context, meta)?;
        context.synchronize()
    }

    /// Returns the device pointers.
    pub(super) fn packed(&self) -> Packed {
        Packed { values: self.values.at, meta: self.meta.at }
    }

    /// Returns the bytes of values and of metadata.
    pub(super) fn lengths(&self) -> (usize, usize) {
        (self.values.range.len(), self.meta.range.len())
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
        self.values.range.len() + self.meta.range.len()
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
        let (values, meta) = (
            stream.clone_dtoh(&self.values.view()).map_err(failed)?,
            stream.clone_dtoh(&self.meta.view()).map_err(failed)?,
        );
        stream.synchronize().map_err(failed)?;
        decode(&values, &meta, self.rows, self.cols)
    }
}
