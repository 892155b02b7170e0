//! The embeddings of an encoder that trains.

use twofour::layer::Accumulate;

use super::BertBatch;
use crate::{
    Result,
    block::{Norm, NormStatistics, Workspace},
    engine::{Buffer as _, Engine},
    parameter::Parameter,
};

/// Embeddings of tokens, positions and token types, added and normalized.
#[derive(Debug)]
pub(super) struct BertEmbeddings<E: Engine> {
    /// Of tokens; none where the head's weight is the table.
    words: Option<Parameter<E>>,
    positions: Parameter<E>,
    types: Parameter<E>,
    norm: Norm<E>,
}

/// What the backward pass reads.
pub(super) struct SavedEmbeddings<E: Engine> {
    sum: E::Buffer,
    statistics: NormStatistics<E>,
}

impl<E: Engine> BertEmbeddings<E> {
    pub(super) fn new(words: Option<Parameter<E>>, [positions, types]: [Parameter<E>; 2], norm: Norm<E>) -> Self {
        BertEmbeddings { words, positions, types, norm }
    }

    /// The hidden states before the first layer; `table` is the embedding of tokens where it is the head's.
    pub(super) fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        batch: &BertBatch<E>,
        table: Option<&Parameter<E>>,
    ) -> Result<(E::Buffer, SavedEmbeddings<E>)> {
        let (width, tokens) = (self.norm.width(), batch.tokens.len());
        let mut sum = workspace.compute(engine, tokens * width)?;
        let mut own = workspace.compute(engine, tokens * width)?;
        let words = self.words.as_ref().or(table);
        if let Some(words) = words {
            engine.embedding(words.compute(), width, &batch.tokens, &mut sum)?;
        }
        for (table, ids) in [(&self.positions, &batch.positions), (&self.types, &batch.types)] {
            engine.embedding(table.compute(), width, ids, &mut own)?;
            engine.add(&own, &mut sum)?;
        }
        workspace.give([own]);
        let (x, statistics) = self.norm.forward(engine, workspace, &sum, tokens)?;
        Ok((x, SavedEmbeddings { sum, statistics }))
    }

    /// Writes or adds the gradients of the tables and the norm. That of a `table` which is the head's is added to.
    pub(super) fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (saved, batch, table): (SavedEmbeddings<E>, &BertBatch<E>, Option<&mut Parameter<E>>),
        dx: E::Buffer,
        accumulate: Accumulate,
    ) -> Result<()> {
        let width = self.norm.width();
        let mut d_sum = workspace.compute(engine, dx.len())?;
        engine.clear(&mut d_sum)?;
        self.norm.backward(engine, (&saved.sum, &saved.statistics), &dx, &mut d_sum, accumulate)?;
        let words = match (&mut self.words, table) {
            (Some(words), _) => Some((words, accumulate)),
            (None, table) => table.map(|table| (table, Accumulate::Add)),
        };
        let others = [(&mut self.positions, accumulate), (&mut self.types, accumulate)];
        let ids = [&batch.positions, &batch.types];
        let all = words.into_iter().zip([&batch.tokens]).chain(others.into_iter().zip(ids));
        for ((table, accumulate), ids) in all {
            table.record(accumulate, |gradient, accumulate| {
                engine.embedding_gradient(&d_sum, width, ids, accumulate, gradient)
            })?;
        }
        workspace.give([dx, d_sum]);
        saved.release(workspace);
        Ok(())
    }

    pub(super) fn parameters(&self) -> impl Iterator<Item = &Parameter<E>> {
        self.words.iter().chain([&self.positions, &self.types]).chain(self.norm.parameters())
    }

    pub(super) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<E>> {
        let tables = self.words.iter_mut().chain([&mut self.positions, &mut self.types]);
        tables.chain(self.norm.parameters_mut())
    }
}

impl<E: Engine> SavedEmbeddings<E> {
    pub(super) fn release(self, workspace: &mut Workspace<E>) {
        workspace.give([self.sum].into_iter().chain(self.statistics.into_buffers()));
    }
}
