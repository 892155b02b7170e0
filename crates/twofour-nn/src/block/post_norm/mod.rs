//! Blocks as BERT's (Devlin et al., 2019): the norm is behind the sum of the block's input and its output.

mod attention;
mod feed_forward;

pub use attention::{PostNormAttention, SavedPostNormAttention};
pub use feed_forward::{PostNormFeedForward, SavedPostNormFeedForward};

use twofour::layer::Accumulate;

use super::{Norm, NormStatistics, Workspace};
use crate::{Result, engine::Engine};

/// What the norm of a block reads in the backward pass: the sum of the block's input and what its layers made of it.
#[derive(Debug)]
struct SavedSum<E: Engine> {
    sum: E::Buffer,
    statistics: NormStatistics<E>,
}

impl<E: Engine> SavedSum<E> {
    /// `norm(x + sum)` for what the block's layers made of `x`, and what the backward pass reads.
    fn normalized(
        engine: &E,
        workspace: &mut Workspace<E>,
        norm: &Norm<E>,
        (x, mut sum, tokens): (&E::Buffer, E::Buffer, usize),
    ) -> Result<(E::Buffer, Self)> {
        let (y, statistics) = norm.forward_sum(engine, workspace, x, &mut sum, tokens)?;
        Ok((y, SavedSum { sum, statistics }))
    }

    /// The gradient of the sum, from that of the norm's output.
    fn gradient(
        self,
        engine: &E,
        workspace: &mut Workspace<E>,
        norm: &mut Norm<E>,
        (dy, tokens): (E::Buffer, usize),
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let mut d_sum = workspace.compute(engine, tokens * norm.width())?;
        // The norm's gradient is added to what is there.
        engine.clear(&mut d_sum)?;
        norm.backward(engine, (&self.sum, &self.statistics), &dy, &mut d_sum, accumulate)?;
        workspace.give([dy]);
        self.release(workspace);
        Ok(d_sum)
    }

    fn release(self, workspace: &mut Workspace<E>) {
        workspace.give([self.sum].into_iter().chain(self.statistics.into_buffers()));
    }
}
