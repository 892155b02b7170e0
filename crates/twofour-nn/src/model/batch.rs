//! Batches in an engine's memory.

use crate::{
    Result,
    engine::{Engine, Kind},
};

/// Inputs and targets of a batch as indices, [`Kind::Index`]: those of a model whose samples need nothing else.
#[derive(Debug)]
pub struct IndexBatch<E: Engine> {
    /// Inputs of all samples.
    pub inputs: E::Buffer,
    /// Targets of all samples.
    pub targets: E::Buffer,
}

impl<E: Engine> IndexBatch<E> {
    /// Brings inputs and targets to the engine's memory.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn new(engine: &E, (inputs, targets): (&[u32], &[u32])) -> Result<Self> {
        let zeros = |ids: &[u32]| engine.zeros(Kind::Index, ids.len());
        let mut batch = IndexBatch { inputs: zeros(inputs)?, targets: zeros(targets)? };
        batch.write(engine, (inputs, targets))?;
        Ok(batch)
    }

    /// Brings inputs and targets to the engine's memory, over those of another batch where there is one.
    ///
    /// # Errors
    /// Not enough memory; another number of inputs or targets than the batch that is there.
    pub fn upload(engine: &E, batch: (&[u32], &[u32]), to: &mut Option<Self>) -> Result<()> {
        match to {
            Some(there) => there.write(engine, batch),
            None => {
                *to = Some(Self::new(engine, batch)?);
                Ok(())
            }
        }
    }

    /// Overwrites them by as many others.
    ///
    /// # Errors
    /// Another number of inputs or targets.
    pub fn write(&mut self, engine: &E, (inputs, targets): (&[u32], &[u32])) -> Result<()> {
        engine.write_ids(&mut self.inputs, inputs)?;
        Ok(engine.write_ids(&mut self.targets, targets)?)
    }
}
