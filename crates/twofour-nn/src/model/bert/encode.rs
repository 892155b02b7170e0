//! Forward passes whose results stay in the engine's memory.

use super::{Bert, BertBatch};
use crate::{Result, block::BatchShape, engine::Engine};

impl<E: Engine> Bert<E> {
    /// Computes the last hidden states of sequences and reads none of them: the work of inference alone, which a benchmark times. The engine may repeat what an earlier call of
    /// the same shape launched, so the batch must be the same one in the engine's memory, with whatever tokens.
    ///
    /// # Errors
    /// Another shape than the batch's, sequences longer than the context; not enough memory.
    pub fn encode(&mut self, engine: &E, batch: &BertBatch<E>, shape: BatchShape) -> Result<()> {
        let BatchShape { batch: sequences, positions } = shape;
        // No training step has such a key but by chance.
        let key = (sequences as u64) << 32 | positions as u64;
        engine.repeat(key, || {
            let (x, saved) = self.forward(engine, batch, shape)?;
            self.release(saved);
            self.workspace.give([x]);
            Ok(())
        })
    }
}
