//! The heads of an encoder that trains.

use twofour::layer::{Accumulate, Activation};

use super::BertBatch;
use crate::{
    Result,
    block::{BatchShape, Norm, NormStatistics, Workspace},
    engine::{Buffer as _, Engine, Kind},
    linear::Linear,
    parameter::Parameter,
};

/// What follows the last layer.
#[derive(Debug)]
pub(super) enum BertHead<E: Engine> {
    /// Scores of the vocabulary for masked tokens.
    Masked(Box<MaskedHead<E>>),
    /// Scores of each token as the first and as the last one of the answer.
    Answers(Linear<E>),
}

/// `decoder(norm(activation(transform(x))))` for the hidden states of masked tokens; the decoder's weight is the embedding of tokens.
#[derive(Debug)]
pub(super) struct MaskedHead<E: Engine> {
    transform: Linear<E>,
    norm: Norm<E>,
    decoder: Linear<E>,
    activation: Activation,
}

/// What the backward pass of a [`MaskedHead`] reads.
struct SavedMasked<E: Engine> {
    gathered: E::Buffer,
    transformed: E::Buffer,
    activated: E::Buffer,
    statistics: NormStatistics<E>,
    normalized: E::Buffer,
}

impl<E: Engine> MaskedHead<E> {
    pub(super) fn new(transform: Linear<E>, norm: Norm<E>, decoder: Linear<E>, activation: Activation) -> Self {
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
        engine.activation(self.activation, &transformed, &mut activated)?;
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

impl<E: Engine> SavedMasked<E> {
    fn release(self, workspace: &mut Workspace<E>) {
        let SavedMasked { gathered, transformed, activated, statistics, normalized } = self;
        let all = [gathered, transformed, activated, normalized];
        workspace.give(all.into_iter().chain(statistics.into_buffers()));
    }
}

impl<E: Engine> BertHead<E> {
    /// Adds the cross-entropies of the targets to `loss`.
    pub(super) fn loss(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (x, batch): (&E::Buffer, &BertBatch<E>),
        shape: BatchShape,
        loss: &mut E::Buffer,
    ) -> Result<()> {
        let (mut scores, classes) = match self {
            BertHead::Masked(head) => {
                let (scores, saved) = head.forward(engine, workspace, (x, batch))?;
                saved.release(workspace);
                (scores, head.decoder.out_features())
            }
            BertHead::Answers(linear) => (ends(engine, workspace, linear, (x, batch))?, shape.positions),
        };
        engine.cross_entropy(classes, &mut scores, &batch.targets, None, loss)?;
        workspace.give([scores]);
        Ok(())
    }

    /// Adds the cross-entropies of the targets to `loss`, writes or adds the gradients, times `scale`, of the head's parameters, and returns that of the hidden states.
    pub(super) fn gradients(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (x, batch): (&E::Buffer, &BertBatch<E>),
        shape: BatchShape,
        (scale, accumulate): (f32, Accumulate),
        loss: &mut E::Buffer,
    ) -> Result<E::Buffer> {
        let tokens = shape.tokens();
        match self {
            BertHead::Masked(head) => {
                let (mut scores, saved) = head.forward(engine, workspace, (x, batch))?;
                let classes = head.decoder.out_features();
                engine.cross_entropy(classes, &mut scores, &batch.targets, Some(scale), loss)?;
                head.backward(engine, workspace, (saved, batch, tokens), scores, accumulate)
            }
            BertHead::Answers(linear) => {
                let mut by_end = ends(engine, workspace, linear, (x, batch))?;
                engine.cross_entropy(shape.positions, &mut by_end, &batch.targets, Some(scale), loss)?;
                let mut d_scores = workspace.compute(engine, 2 * tokens)?;
                engine.embedding(&by_end, 1, &batch.back, &mut d_scores)?;
                linear.parameter_gradients(engine, &d_scores, x, tokens, accumulate)?;
                let mut dx = workspace.compute(engine, tokens * linear.in_features())?;
                linear.input_gradient(engine, &d_scores, tokens, &mut dx)?;
                workspace.give([by_end, d_scores]);
                Ok(dx)
            }
        }
    }

    /// The embedding of tokens, where it is the head's weight.
    pub(super) fn table(&self) -> Option<&Parameter<E>> {
        match self {
            BertHead::Masked(head) => Some(head.decoder.weight()),
            BertHead::Answers(_) => None,
        }
    }

    /// The same for changing it.
    pub(super) fn table_mut(&mut self) -> Option<&mut Parameter<E>> {
        match self {
            BertHead::Masked(head) => Some(head.decoder.weight_mut()),
            BertHead::Answers(_) => None,
        }
    }

    /// The parameters whose gradients are complete when the head's backward pass is: all but the embedding of tokens.
    pub(super) fn complete_parameters_mut(&mut self) -> Vec<&mut Parameter<E>> {
        match self {
            BertHead::Masked(head) => {
                let MaskedHead { transform, norm, decoder, .. } = &mut **head;
                // The weight comes first, then the bias.
                transform
                    .parameters_mut()
                    .chain(norm.parameters_mut())
                    .chain(decoder.parameters_mut().skip(1))
                    .collect()
            }
            BertHead::Answers(linear) => linear.parameters_mut().collect(),
        }
    }

    pub(super) fn norm(&self) -> Option<&Norm<E>> {
        match self {
            BertHead::Masked(head) => Some(&head.norm),
            BertHead::Answers(_) => None,
        }
    }

    pub(super) fn norm_and_linears_mut(&mut self) -> (Option<&mut Norm<E>>, Vec<&mut Linear<E>>) {
        match self {
            BertHead::Masked(head) => {
                let MaskedHead { transform, norm, decoder, .. } = &mut **head;
                (Some(norm), vec![transform, decoder])
            }
            BertHead::Answers(linear) => (None, vec![linear]),
        }
    }

    pub(super) fn linears(&self) -> Vec<&Linear<E>> {
        match self {
            BertHead::Masked(head) => vec![&head.transform, &head.decoder],
            BertHead::Answers(linear) => vec![linear],
        }
    }

    pub(super) fn linears_mut(&mut self) -> Vec<&mut Linear<E>> {
        self.norm_and_linears_mut().1
    }
}

/// The scores of all tokens of a sequence as the first of the answer, and then as the last: `[sequences, 2, positions]`.
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
