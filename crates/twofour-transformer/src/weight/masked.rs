//! A weight under a mask of any pattern, in dense GEMMs.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use twofour::{Mask, MatrixRef};

use crate::{
    Error, Result,
    cpu::{grid, masking::words},
    engine::{Engine, Kept, Kind},
    parameter::Parameter,
};

/// What happens to the weights that a mask prunes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Masking {
    /// The master weight keeps them, and the straight-through estimator trains them: their gradients are those of a
    /// dense layer, so that they can regrow.
    StraightThrough,
    /// The master weight keeps them, without gradients. They can regrow when the mask is chosen anew.
    Masked,
    /// They become zero in the master weight, without gradients, and stay zero.
    InPlace,
}

/// The mask of a linear layer's weight, and what its GEMMs compute with.
#[derive(Debug)]
pub struct MaskedWeight<E: Engine> {
    mask: Mask,
    /// The mask as [`Kept::Mask`] has it.
    words: E::Buffer,
    masking: Masking,
    /// The masked weight; absent where the weight itself is masked.
    apart: Option<E::Buffer>,
    rounding: Option<Rounding<E>>,
}

/// The grid that a weight is rounded to before GEMMs read it.
#[derive(Debug)]
struct Rounding<E: Engine> {
    largest: f32,
    /// A scale for each element.
    scales: E::Buffer,
}

impl<E: Engine> MaskedWeight<E> {
    /// Applies a mask to a weight of its shape.
    ///
    /// # Errors
    /// A mask of another shape; not enough memory.
    pub fn new(engine: &E, mask: Mask, masking: Masking, weight: &mut Parameter<E>) -> Result<Self> {
        let elements = mask.rows() * mask.cols();
        let apart = match masking {
            Masking::InPlace => {
                weight.add_copy(engine)?;
                None
            }
            _ => Some(engine.zeros(Kind::Compute, elements)?),
        };
        let words = engine.zeros(Kind::Index, words(&mask).len())?;
        let mut masked = MaskedWeight { mask, words, masking, apart, rounding: None };
        masked.upload(engine)?;
        masked.refresh(engine, weight)?;
        if masking != Masking::InPlace {
            // The optimizer's copy of the whole weight is not computed with.
            weight.drop_copy();
        }
        Ok(masked)
    }

    /// A weight that GEMMs read as the nearest integers times `scales`: one scale for each element, integers of at most
    /// `largest` in magnitude. An element with the scale 0 is pruned. The master weight keeps what rounding takes off,
    /// and the straight-through estimator trains it.
    ///
    /// # Errors
    /// Scales of another number; not enough memory.
    pub fn rounded(
        engine: &E,
        (mask, scales): (Mask, &[f32]),
        largest: f32,
        weight: &mut Parameter<E>,
    ) -> Result<Self> {
        let mut masked = MaskedWeight::new(engine, mask, Masking::InPlace, weight)?;
        let mut of_engine = engine.zeros(Kind::Wide, scales.len())?;
        engine.write(&mut of_engine, scales)?;
        masked.apart = Some(engine.zeros(Kind::Compute, masked.mask.rows() * masked.mask.cols())?);
        masked.rounding = Some(Rounding { largest, scales: of_engine });
        weight.drop_copy();
        masked.refresh(engine, weight)?;
        Ok(masked)
    }

    /// The mask.
    pub fn mask(&self) -> &Mask {
        &self.mask
    }

    /// A hash of the mask.
    pub fn hash(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (0..self.mask.rows()).for_each(|row| self.mask.row_words(row).hash(&mut hasher));
        hasher.finish()
    }

    /// What happens to pruned weights.
    pub fn masking(&self) -> Masking {
        self.masking
    }

    /// The operand of GEMMs, unless it is the weight itself.
    pub fn operand(&self) -> Option<&E::Buffer> {
        self.apart.as_ref()
    }

    fn upload(&mut self, engine: &E) -> Result<()> {
        engine.write_ids(&mut self.words, &words(&self.mask))
    }

    /// Replaces the mask by one of the same shape and applies it. Its memory stays where it is.
    ///
    /// # Errors
    /// A mask of another shape; [`Error::RoundedMask`] for a weight of [`MaskedWeight::rounded`].
    pub fn set_mask(&mut self, engine: &E, mask: Mask, weight: &mut Parameter<E>) -> Result<()> {
        if self.rounding.is_some() {
            return Err(Error::RoundedMask);
        }
        self.mask = mask;
        self.upload(engine)?;
        self.refresh(engine, weight)
    }

    /// Applies the mask to the weight after it has changed.
    ///
    /// # Errors
    /// A weight of another shape.
    pub fn refresh(&mut self, engine: &E, weight: &mut Parameter<E>) -> Result<()> {
        if let (Some(Rounding { largest, scales }), Some(apart)) = (&self.rounding, &mut self.apart) {
            return engine.round_to_grid(*largest, scales, weight.master(), apart);
        }
        match &mut self.apart {
            Some(apart) => engine.prune(Kept::Mask(&self.words), weight.master(), self.mask.cols(), apart),
            None => weight.mask_in_place(engine, &self.words, self.mask.cols()),
        }
    }

    /// Zeros in the gradient where the mask prunes, unless the estimator is straight-through.
    ///
    /// # Errors
    /// A gradient of another shape.
    pub fn mask_gradient(&self, engine: &E, gradient: &mut E::Buffer) -> Result<()> {
        match self.masking {
            Masking::StraightThrough => Ok(()),
            Masking::Masked | Masking::InPlace => engine.mask_in_place(&self.words, self.mask.cols(), gradient),
        }
    }

    /// The weight as mask and rounding leave it, in f32. Waits.
    ///
    /// # Errors
    /// Those of the device.
    pub fn values(&self, engine: &E, weight: &Parameter<E>) -> Result<Vec<f32>> {
        let master = engine.read(weight.master())?;
        if let Some(Rounding { largest, scales }) = &self.rounding {
            let mut rounded = vec![0.0; master.len()];
            grid::round(*largest, &engine.read(scales)?, &master, &mut rounded);
            return Ok(rounded);
        }
        Ok(self.mask.apply(MatrixRef::new(self.mask.rows(), self.mask.cols(), &master)?)?)
    }
}
