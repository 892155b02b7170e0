//! Attention over the tokens of images, whole or cut into windows, with heads of any size and terms for relative
//! positions.

use twofour_cuda::{
    DataType, Error, Result,
    arguments::{Memory, at_if, expect_dimension, positive, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use super::super::{
    attention::{AttentionEngine, attention_forward},
    heads::{SplitHeads, SplitHeadsMut},
};
use crate::cuda::raw::{
    attention::FusedAttention,
    image::{ImageWindows, MAX_HEAD_DIM, WindowParameters},
};
use crate::{AttentionShape, ScoreOptions};

/// Elements that the heads in memory are a multiple of, where no kernel has their size: 16 bytes of a 16-bit type,
/// which GEMMs like.
const MULTIPLE: usize = 8;

/// The sizes of heads that kernels without scores in memory have.
const FUSED: [usize; 3] = [32, 64, 128];

/// The shape of attention over images.
///
/// A head `q · k / sqrt(head_dim)` of these kernels may be wider than the model's: behind the model's elements a query
/// has its terms for relative positions, a key is 1 at its own row and at its own column, and both are 0 from there on.
/// So kernels of one size compute every size up to theirs, and add the terms to the scores; 16-bit queries and terms
/// are rounded once more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ImageAttention {
    /// Images.
    pub images: usize,
    /// Tokens of an image. Those of a grid are row by row.
    pub tokens: usize,
    /// Rows and columns of the tokens, which windows and relative positions require; whatever it is otherwise.
    pub grid: [usize; 2],
    /// The side of the windows within which attention is, in tokens; none for attention over whole images. Windows at
    /// the right and the lower edge reach beyond the image, where tokens are zeros before the fused projection: only
    /// its bias is left of them.
    pub window: Option<usize>,
    /// Heads.
    pub heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether scores have terms for relative positions.
    pub relative: bool,
}

/// The tensors of [`image_attention`]; f32, f16 or bf16 where it says nothing else.
#[derive(Debug)]
pub struct ImageAttentionTensors<'a> {
    /// Queries, keys and values of each token, `[images · tokens, 3 · heads · head_dim]`.
    pub fused: DeviceSlice<'a>,
    /// The bias of the fused projection, `[3 · heads · head_dim]`, which padded positions have for queries, keys and
    /// values; none for zeros.
    pub bias: Option<DeviceSlice<'a>>,
    /// The vectors of the distances of rows and of columns, f32 `[2 · span - 1, head_dim]` each, where span is the side
    /// of a window, or the grid's rows and columns: that of the query `q` and the key `k` is vector `q - k + span - 1`.
    /// Required where the shape says `relative`.
    pub relative: Option<[DeviceSlice<'a>; 2]>,
    /// Room for queries, keys and values by heads, [`ImageAttention::heads_len`] each.
    pub apart: SplitHeadsMut<'a>,
    /// Room for the result by heads, [`ImageAttention::heads_len`].
    pub out: DeviceSliceMut<'a>,
    /// Room for the scores' log-sum-exps, f32 [`ImageAttention::lse_len`].
    pub lse: DeviceSliceMut<'a>,
    /// The result, `[images · tokens, heads · head_dim]`.
    pub merged: DeviceSliceMut<'a>,
}

impl ImageAttention {
    /// Rows and columns of the tokens that a query sees.
    fn span(&self) -> [usize; 2] {
        self.window.map_or(self.grid, |side| [side; 2])
    }

    /// Windows of an image: 1 where attention is over the whole image.
    fn windows(&self) -> usize {
        self.window.map_or(1, |side| self.grid.iter().map(|tokens| tokens.div_ceil(side.max(1))).product())
    }

    /// Elements of a head in memory: the model's and the terms, up to a size that kernels have.
    fn dim(&self, dtype: DataType) -> usize {
        let terms = if self.relative { self.span().iter().sum() } else { 0 };
        let needed = self.head_dim + terms;
        let fused = FUSED.into_iter().find(|dim| *dim >= needed && FusedAttention::computes(dtype, *dim));
        fused.unwrap_or(needed.next_multiple_of(MULTIPLE))
    }

    /// The shape of attention over the windows of all images.
    fn shape(&self, dtype: DataType) -> Result<AttentionShape> {
        Ok(AttentionShape {
            batch: product(self.images, self.windows())?,
            positions: self.window.map_or(Ok(self.tokens), |side| product(side, side))?,
            heads: self.heads,
            kv_heads: self.heads,
            head_dim: self.dim(dtype),
            causal: false,
            scores: ScoreOptions::default(),
        })
    }

    /// Elements of queries, of keys, of values and of the result by heads, in memory.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn heads_len(&self, dtype: DataType) -> Result<usize> {
        self.shape(dtype)?.query_len()
    }

    /// Log-sum-exps: one for each query of each head.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn lse_len(&self) -> Result<usize> {
        self.shape(DataType::F32)?.lse_len()
    }

    fn validate(&self) -> Result<()> {
        positive("the head_dim of attention over images", self.head_dim)?;
        positive("heads", self.heads)?;
        if let Some(side) = self.window {
            positive("the side of a window", side)?;
        }
        if self.window.is_none() && !self.relative {
            return Ok(());
        }
        let expected = product(self.grid[0], self.grid[1])?;
        if self.tokens != expected {
            return Err(Error::Length { what: "the tokens of an image's grid", expected, found: self.tokens });
        }
        if self.relative {
            expect_dimension("the head_dim of attention with relative positions", self.head_dim, MAX_HEAD_DIM)?;
        }
        Ok(())
    }
}

/// Computes `softmax(q kᵀ / sqrt(head_dim) + terms) v` for each head, over each image or within windows (Li et al.,
/// "Exploring Plain Vision Transformer Backbones for Object Detection", 2022). The terms of a query and a key are `q ·
/// r(rows) + q · r(columns)`, for the vectors of the distances of their rows and of their columns (Li et al., "MViTv2",
/// 2022).
///
/// # Errors
/// [`Error::DataType`] for other types than f32, f16 and bf16; those of [`Memory::at`] for a tensor that does not fit,
/// and for tokens that are not those of the grid; [`Error::Dimension`] for a shape that is none, or heads of more than
/// 256 elements with relative positions; those of [`attention_forward`].
pub fn image_attention(
    context: &LayerContext,
    shape: ImageAttention,
    tensors: ImageAttentionTensors<'_>,
) -> Result<()> {
    shape.validate()?;
    let ImageAttentionTensors { fused, bias, relative, apart, mut out, lse, merged } = tensors;
    let dtype = fused.dtype();
    let ImageAttention { tokens, grid, heads, head_dim, .. } = shape;
    let (width, all) = (product(heads, head_dim)?, product(shape.images, tokens)?);
    let heads_shape = shape.shape(dtype)?;
    let len = heads_shape.query_len()?;
    let [span_rows, span_columns] = if shape.relative { shape.span() } else { [0; 2] };
    let (mut rows, mut columns) = (0, 0);
    if shape.relative {
        let vectors = |span: usize| product((2 * span).saturating_sub(1), head_dim);
        let [of_rows, of_columns] = match relative {
            Some(tables) => tables.map(Some),
            None => [None; 2],
        };
        let missing =
            Error::Length { what: "the vectors of relative positions", expected: vectors(span_rows)?, found: 0 };
        let (Some(of_rows), Some(of_columns)) = (of_rows, of_columns) else { return Err(missing) };
        rows = of_rows.at("the vectors of rows", context, DataType::F32, vectors(span_rows)?)?;
        columns = of_columns.at("the vectors of columns", context, DataType::F32, vectors(span_columns)?)?;
    }
    let sequences = side("windows", heads_shape.batch)?;
    // What CTAs are counted by.
    side("positions of all windows", product(heads_shape.batch, heads_shape.positions)?)?;
    side("lines of all windows", product(product(heads_shape.batch, heads)?, span_rows + span_columns)?)?;
    let (dim, own) = (heads_shape.head_dim as f32, head_dim as f32);
    let parameters = WindowParameters {
        fused: fused.at("the fused projection", context, dtype, product(all, product(3, width)?)?)?,
        bias: at_if(bias.as_ref(), "the bias of the fused projection", context, dtype, product(3, width)?)?,
        rows,
        columns,
        q: apart.q.at("the queries", context, dtype, len)?,
        k: apart.k.at("the keys", context, dtype, len)?,
        v: apart.v.at("the values", context, dtype, len)?,
        out: out.at("the result by heads", context, dtype, len)?,
        merged: merged.at("the result", context, dtype, product(all, width)?)?,
        tokens: side("tokens", tokens)?,
        grid_rows: side("rows", grid[0])?,
        grid_columns: side("columns", grid[1])?,
        side: side("the side of a window", shape.window.unwrap_or(0))?,
        windows: side("windows", shape.windows())?,
        positions: side("positions", heads_shape.positions)?,
        span_rows: side("rows", span_rows)?,
        span_columns: side("columns", span_columns)?,
        heads: side("heads", heads)?,
        own: side("head_dim", head_dim)?,
        dim: side("head_dim", heads_shape.head_dim)?,
        // The kernels' scale is that of the wider heads.
        query_factor: (dim / own).sqrt(),
        term_factor: dim.sqrt(),
    };
    side("tokens", all)?;
    let kernels = ImageWindows::of(context, dtype)?;
    if len == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, CTAs to be counted in 31 bits and heads
    // to be small enough for terms; the wider heads have room for the terms; the stream is of their device.
    unsafe { kernels.split(context.raw(), sequences, &parameters) }?;
    let inputs = SplitHeads { q: apart.q.as_slice(), k: apart.k.as_slice(), v: apart.v.as_slice() };
    attention_forward(context, heads_shape, AttentionEngine::Fastest, inputs, out.reborrow(), lse)?;
    // SAFETY: as for the way to heads.
    unsafe { kernels.merge(context.raw(), sequences, &parameters) }
}
