//! The layers of pre-norm models, and the norm behind them.

use twofour::layer::Accumulate;

use crate::{
    Result,
    block::{
        AttentionBlock, BatchShape, FeedForwardBlock, Norm, Normalized, SavedAttention, SavedFeedForward, Workspace,
    },
    engine::Engine,
    parameter::Parameter,
};

/// One layer of a pre-norm model.
#[derive(Debug)]
pub struct Layer<E: Engine> {
    /// Attention.
    pub attention: AttentionBlock<E>,
    /// Feed-forward.
    pub feed_forward: FeedForwardBlock<E>,
}

/// What the backward pass of a [`Layer`] reads.
pub(super) type SavedLayer<E> = (SavedAttention<E>, SavedFeedForward<E>);

/// The layers' output for `x` `[tokens, width]`, with the norm behind the last one, and what the backward pass needs. Every residual addition is made with the norm
/// that follows it.
pub(super) fn forward<E: Engine>(
    engine: &E,
    workspace: &mut Workspace<E>,
    (layers, norm): (&[Layer<E>], &Norm<E>),
    x: E::Buffer,
    shape: BatchShape,
) -> Result<(Normalized<E>, Vec<SavedLayer<E>>)> {
    let (tokens, norm_of) = (shape.tokens(), |at: usize| layers.get(at).map_or(norm, |layer| &layer.attention.norm));
    let mut stream = Normalized::new(engine, workspace, norm_of(0), x, tokens)?;
    let mut all = Vec::with_capacity(layers.len());
    for (at, Layer { attention, feed_forward }) in layers.iter().enumerate() {
        let (between, saved) = attention.forward_between(engine, workspace, stream, shape, &feed_forward.norm)?;
        let (output, saved_feed_forward) =
            feed_forward.forward_between(engine, workspace, between, tokens, norm_of(at + 1))?;
        stream = output;
        all.push((saved, saved_feed_forward));
    }
    Ok((stream, all))
}

/// Turns the gradient of the layers' output, without the norm behind them, into that of their input. `ready` receives gradients as they are complete.
pub(super) fn backward<E: Engine>(
    engine: &E,
    workspace: &mut Workspace<E>,
    (layers, saved): (&mut [Layer<E>], Vec<SavedLayer<E>>),
    mut dx: E::Buffer,
    accumulate: Accumulate,
    ready: &mut dyn FnMut(Vec<&mut E::Buffer>) -> Result<()>,
) -> Result<E::Buffer> {
    for (layer, (attention, feed_forward)) in layers.iter_mut().zip(saved).rev() {
        dx = layer.feed_forward.backward(engine, workspace, feed_forward, dx, accumulate)?;
        ready(gradients(layer.feed_forward.parameters_mut()))?;
        dx = layer.attention.backward(engine, workspace, attention, dx, accumulate)?;
        ready(gradients(layer.attention.parameters_mut()))?;
    }
    Ok(dx)
}

/// Gives the buffers back where there is no backward pass.
pub(super) fn release<E: Engine>(workspace: &mut Workspace<E>, saved: Vec<SavedLayer<E>>) {
    for (attention, feed_forward) in saved {
        attention.release(workspace);
        feed_forward.release(workspace);
    }
}

/// The gradients of parameters that train.
pub(super) fn gradients<'a, E: Engine + 'a>(
    parameters: impl IntoIterator<Item = &'a mut Parameter<E>>,
) -> Vec<&'a mut E::Buffer> {
    parameters.into_iter().filter_map(Parameter::gradient_mut).collect()
}
