//! The heads of an encoder that trains.

use twofour::layer::Accumulate;

use super::BertBatch;
use crate::{
    Result,
    block::{BatchShape, Norm, NormStatistics, Workspace},
    engine::{Buffer as _, Engine, Kind, Nonlinearity},
    linear::Linear,
    model::Saved,
    parameter::Parameter,
    parts::{ModelParts, Part, PartMut, parts},
};

/// What follows the last layer.
#[derive(Debug)]
pub enum BertHead<E: Engine> {
    /// Scores of the vocabulary for masked tokens.
    Masked(Box<MaskedHead<E>>),
    /// Scores of each token as the first and as the last one of the answer.
    Answers(Linear<E>),
}

/// `decoder(norm(activation(transform(x))))` for the hidden states of masked tokens; the decoder's weight is the
/// embedding of tokens.
#[derive(Debug)]
pub struct MaskedHead<E: Engine> {
    transform: Linear<E>,
    norm: Norm<E>,
    decoder: Linear<E>,
    activation: Nonlinearity,
}

parts!(MaskedHead<E> { transform, norm, decoder });

impl<E: Engine> ModelParts<E> for BertHead<E> {
    fn visit<'a>(&'a self, visit: &mut dyn FnMut(Part<'a, E>)) {
        match self {
            BertHead::Masked(head) => head.visit(visit),
            BertHead::Answers(linear) => linear.visit(visit),
        }
    }

    fn visit_mut<'a>(&'a mut self, visit: &mut dyn FnMut(PartMut<'a, E>)) {
        match self {
            BertHead::Masked(head) => head.visit_mut(visit),
            BertHead::Answers(linear) => linear.visit_mut(visit),
        }
    }
}

/// What the backward pass of a [`BertHead`] reads.
#[derive(Debug)]
pub enum SavedBertHead<E: Engine> {
    /// For masked tokens.
    Masked(SavedMasked<E>),
    /// For answers: nothing.
    Answers,
}

impl<E: Engine> Saved<E> for SavedBertHead<E> {
    fn into_buffers(self) -> Vec<E::Buffer> {
        let SavedBertHead::Masked(saved) = self else { return vec![] };
        let SavedMasked { gathered, transformed, activated, statistics, normalized } = saved;
        [gathered, transformed, activated, normalized].into_iter().chain(statistics.into_buffers()).collect()
    }
}

/// What the backward pass of a [`MaskedHead`] reads.
#[derive(Debug)]
pub struct SavedMasked<E: Engine> {
    gathered: E::Buffer,
    transformed: E::Buffer,
    activated: E::Buffer,
    statistics: NormStatistics<E>,
    normalized: E::Buffer,
}

impl<E: Engine> MaskedHead<E> {
    pub(super) fn new(transform: Linear<E>, norm: Norm<E>, decoder: Linear<E>, activation: Nonlinearity) -> Self {
        MaskedHead { transform, norm, decoder, activation }
    }

    /// The scores of the vocabulary for each masked token.
    fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (x, batch): (&E::Buffer, &BertBatch<E>),
    ) -> Result<(E::Buffer, SavedMasked<E>)> {
        let (width, rows) = (self.norm.width(), batch.rows.len());
        let mut gathered = workspace.compute(engine, rows * width)?;
        engine.embedding(x, width, &batch.rows, &mut gathered)?;
        let mut transformed = workspace.compute(engine, rows * width)?;
        self.transform.forward(engine, &gathered, rows, &mut transformed)?;
        let mut activated = workspace.compute(engine, rows * width)?;
        engine.activation(self.activation.into(), &transformed, &mut activated)?;
        let (normalized, statistics) = self.norm.forward(engine, workspace, &activated, rows)?;
        let mut scores = workspace.compute(engine, rows * self.decoder.out_features())?;
        self.decoder.forward(engine, &normalized, rows, &mut scores)?;
        Ok((scores, SavedMasked { gathered, transformed, activated, statistics, normalized }))
    }

    /// The gradient of the hidden states from that of the scores.
    fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (saved, batch, tokens): (SavedMasked<E>, &BertBatch<E>, usize),
        d_scores: E::Buffer,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let SavedMasked { gathered, transformed, activated, statistics, normalized } = saved;
        let (width, rows) = (self.norm.width(), batch.rows.len());
        self.decoder.parameter_gradients(engine, &d_scores, &normalized, rows, accumulate)?;
        let mut d_normalized = normalized;
        self.decoder.input_gradient(engine, &d_scores, rows, &mut d_normalized)?;
        let mut d_activated = workspace.compute(engine, rows * width)?;
        engine.clear(&mut d_activated)?;
        self.norm.backward(engine, (&activated, &statistics), &d_normalized, &mut d_activated, accumulate)?;
        let through = (self.activation, &transformed);
        self.transform.gradients_through(engine, through, &mut d_activated, (&gathered, rows), accumulate)?;
        let mut d_gathered = gathered;
        self.transform.input_gradient(engine, &d_activated, rows, &mut d_gathered)?;
        // Rows of tokens that are not masked get zeros.
        let mut wide = workspace.take(engine, Kind::Wide, tokens * width)?;
        engine.embedding_gradient(&d_gathered, width, &batch.rows, Accumulate::Overwrite, &mut wide)?;
        let mut dx = workspace.compute(engine, tokens * width)?;
        engine.round(&wide, &mut dx)?;
        let compute = [d_scores, d_normalized, d_activated, d_gathered, transformed, activated, wide];
        workspace.give(compute.into_iter().chain(statistics.into_buffers()));
        Ok(dx)
    }
}

impl<E: Engine> BertHead<E> {
    /// What each target is one of.
    pub(super) fn classes(&self, shape: BatchShape) -> usize {
        match self {
            BertHead::Masked(head) => head.decoder.out_features(),
            BertHead::Answers(_) => shape.positions,
        }
    }

    /// The scores of the targets.
    pub(super) fn scores(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        hidden: (&E::Buffer, &BertBatch<E>),
    ) -> Result<(E::Buffer, SavedBertHead<E>)> {
        match self {
            BertHead::Masked(head) => {
                let (scores, saved) = head.forward(engine, workspace, hidden)?;
                Ok((scores, SavedBertHead::Masked(saved)))
            }
            BertHead::Answers(linear) => Ok((ends(engine, workspace, linear, hidden)?, SavedBertHead::Answers)),
        }
    }

    /// Writes or adds the gradients of the head's parameters, from that of the scores, and returns that of the hidden
    /// states.
    pub(super) fn gradient(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (x, saved, batch): (E::Buffer, SavedBertHead<E>, &BertBatch<E>),
        d_scores: E::Buffer,
        tokens: usize,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        match (self, saved) {
            (BertHead::Masked(head), SavedBertHead::Masked(saved)) => {
                workspace.give([x]);
                head.backward(engine, workspace, (saved, batch, tokens), d_scores, accumulate)
            }
            (BertHead::Answers(linear), _) => {
                let by_end = d_scores;
                let mut d_scores = workspace.compute(engine, 2 * tokens)?;
                engine.embedding(&by_end, 1, &batch.back, &mut d_scores)?;
                linear.parameter_gradients(engine, &d_scores, &x, tokens, accumulate)?;
                let mut dx = x;
                linear.input_gradient(engine, &d_scores, tokens, &mut dx)?;
                workspace.give([by_end, d_scores]);
                Ok(dx)
            }
            (BertHead::Masked(_), SavedBertHead::Answers) => Ok(x),
        }
    }

    /// The embedding of tokens, where it is the head's weight.
    pub(super) fn table(&self) -> Option<&Parameter<E>> {
        match self {
            BertHead::Masked(head) => Some(head.decoder.weight()),
            BertHead::Answers(_) => None,
        }
    }

    /// The mutable embedding of tokens, where it is the head's weight.
    pub(super) fn table_mut(&mut self) -> Option<&mut Parameter<E>> {
        match self {
            BertHead::Masked(head) => Some(head.decoder.weight_mut()),
            BertHead::Answers(_) => None,
        }
    }
}

/// The scores of all tokens of a sequence as the first of the answer, and then as the last: `[sequences, 2,
/// positions]`.
fn ends<E: Engine>(
    engine: &E,
    workspace: &mut Workspace<E>,
    linear: &Linear<E>,
    (x, batch): (&E::Buffer, &BertBatch<E>),
) -> Result<E::Buffer> {
    let tokens = batch.tokens.len();
    let mut scores = workspace.compute(engine, 2 * tokens)?;
    linear.forward(engine, x, tokens, &mut scores)?;
    let mut by_end = workspace.compute(engine, 2 * tokens)?;
    engine.embedding(&scores, 1, &batch.rows, &mut by_end)?;
    workspace.give([scores]);
    Ok(by_end)
}
