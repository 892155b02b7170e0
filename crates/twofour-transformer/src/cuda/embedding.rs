//! Embedding: rows of a table by ids.

use twofour_cuda::{
    DataType, Error, Result,
    arguments::{Memory, at_if, positive, product, side},
    layer::{Accumulate, DeviceSlice, DeviceSliceMut, LayerContext},
    raw::column_sums::ColumnSumsTarget,
};

use crate::cuda::raw::embedding::{EmbeddingParameters, Embeddings};

/// The shape of an embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Embedding {
    /// Tokens.
    pub tokens: usize,
    /// Rows of the table.
    pub vocabulary: usize,
    /// Elements of a row.
    pub width: usize,
    /// Rows of the table of learned positions, which token `t` reads row `t % positions` of; 0 where there is no such
    /// table.
    pub positions: usize,
}

impl Embedding {
    fn parameters(&self) -> Result<EmbeddingParameters> {
        Ok(EmbeddingParameters {
            tokens: side("tokens", self.tokens)?,
            width: positive("the width of an embedding", self.width)?,
            vocabulary: positive("rows of the table", self.vocabulary)?,
            position_count: side("positions", self.positions)?,
            ..EmbeddingParameters::default()
        })
    }
}

/// Copies rows: `out[t] = table[ids[t]] + positions[t % positions]`, rounded once.
///
/// `ids` are u32 `[tokens]`, `table` is `[vocabulary, width]`, `positions` `[positions, width]` (required if and only
/// if the shape has positions), and `out` `[tokens, width]`. `status` is a u32 `[1]`: it becomes the number of a token
/// whose id is beyond the table, counted from 1, unless it was larger; such a token's row is that of its position
/// alone. The caller sets it to 0 before.
///
/// # Errors
/// [`Error::DataType`] for tables of another type than f32, f16 and bf16; those of [`Memory::at`] for a tensor that
/// does not fit; [`Error::Dimension`] for an empty table; [`Error::Driver`].
pub fn embedding_forward(
    context: &LayerContext,
    embedding: Embedding,
    ids: DeviceSlice<'_>,
    (table, positions): (DeviceSlice<'_>, Option<DeviceSlice<'_>>),
    out: DeviceSliceMut<'_>,
    status: DeviceSliceMut<'_>,
) -> Result<()> {
    let Embedding { tokens, vocabulary, width, positions: count } = embedding;
    let dtype = table.dtype();
    let kernels = Embeddings::of(context, dtype)?;
    let mut parameters = embedding.parameters()?;
    if positions.is_some() != (count > 0) {
        let found = positions.map_or(0, |positions| positions.len());
        return Err(Error::Length { what: "the table of positions", expected: product(count, width)?, found });
    }
    parameters.ids = ids.at("the ids", context, DataType::I32, tokens)?;
    parameters.table = table.at("the table", context, dtype, product(vocabulary, width)?)?;
    parameters.positions = at_if(positions.as_ref(), "the table of positions", context, dtype, product(count, width)?)?;
    parameters.out = out.at("the result", context, dtype, product(tokens, width)?)?;
    parameters.status = status.at("the status", context, DataType::I32, 1)?;
    if tokens == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.gather(context.raw(), &parameters) }
}

/// Computes the gradients of the tables: `dtable[id]` is the sum of `dy[t]` over the tokens with that id, and
/// `dpositions[p]` the sum over those at position `p`, each in a fixed order.
///
/// `dy` is `[tokens, width]` of f32, f16 or bf16; `dtable` is f32 `[vocabulary, width]`, and `dpositions` f32
/// `[positions, width]`. Tokens are put in the order of their ids by a counting sort, and within an id in that of the
/// tokens. A token whose id is beyond the table is left out, and `status` becomes its number as in
/// [`embedding_forward`].
///
/// # Errors
/// Those of [`embedding_forward`]; [`Error::Multiple`] where there are positions and `tokens` is not a multiple of
/// their number; those of allocating workspace.
pub fn embedding_gradient(
    context: &LayerContext,
    embedding: Embedding,
    ids: DeviceSlice<'_>,
    dy: DeviceSlice<'_>,
    (dtable, dpositions): (DeviceSliceMut<'_>, Option<DeviceSliceMut<'_>>),
    accumulate: Accumulate,
    status: DeviceSliceMut<'_>,
) -> Result<()> {
    let Embedding { tokens, vocabulary, width, positions: count } = embedding;
    let dtype = dy.dtype();
    let kernels = Embeddings::of(context, dtype)?;
    let mut parameters = embedding.parameters()?;
    parameters.ids = ids.at("the ids", context, DataType::I32, tokens)?;
    parameters.dy = dy.at("the output gradient", context, dtype, product(tokens, width)?)?;
    parameters.gradient =
        dtable.at("the gradient of the table", context, DataType::F32, product(vocabulary, width)?)?;
    parameters.status = status.at("the status", context, DataType::I32, 1)?;
    parameters.adds = u32::from(accumulate == Accumulate::Add);
    if let Some(dpositions) = dpositions {
        let (what, len) = ("the gradient of the positions", product(count, width)?);
        let sums = dpositions.at(what, context, DataType::F32, len)?;
        twofour_cuda::arguments::expect_multiple("tokens, by the number of positions", tokens, count.max(1))?;
        let (kernel, rows) = (context.column_sums(dtype)?, tokens / count.max(1));
        let mut work = context.work();
        let [workspace] = work.parts([kernel.workspace_bytes(rows, len)])?;
        let accumulate = accumulate == Accumulate::Add;
        let to = ColumnSumsTarget { sums, dtype: DataType::F32, accumulate, workspace };
        // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
        unsafe { kernel.run(context.raw(), parameters.dy, rows, len, to) }?;
    }
    let mut work = context.work();
    // Three numbers for each id and the cursor, of which `counts`, `filled` and the cursor are zeroed together.
    let zeroed = 4 * (2 * vocabulary + 1);
    let [first, starts, unordered, ordered] = work.parts([zeroed, 4 * vocabulary, 4 * tokens, 4 * tokens])?;
    (parameters.counts, parameters.filled) = (first, first + 4 * vocabulary as u64);
    parameters.cursor = first + 8 * vocabulary as u64;
    (parameters.starts, parameters.unordered, parameters.ordered) = (starts, unordered, ordered);
    // SAFETY: the workspace has room for that many bytes, and the stream is of its device.
    unsafe { cudarc::driver::result::memset_d8_async(first, 0, zeroed, context.stream().cu_stream()) }
        .map_err(|error| Error::driver("zeroing counts", error))?;
    // SAFETY: the slices have been found to be as long as the shape requires, the workspace has room for the sorted
    // tokens and has been zeroed where the kernels count, and the stream is of their device.
    unsafe { kernels.gradient(context.raw(), &parameters) }
}
