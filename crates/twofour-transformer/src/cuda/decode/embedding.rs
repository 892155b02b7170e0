//! The embedding of new tokens.

use twofour_cuda::{
    DataType, Error, Result,
    arguments::{Memory, at_if, positive, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::decode::embed::{EmbedParameters, Embeds};

/// The shape of an embedding of new tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TokenEmbedding {
    /// Sequences.
    pub batch: usize,
    /// New tokens of each.
    pub count: usize,
    /// Rows of the table.
    pub vocabulary: usize,
    /// Elements of a row.
    pub width: usize,
    /// Rows of the table of learned positions; 0 where there is no such table.
    pub context: usize,
}

/// Writes the residual stream of new tokens, `x[s, t] = table[ids[s, t]] + learned[positions[s] + t]`, in f32.
///
/// `ids` are u32 `[batch, count]`, `positions` u32 `[batch]` (tokens before the new ones), `table` `[vocabulary,
/// width]`, `learned` `[context, width]` (required if and only if the shape has a context), `x` f32 `[batch, count,
/// width]`. An id beyond the table has a row of zeros, and a position beyond the context no vector.
///
/// # Errors
/// [`Error::DataType`] for tables of another type than f32, f16 and bf16; those of [`Memory::at`] for a tensor that
/// does not fit; [`Error::Dimension`] for an empty table; [`Error::Driver`].
pub fn embed_tokens(
    context: &LayerContext,
    embedding: TokenEmbedding,
    (ids, positions): (DeviceSlice<'_>, DeviceSlice<'_>),
    (table, learned): (DeviceSlice<'_>, Option<DeviceSlice<'_>>),
    x: DeviceSliceMut<'_>,
) -> Result<()> {
    let TokenEmbedding { batch, count, vocabulary, width, context: rows } = embedding;
    let (dtype, tokens) = (table.dtype(), product(batch, count)?);
    let kernel = Embeds::of(context, dtype)?;
    if learned.is_some() != (rows > 0) {
        let found = learned.map_or(0, |learned| learned.len());
        return Err(Error::Length { what: "the table of positions", expected: product(rows, width)?, found });
    }
    let parameters = EmbedParameters {
        ids: ids.at("the ids", context, DataType::I32, tokens)?,
        positions: positions.at("the positions", context, DataType::I32, batch)?,
        table: table.at("the table", context, dtype, product(vocabulary, width)?)?,
        learned: at_if(learned.as_ref(), "the table of positions", context, dtype, product(rows, width)?)?,
        x: x.at("the residual stream", context, DataType::F32, product(tokens, width)?)?,
        count: side("new tokens", count)?,
        width: positive("the width of an embedding", width)?,
        vocabulary: positive("rows of the table", vocabulary)?,
        context: side("rows of the table of positions", rows)?,
    };
    if tokens == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernel.run(context.raw(), side("tokens", tokens)?, &parameters) }
}
