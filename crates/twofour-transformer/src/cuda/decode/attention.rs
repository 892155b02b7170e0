//! Attention of new tokens over a cache of keys and values.

use std::f32::consts::LOG2_E;

use twofour_cuda::{
    DataType, Error, Result,
    arguments::{MAX_DIMENSION, Memory, at_if, expect_dimension, expect_multiple, product, side},
    layer::{DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::{
    ScoreOptions,
    cuda::{
        Rotary,
        raw::decode::{
            attention as raw,
            attention::{CachedAttentionParameters, MAX_KEYS, MAX_SPLITS, Tiling, partial_of},
        },
    },
};

/// The shape of a cache of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheShape {
    /// Sequences.
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`: grouped queries (Ainslie et al., "GQA", 2023).
    pub kv_heads: usize,
    /// Elements of a head: 32, 64, 128 or 256.
    pub head_dim: usize,
    /// Tokens of a sequence that fit.
    pub capacity: usize,
}

impl CacheShape {
    /// Returns the number of elements of the keys of all sequences, or of the values.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn len(&self) -> Result<usize> {
        product(product(self.batch, self.kv_heads)?, product(self.capacity, self.head_dim)?)
    }

    /// Returns whether there is no room at all.
    pub fn is_empty(&self) -> bool {
        [self.batch, self.kv_heads, self.capacity, self.head_dim].contains(&0)
    }

    fn validate(&self) -> Result<()> {
        expect_dimension("heads of keys and values", self.kv_heads, MAX_DIMENSION)?;
        expect_dimension("heads", self.heads, MAX_DIMENSION)?;
        expect_dimension("sequences", self.batch, MAX_DIMENSION)?;
        expect_dimension("the capacity of a cache", self.capacity, MAX_DIMENSION - MAX_KEYS)?;
        expect_multiple("heads, by those of keys and values", self.heads, self.kv_heads)?;
        self.len()?;
        Ok(())
    }
}

/// Gains of the RMS normalization of each head of queries and of keys before their rotation (Qwen3), f32 `[head_dim]`
/// each.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorms<'a> {
    /// The gain of queries.
    pub query: DeviceSlice<'a>,
    /// The gain of keys.
    pub key: DeviceSlice<'a>,
    /// ε, added to the mean square.
    pub epsilon: f32,
}

/// The tensors of [`CachedAttention::run`].
#[derive(Debug)]
pub struct CachedTokens<'a> {
    /// Queries, keys and values of the new tokens, `[batch, count, (heads + 2 · kv_heads) · head_dim]`, not rotated.
    pub qkv: DeviceSlice<'a>,
    /// The number of tokens of each sequence before the new ones, u32 `[batch]`.
    pub positions: DeviceSlice<'a>,
    /// The rotation of queries and keys at each position, `[capacity, head_dim / 2]`.
    pub rotary: Option<Rotary<'a>>,
    /// The normalization of queries and keys.
    pub norms: Option<HeadNorms<'a>>,
    /// What becomes of scores.
    pub scores: ScoreOptions,
    /// A score of each head that takes its share beside the keys' and has no value (gpt-oss), f32 `[heads]`. Neither
    /// the scale nor the soft cap is applied to it.
    pub sinks: Option<DeviceSlice<'a>>,
    /// The cached keys, `[batch, kv_heads, capacity, head_dim]`, which the new ones are appended to.
    pub keys: DeviceSliceMut<'a>,
    /// The cached values.
    pub values: DeviceSliceMut<'a>,
    /// The result, `[batch, count, heads · head_dim]`.
    pub out: DeviceSliceMut<'a>,
}

/// Causal attention over caches of one shape, with workspace. Calls share the workspace, and run in stream order.
#[derive(Debug)]
pub struct CachedAttention {
    context: LayerContext,
    kernels: raw::CachedAttention,
    shape: CacheShape,
    dtype: DataType,
    /// CTAs that a cache is split into, at most.
    ctas: usize,
    partial: DeviceBuffer,
    arrived: DeviceBuffer,
}

impl CachedAttention {
    /// Loads the kernels for f32, f16 or bf16, and allocates the workspace.
    ///
    /// # Errors
    /// [`Error::DataType`] for another type; [`Error::NoMethod`] for heads of another size than 32, 64, 128 and 256;
    /// [`Error::Dimension`] and [`Error::Multiple`] for a shape that is none; those of compiling, loading and
    /// allocating.
    pub fn new(context: &LayerContext, dtype: DataType, shape: CacheShape) -> Result<Self> {
        shape.validate()?;
        let kernels = raw::CachedAttention::of(context, dtype, shape.head_dim)?;
        let tiling = Tiling::of(dtype, shape.head_dim);
        let ctas = tiling.ctas * context.device().sms() as usize;
        let rows = ctas * tiling.most_rows();
        let partial = DeviceBuffer::zeros(context, DataType::F32, rows * partial_of(shape.head_dim))?;
        let arrived = DeviceBuffer::zeros(context, DataType::I32, ctas)?;
        Ok(Self { context: context.clone(), kernels, shape, dtype, ctas, partial, arrived })
    }

    /// Returns the shape of the caches.
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Returns the splits of a cache, and the tiles of each, for this many new tokens of each sequence: as many as fill
    /// the device.
    fn splits(&self, count: usize) -> (usize, usize) {
        let CacheShape { batch, heads, kv_heads, head_dim, capacity } = self.shape;
        let tiling = Tiling::of(self.dtype, head_dim);
        let blocks = batch * kv_heads * tiling.blocks(heads / kv_heads * count);
        let (wanted, all) = ((self.ctas / blocks).clamp(1, MAX_SPLITS), capacity.div_ceil(tiling.tile));
        let tiles = all.div_ceil(wanted);
        (all.div_ceil(tiles), tiles)
    }

    /// Appends the keys and values of `count` new tokens of each sequence to the cache, and computes their causal
    /// attention, softmax(scores) v, over everything in it. Queries and keys are normalized and rotated first, where
    /// the tensors say so. A sequence whose cache has no room for the new tokens is left out: its cache and its results
    /// stay as they are.
    ///
    /// # Errors
    /// Those of [`Memory::at`] for a tensor that does not fit; [`Error::Setting`] for an option that scores cannot
    /// have; [`Error::TooLarge`]; [`Error::Driver`].
    pub fn run(&self, count: usize, tensors: CachedTokens<'_>) -> Result<()> {
        let (context, dtype) = (&self.context, self.dtype);
        let CacheShape { batch, heads, kv_heads, head_dim, capacity } = self.shape;
        let CachedTokens { qkv, positions, rotary, norms, scores, sinks, keys, values, out } = tensors;
        let (tokens, cached) = (product(batch, count)?, self.shape.len()?);
        let of_token = product(heads + 2 * kv_heads, head_dim)?;
        let table = product(capacity, head_dim / 2)?;
        let rotary = rotary.as_ref();
        if let Some((what, found, expected)) = scores.fault() {
            return Err(Error::Setting { what, found, expected });
        }
        let window = scores.window.map_or(MAX_DIMENSION, |window| window.min(MAX_DIMENSION));
        let scale = scores.scale.map_or_else(|| LOG2_E / (head_dim as f32).sqrt(), |scale| LOG2_E * scale);
        let (splits, tiles) = self.splits(count.max(1));
        let parameters = CachedAttentionParameters {
            qkv: qkv.at("queries, keys and values", context, dtype, product(tokens, of_token)?)?,
            k: keys.at("the cached keys", context, dtype, cached)?,
            v: values.at("the cached values", context, dtype, cached)?,
            out: out.at("the result", context, dtype, product(tokens, product(heads, head_dim)?)?)?,
            positions: positions.at("the positions", context, DataType::I32, batch)?,
            cos: at_if(rotary.map(|r| &r.cos), "the table of cosines", context, DataType::F32, table)?,
            sin: at_if(rotary.map(|r| &r.sin), "the table of sines", context, DataType::F32, table)?,
            query_gain: at_if(
                norms.as_ref().map(|n| &n.query),
                "the gain of queries",
                context,
                DataType::F32,
                head_dim,
            )?,
            key_gain: at_if(norms.as_ref().map(|n| &n.key), "the gain of keys", context, DataType::F32, head_dim)?,
            sinks: at_if(sinks.as_ref(), "the sinks", context, DataType::F32, heads)?,
            partial: self.partial.as_slice().at("partial results", context, DataType::F32, self.partial.len())?,
            arrived: self.arrived.as_slice().at("counters", context, DataType::I32, self.arrived.len())?,
            batch: side("sequences", batch)?,
            count: side("new tokens", count)?,
            heads: side("heads", heads)?,
            kv_heads: side("heads of keys and values", kv_heads)?,
            capacity: side("the capacity of a cache", capacity)?,
            splits: side("splits", splits)?,
            tiles: side("tiles", tiles)?,
            window: side("the window of attention", window)?,
            epsilon: norms.map_or(0.0, |norms| norms.epsilon),
            scale: scores.soft_cap.map_or(scale, |cap| 2.0 * scale / cap),
            soft_cap: scores.soft_cap.unwrap_or(0.0) * LOG2_E,
        };
        if count == 0 {
            return Ok(());
        }
        twofour_cuda::arguments::expect_pointers(&[
            ("the cached keys", parameters.k, 16),
            ("the cached values", parameters.v, 16),
        ])?;
        // SAFETY: the slices have been found to be as long as the shape requires; the workspace has room for all CTAs
        // where the cache is split; the stream is of their device.
        unsafe { self.kernels.run(context.raw(), &parameters) }
    }
}
