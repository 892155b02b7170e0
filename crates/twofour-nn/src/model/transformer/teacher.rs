//! What a teacher computes on a batch.

use super::{Saved as _, Task, Transformer};
use crate::{
    Error, Result,
    block::{BatchShape, Workspace},
    engine::Engine,
    model::DistillationLoss,
};

/// What a teacher computes on a batch.
pub(super) struct Taught<E: Engine> {
    pub(super) scores: E::Buffer,
    /// The hidden states behind each layer, where they are asked for.
    pub(super) states: Vec<E::Buffer>,
}

impl<E: Engine, T: Task<E>> Transformer<E, T> {
    /// Scores and hidden states of a batch, in memory of the workspace.
    pub(super) fn taught(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        batch: &T::Batch,
        shape: BatchShape,
        with_states: bool,
    ) -> Result<Taught<E>> {
        std::mem::swap(&mut self.workspace, workspace);
        let taught = self.taught_in_own(engine, batch, shape, with_states);
        std::mem::swap(&mut self.workspace, workspace);
        taught
    }

    fn taught_in_own(
        &mut self,
        engine: &E,
        batch: &T::Batch,
        shape: BatchShape,
        with_states: bool,
    ) -> Result<Taught<E>> {
        let mut states = vec![];
        let (output, input) = self.pass(engine, batch, shape, &mut |saved, workspace| match with_states {
            true => states.push(saved.release_but_input(engine, workspace)),
            false => saved.release(engine, workspace),
        })?;
        self.workspace.give(input.into_buffers());
        let (scores, head) = self.task.scores(engine, &mut self.workspace, (output.read(), batch), shape)?;
        self.workspace.give(head.into_buffers());
        if with_states {
            // That in front of the first layer is the embedding.
            self.workspace.give(states.drain(..1));
            states.push(output.into_x(&mut self.workspace));
        } else {
            self.workspace.give(output.into_buffers());
        }
        Ok(Taught { scores, states })
    }

    /// Checks that the model can learn from another one.
    pub(super) fn expect_fitting(&self, teacher: &Self, loss: &DistillationLoss) -> Result<()> {
        loss.check()?;
        let positions = [T::positions(&self.config), T::positions(&teacher.config)];
        let shape = BatchShape { batch: 1, positions: positions[0] };
        let classes = [self.task.classes(shape), teacher.task.classes(shape)];
        let widths = [T::transformer(&self.config)?.width, T::transformer(&teacher.config)?.width];
        let layers = [self.layers.len(), teacher.layers.len()];
        let hidden = loss.hidden > 0.0;
        for (what, fits, [own, found], expected) in [
            ("tokens or classes of a teacher", classes[0] == classes[1], classes, "as many as the student has"),
            ("the context of a teacher", positions[1] >= positions[0], positions, "at least the student's"),
            ("the width of a teacher of hidden states", !hidden || widths[0] == widths[1], widths, "the student's"),
            ("layers of a teacher of hidden states", !hidden || layers[0] == layers[1], layers, "as many"),
        ] {
            if !fits {
                return Err(Error::Setting { what, found: format!("{found}, for a student of {own},"), expected });
            }
        }
        Ok(())
    }
}
