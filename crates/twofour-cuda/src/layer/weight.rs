//! A packed weight in device memory that a layer owns.

use cudarc::driver::{CudaSlice, DevicePtr as _};
use twofour::{
    Compressed, Element,
    compressed::lengths,
    layout::sm90::{TileK, decode_8, decode_16},
};

use super::LayerContext;
use crate::{
    DataType, Error, Result,
    gemm::{Gemm, packed_bytes, tile_k},
    prune::{MetaOrder, Packed},
};

/// Values and metadata of a `[rows, cols]` weight in the GEMM kernels' order, with its padding.
#[derive(Debug)]
pub(super) struct PackedBuffer {
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
        Ok(Self { values, meta, packed, rows, cols, dtype })
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

    /// Returns the metadata's order.
    pub(super) fn order(&self) -> MetaOrder {
        Gemm::meta_order_of(self.dtype)
    }

    /// Returns the tile that the metadata is ordered for.
    pub(super) fn tile(&self) -> TileK {
        tile_k(self.dtype)
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
        let found: DataType = T::DTYPE.into();
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
        let tile = self.tile();
        let (rows, cols) = (self.rows.next_multiple_of(64), self.cols.next_multiple_of(tile.columns()));
        let bytes = packed_bytes(self.dtype, self.rows, self.cols);
        let meta = &meta[..bytes.meta];
        let words = if self.dtype.bytes() == 2 {
            decode_16(rows, cols, tile, &bytemuck::pod_collect_to_vec::<u8, u16>(meta))?
        } else {
            decode_8(rows, cols, tile, &bytemuck::pod_collect_to_vec::<u8, u32>(meta))?
        };
        let values = bytemuck::pod_collect_to_vec::<u8, T>(&values[..bytes.values]);
        // Without the padding.
        let (groups, words_per_row) = (self.cols.div_ceil(4), self.cols.div_ceil(32));
        let values =
            values.chunks_exact(cols / 2).take(self.rows).flat_map(|row| &row[..2 * groups]).copied().collect();
        let mut kept = Vec::with_capacity(self.rows * words_per_row);
        for row in words.chunks_exact(cols.div_ceil(32)).take(self.rows) {
            kept.extend_from_slice(&row[..words_per_row]);
            if let (Some(last), 1..) = (kept.last_mut(), groups % 8) {
                *last &= (1 << (4 * (groups % 8))) - 1;
            }
        }
        Ok(Compressed::from_parts(self.rows, self.cols, values, kept)?)
    }
}
