//! Embeddings of tokens and positions.

use std::collections::{HashMap, hash_map::Entry};

use twofour::layer::Accumulate;

use super::{Builder, Saved};
use crate::{
    Result,
    block::{BatchShape, Norm, NormStatistics, Workspace},
    engine::{Buffer as _, Engine, Kind},
    model::Positions,
    parameter::Parameter,
    parts::parts,
};

/// The embedding of tokens, with those of positions and token types, their sum normalized, where a model has them.
#[derive(Debug)]
pub struct TokenEmbedding<E: Engine> {
    /// None where the head's weight is the table.
    words: Option<Parameter<E>>,
    positions: Option<Parameter<E>>,
    types: Option<Parameter<E>>,
    norm: Option<Norm<E>>,
    /// What embeddings of tokens are multiplied by, for each element of a row.
    factors: Option<E::Buffer>,
    width: usize,
    places: Places<E>,
}

parts!(TokenEmbedding<E> { words, positions, types, norm });

/// What a [`TokenEmbedding`] reads: [`Kind::Index`].
#[derive(Debug)]
pub(in crate::model) struct TokenIds<'a, E: Engine> {
    pub(in crate::model) tokens: &'a E::Buffer,
    /// The type of each token, where the model has types.
    pub(in crate::model) types: Option<&'a E::Buffer>,
}

/// What the backward pass of a [`TokenEmbedding`] reads: of a normalized sum, the sum.
#[derive(Debug)]
pub struct SavedEmbedding<E: Engine>(Option<(E::Buffer, NormStatistics<E>)>);

impl<E: Engine> Saved<E> for SavedEmbedding<E> {
    fn into_buffers(self) -> Vec<E::Buffer> {
        let of =
            |(sum, statistics): (E::Buffer, NormStatistics<E>)| std::iter::once(sum).chain(statistics.into_buffers());
        self.0.into_iter().flat_map(of).collect()
    }
}

impl<E: Engine> TokenEmbedding<E> {
    /// The embeddings of a model of text; of tokens only where the head's weight is not the table.
    ///
    /// # Errors
    /// A model of images; those of the builder.
    pub(in crate::model) fn new(builder: &Builder<'_, E>, is_tied: bool) -> Result<Self> {
        let (config, input) = (builder.config(), *builder.config().tokens()?);
        let table = |name: &str, rows: usize| builder.table(name, rows).map(Some);
        Ok(TokenEmbedding {
            words: if is_tied { None } else { table("embedding.weight", input.vocabulary)? },
            positions: match config.positions {
                Positions::Learned => table("positions.weight", input.context)?,
                Positions::Rotary(_) | Positions::Alibi(_) => None,
            },
            types: if input.token_types > 0 { table("types.weight", input.token_types)? } else { None },
            norm: input.is_normalized.then(|| builder.norm("embedding.norm")).transpose()?,
            factors: input.scale.map(|scale| builder.factors(scale)).transpose()?,
            width: config.width,
            places: Places::default(),
        })
    }

    /// The hidden states before the first layer; `table` is the embedding of tokens where it is the head's weight.
    pub(in crate::model) fn forward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        ids: &TokenIds<'_, E>,
        table: Option<&Parameter<E>>,
        shape: BatchShape,
    ) -> Result<(E::Buffer, SavedEmbedding<E>)> {
        let TokenEmbedding { words, positions, types, norm, factors, width, places } = self;
        let mut sum = workspace.compute(engine, shape.tokens() * *width)?;
        if let Some(words) = words.as_ref().or(table) {
            engine.embedding(words.compute(), *width, ids.tokens, &mut sum)?;
        }
        if let Some(factors) = factors {
            engine.scale_rows(factors, &mut sum)?;
        }
        let places = positions.is_some().then(|| places.of(engine, shape)).transpose()?;
        for (table, ids) in [(&*positions, places), (&*types, ids.types)] {
            let (Some(table), Some(ids)) = (table, ids) else { continue };
            let mut own = workspace.compute(engine, sum.len())?;
            engine.embedding(table.compute(), *width, ids, &mut own)?;
            engine.add(&own, &mut sum)?;
            workspace.give([own]);
        }
        match norm {
            None => Ok((sum, SavedEmbedding(None))),
            Some(norm) => {
                let (x, statistics) = norm.forward(engine, workspace, &sum, shape.tokens())?;
                Ok((x, SavedEmbedding(Some((sum, statistics)))))
            }
        }
    }

    /// Writes or adds the gradients of the tables and the norm. That of a `table` which is the head's weight is added
    /// to.
    pub(in crate::model) fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (saved, ids, table): (SavedEmbedding<E>, &TokenIds<'_, E>, Option<&mut Parameter<E>>),
        dx: E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<()> {
        let TokenEmbedding { words, positions, types, norm, factors, width, places } = self;
        let mut d_sum = match (norm, &saved.0) {
            (Some(norm), Some((sum, statistics))) => {
                let mut d_sum = workspace.compute(engine, dx.len())?;
                engine.clear(&mut d_sum)?;
                norm.backward(engine, (sum, statistics), &dx, &mut d_sum, accumulate)?;
                workspace.give([dx]);
                d_sum
            }
            _ => dx,
        };
        let places = positions.is_some().then(|| places.of(engine, shape)).transpose()?;
        let record = |table: &mut Parameter<E>, ids: &E::Buffer, d_sum: &E::Buffer, accumulate| {
            table.record(accumulate, |gradient, accumulate| {
                engine.embedding_gradient(d_sum, *width, ids, accumulate, gradient)
            })
        };
        for (table, ids) in [(positions, places), (types, ids.types)] {
            if let (Some(table), Some(ids)) = (table, ids) {
                record(table, ids, &d_sum, accumulate)?;
            }
        }
        if let Some(factors) = factors {
            engine.scale_rows(factors, &mut d_sum)?;
        }
        match (words, table) {
            (Some(words), _) => record(words, ids.tokens, &d_sum, accumulate)?,
            (None, Some(table)) => record(table, ids.tokens, &d_sum, Accumulate::Add)?,
            (None, None) => {}
        }
        workspace.give(saved.into_buffers().into_iter().chain([d_sum]));
        Ok(())
    }
}

/// The position of each token of batches, by their shape.
#[derive(Debug)]
pub(in crate::model) struct Places<E: Engine>(HashMap<BatchShape, E::Buffer>);

impl<E: Engine> Default for Places<E> {
    fn default() -> Self {
        Places(HashMap::new())
    }
}

impl<E: Engine> Places<E> {
    /// Returns the positions of a batch's tokens, [`Kind::Index`].
    pub(in crate::model) fn of(&mut self, engine: &E, shape: BatchShape) -> Result<&E::Buffer> {
        match self.0.entry(shape) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(vacant) => {
                let mut places = engine.zeros(Kind::Index, shape.tokens())?;
                let positions = (0..shape.batch).flat_map(|_| 0..shape.positions as u32);
                engine.write_ids(&mut places, &positions.collect::<Vec<_>>())?;
                Ok(vacant.insert(places))
            }
        }
    }
}
