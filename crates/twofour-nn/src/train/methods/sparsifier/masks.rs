//! The masks of a trainer's sparsifier.

use std::collections::BTreeMap;

use twofour::{
    Mask, MatrixRef,
    file::{PlannedTensor, Reader},
    sparsify::{Regrowth, Sparsifier},
};

use super::{
    super::{HostMasks, MaskedLayer, WeightOnHost, masks::no_weight},
    SparsifierPlan,
};
use crate::Result;

/// A [`Sparsifier`] over the layers of a plan.
#[derive(Debug)]
pub(super) struct SparsifierMasks {
    sparsifier: Sparsifier,
    plans: BTreeMap<String, SparsifierPlan>,
}

impl SparsifierMasks {
    pub(super) fn new(layers: &[MaskedLayer<'_>]) -> Result<Self> {
        // What is masked in place is zero in the dense weight already.
        let mut sparsifier = Sparsifier::new(Regrowth::FromDense);
        let mut plans = BTreeMap::new();
        for &MaskedLayer { plan, weight, shape: (rows, cols) } in layers {
            let Some(own) = &plan.sparsifier else { continue };
            sparsifier.prepare(weight, rows, cols, own.rule, own.level)?;
            // Until the first mask is chosen, nothing is pruned.
            sparsifier.set_level(weight, 0.0)?;
            plans.insert(weight.to_owned(), own.clone());
        }
        Ok(SparsifierMasks { sparsifier, plans })
    }
}

impl HostMasks for SparsifierMasks {
    fn reads_gradient(&self, weight: &str) -> bool {
        self.plans.get(weight).is_some_and(|plan| plan.criterion.reads_gradient())
    }

    fn choose(&mut self, weight: &WeightOnHost<'_>, steps_done: u64) -> Result<(Mask, u64)> {
        let name = weight.name;
        let plan = self.plans.get(name).ok_or_else(|| no_weight(name))?;
        let compared = plan.criterion.compared(weight);
        self.sparsifier.set_level(name, plan.level_at(steps_done))?;
        let matrix = MatrixRef::new(weight.master.rows(), weight.master.cols(), &compared)?;
        let flips = self.sparsifier.step_one(name, matrix)?;
        Ok((self.sparsifier.mask(name).ok_or_else(|| no_weight(name))?.clone(), flips))
    }

    fn mask(&self, weight: &str) -> Option<&Mask> {
        self.sparsifier.mask(weight)
    }

    fn level(&self, weight: &str) -> Option<f64> {
        self.sparsifier.level(weight)
    }

    fn tensors(&self) -> Vec<(PlannedTensor, Vec<u8>)> {
        self.sparsifier.tensors().collect()
    }

    fn metadata(&self) -> Vec<(String, String)> {
        vec![self.sparsifier.metadata()]
    }

    fn load(&mut self, reader: &Reader) -> Result<()> {
        Ok(self.sparsifier.load_from(reader)?)
    }
}
