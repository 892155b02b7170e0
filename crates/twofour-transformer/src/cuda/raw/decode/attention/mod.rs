//! Attention of new tokens over a cache of keys and values.

use twofour_cuda::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        float_types::{FLOAT_TYPES, row_source},
        grid::MOST_GRID_ROWS,
    },
    source::{File, Source},
};

/// Elements of a head that there are kernels for.
pub(crate) const DIMS: [usize; 3] = [32, 64, 128];

/// Rows of a CTA that there are kernels for.
const ROWS: [usize; 3] = [1, 2, 4];

/// Keys of a tile.
pub(crate) const TILE: usize = 64;

/// Threads of a CTA.
const THREADS: u32 = 128;

/// The kernels for one data type and size of heads, on one device.
#[derive(Debug, Clone)]
pub(crate) struct CachedAttention {
    append: Kernel,
    /// By [`ROWS`].
    attend: [Kernel; 3],
    append_and_attend: [Kernel; 3],
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[derive(Debug, Default, Clone, Copy)]
#[repr(C)]
pub(crate) struct CachedAttentionParameters {
    pub(crate) qkv: DevicePtr,
    pub(crate) k: DevicePtr,
    pub(crate) v: DevicePtr,
    pub(crate) out: DevicePtr,
    pub(crate) positions: DevicePtr,
    pub(crate) cos: DevicePtr,
    pub(crate) sin: DevicePtr,
    pub(crate) query_gain: DevicePtr,
    pub(crate) key_gain: DevicePtr,
    pub(crate) partial: DevicePtr,
    pub(crate) arrived: DevicePtr,
    pub(crate) batch: u32,
    pub(crate) count: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) capacity: u32,
    pub(crate) splits: u32,
    pub(crate) tiles: u32,
    pub(crate) window: u32,
    pub(crate) epsilon: f32,
    pub(crate) scale: f32,
}

/// Returns the index in [`ROWS`] of the CTAs for this many rows that share a head: the fewest CTAs, and then the fewest rows.
fn rows_index(rows: usize) -> usize {
    ROWS.iter().position(|r| *r >= rows).unwrap_or(ROWS.len() - 1)
}

/// Returns the rows of a CTA, and the CTAs of a head, for this many rows that share it.
pub(crate) fn row_blocks(rows: usize) -> (usize, usize) {
    let of_block = ROWS[rows_index(rows)];
    (of_block, rows.div_ceil(of_block))
}

fn source(dtype: DataType, dim: usize) -> Source {
    let kernel = File::new("decode/attention/kernel.cu", include_str!("kernel.cu"));
    row_source(&format!("decode-attention-{dim}"), dtype, []).define(format!("#define DIM {dim}\n")).with([kernel])
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    FLOAT_TYPES.into_iter().flat_map(|dtype| DIMS.map(|dim| source(dtype, dim))).collect()
}

impl CachedAttention {
    /// Loads the kernels for f32, f16 or bf16 and heads of [`DIMS`] elements.
    pub(crate) fn new(device: &Device, dtype: DataType, dim: usize) -> Result<Self> {
        twofour_cuda::raw::float_types::expect_float_type("attention over a cache", dtype)?;
        if !DIMS.contains(&dim) {
            return Err(Error::NoMethod {
                what: format!("attention over a cache with heads of {dim} elements; 32, 64 and 128 are supported"),
            });
        }
        let source = source(dtype, dim);
        let kernels = |prefix: &str| -> Result<[Kernel; 3]> {
            let kernel = |rows: usize| device.kernel(&source, &format!("{prefix}_{rows}"));
            Ok([kernel(ROWS[0])?, kernel(ROWS[1])?, kernel(ROWS[2])?])
        };
        Ok(Self {
            append: device.kernel(&source, "append")?,
            attend: kernels("attend")?,
            append_and_attend: kernels("append_and_attend")?,
        })
    }

    /// Launches the new tokens' attention, of which each sequence has at least one, after their keys and values have been appended: by the same kernel where there is
    /// one token, otherwise by one before.
    ///
    /// # Safety
    /// The pointers are valid, with the lengths of the parameters' documentation, until the stream has passed this call; the stream is of this device.
    pub(crate) unsafe fn run(&self, stream: Stream, parameters: &CachedAttentionParameters) -> Result<()> {
        let CachedAttentionParameters { batch, count, heads, kv_heads, splits, .. } = *parameters;
        let rows = (heads / kv_heads) as usize * count as usize;
        let ctas = |n: u64| u32::try_from(n).ok().filter(|n| i32::try_from(*n).is_ok());
        let blocks = ctas(u64::from(batch) * u64::from(kv_heads) * row_blocks(rows).1 as u64);
        let warps = u64::from(batch) * u64::from(count) * 2 * u64::from(kv_heads);
        let (Some(blocks), Some(appending)) = (blocks, ctas(warps.div_ceil(u64::from(THREADS / 32)))) else {
            return Err(Error::TooLarge { rows, cols: batch as usize });
        };
        if splits as usize > MOST_GRID_ROWS {
            return Err(Error::TooLarge { rows, cols: splits as usize });
        }
        let launch = Launch::simple((blocks, splits), THREADS);
        let index = rows_index(rows);
        if count == 1 {
            // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
            return unsafe { self.append_and_attend[index].launch(stream, launch, parameters) };
        }
        // SAFETY: the structure has the kernels' layout, and its pointers are valid, as this function requires.
        unsafe {
            self.append.launch(stream, Launch::simple((appending, 1), THREADS), parameters)?;
            self.attend[index].launch(stream, launch, parameters)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_spread_over_as_few_ctas_as_possible() {
        let expected = [(1, (1, 1)), (2, (2, 1)), (3, (4, 1)), (4, (4, 1)), (5, (4, 2)), (7, (4, 2)), (2048, (4, 512))];
        for (rows, blocks) in expected {
            assert_eq!(row_blocks(rows), blocks, "{rows}");
        }
    }
}
