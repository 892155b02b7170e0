//! Attention of new tokens over a cache of keys and values.

use twofour_cuda::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        float_types::{FLOAT_TYPES, row_source},
        grid::MAX_GRID_ROWS,
        headers::DENSE_PRODUCT,
    },
    source::{File, Source},
};

/// Elements of a head that there are kernels for.
pub(crate) const DIMS: [usize; 4] = [32, 64, 128, 256];

/// What the kernels of a data type and a size of heads have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiling {
    /// The rows of a CTA that there are kernels for.
    rows: &'static [usize],
    /// The keys of a tile.
    pub(crate) tile: usize,
    /// CTAs for each SM.
    pub(crate) ctas: usize,
}

impl Tiling {
    pub(crate) fn of(dtype: DataType, dim: usize) -> Self {
        match (dtype, dim) {
            (DataType::F32, ..=128) => Self { rows: &[1, 2, 4], tile: 64, ctas: 4 },
            (DataType::F32, _) => Self { rows: &[1, 2], tile: 32, ctas: 4 },
            // As many as registers have room for.
            (_, ..=128) => Self { rows: &[8], tile: MAX_KEYS, ctas: 3 },
            _ => Self { rows: &[8], tile: MAX_KEYS, ctas: 2 },
        }
    }

    /// Returns the index of the CTAs for this many rows that share a head: the fewest CTAs, and then the fewest rows.
    fn index(self, rows: usize) -> usize {
        self.rows.iter().position(|r| *r >= rows).unwrap_or(self.rows.len() - 1)
    }

    /// Returns the CTAs of a head that this many rows share.
    pub(crate) fn blocks(self, rows: usize) -> usize {
        rows.div_ceil(self.rows[self.index(rows)])
    }

    /// Returns the most rows of a CTA.
    pub(crate) fn most_rows(self) -> usize {
        self.rows[self.rows.len() - 1]
    }
}

/// Most keys of a tile.
pub(crate) const MAX_KEYS: usize = 64;

/// Threads of a CTA.
const THREADS: u32 = 128;

/// Most splits of a cache: the last CTA adds their results.
pub(crate) const MAX_SPLITS: usize = 64;

/// Returns the f32 elements of a row of a CTA's results, with what its sums count.
pub(crate) fn partial_of(dim: usize) -> usize {
    dim + 4
}

/// The kernels for one data type and size of heads, on one device.
#[derive(Debug, Clone)]
pub(crate) struct CachedAttention {
    append: Kernel,
    tiling: Tiling,
    /// By [`Tiling::index`].
    attend: Vec<Kernel>,
    append_and_attend: Vec<Kernel>,
}

/// The kernels' parameters, in their memory layout; `cache.cuh` says what each is.
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
    pub(crate) sinks: DevicePtr,
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
    pub(crate) soft_cap: f32,
}

fn source(dtype: DataType, dim: usize) -> Source {
    let Tiling { tile, ctas, .. } = Tiling::of(dtype, dim);
    let shared = File::new("decode/attention/cache.cuh", include_str!("cache.cuh"));
    let (headers, products): (&[File], _) = match dtype {
        DataType::F32 => (&[], File::new("decode/attention/floats.cu", include_str!("floats.cu"))),
        _ => (&[DENSE_PRODUCT], File::new("decode/attention/products.cu", include_str!("products.cu"))),
    };
    let defines =
        format!("#define DIM {dim}\n#define TILE {tile}\n#define CTAS {ctas}\n#define MAX_SPLITS {MAX_SPLITS}\n");
    row_source(&format!("decode-attention-{dim}"), dtype, headers).define(defines).with([shared, products])
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
                what: format!("attention over a cache with heads of {dim} elements; 32, 64, 128 and 256 are supported"),
            });
        }
        let (source, tiling) = (source(dtype, dim), Tiling::of(dtype, dim));
        let kernels = |prefix: &str| -> Result<Vec<Kernel>> {
            tiling.rows.iter().map(|rows| device.kernel(&source, &format!("{prefix}_{rows}"))).collect()
        };
        Ok(Self {
            tiling,
            append: device.kernel(&source, "append")?,
            attend: kernels("attend")?,
            append_and_attend: kernels("append_and_attend")?,
        })
    }

    /// Launches the new tokens' attention, of which each sequence has at least one, after their keys and values have
    /// been appended: by the same kernel where there is one token, otherwise by one before.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn run(&self, stream: Stream, parameters: &CachedAttentionParameters) -> Result<()> {
        let CachedAttentionParameters { batch, count, heads, kv_heads, splits, .. } = *parameters;
        let rows = (heads / kv_heads) as usize * count as usize;
        let ctas = |n: u64| u32::try_from(n).ok().filter(|n| i32::try_from(*n).is_ok());
        let blocks = ctas(u64::from(batch) * u64::from(kv_heads) * self.tiling.blocks(rows) as u64);
        let warps = u64::from(batch) * u64::from(count) * 2 * u64::from(kv_heads);
        let (Some(blocks), Some(appending)) = (blocks, ctas(warps.div_ceil(u64::from(THREADS / 32)))) else {
            return Err(Error::TooLarge { rows, cols: batch as usize });
        };
        if splits as usize > MAX_GRID_ROWS {
            return Err(Error::TooLarge { rows, cols: splits as usize });
        }
        let launch = Launch::simple((blocks, splits), THREADS);
        let index = self.tiling.index(rows);
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
        for (rows, blocks) in [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (7, 2), (2048, 512)] {
            assert_eq!(Tiling::of(DataType::F32, 128).blocks(rows), blocks, "{rows}");
        }
        for (rows, blocks) in [(1, 1), (2, 1), (3, 2), (8, 4)] {
            assert_eq!(Tiling::of(DataType::F32, 256).blocks(rows), blocks, "{rows}");
        }
        for (rows, blocks) in [(1, 1), (8, 1), (9, 2), (2048, 256)] {
            assert_eq!(Tiling::of(DataType::BF16, 256).blocks(rows), blocks, "{rows}");
        }
    }
}
