//! The masks that a linear layer computes under.

use twofour::{Axis, Mask, Pattern};

use twofour_transformer::weight::MaskedWeight;

use super::{Linear, Masking, Weight};
use crate::{
    Error, Result,
    engine::{Engine, SparseLayer as _},
};

impl<E: Engine> Linear<E> {
    /// Makes the layer compute under a mask of the weight, of any pattern, in dense GEMMs. The mask stays until
    /// [`Linear::set_mask`]; it is applied anew at every [`Linear::refresh`].
    ///
    /// # Errors
    /// [`Error::InLayer`] for a mask of another shape; not enough memory.
    pub fn make_masked(&mut self, engine: &E, mask: Mask, masking: Masking) -> Result<()> {
        self.expect_shape_of(&mask)?;
        let masked = MaskedWeight::new(engine, mask, masking, &mut self.weight);
        self.operand = Weight::Masked(masked.map_err(|error| error.in_layer(&self.name))?);
        Ok(())
    }

    /// Makes the layer compute with the nearest integers times `scales`, one for each element and 0 where the weight is
    /// pruned, the integers at most `largest` in magnitude, in dense GEMMs. The straight-through estimator trains the
    /// master weight; it is rounded anew at every [`Linear::refresh`].
    ///
    /// # Errors
    /// [`Error::InLayer`] for scales of another number; not enough memory.
    pub fn make_rounded(&mut self, engine: &E, scales: &[f32], largest: f32) -> Result<()> {
        let (rows, cols) = (self.out_features, self.in_features);
        if scales.len() != rows * cols {
            let what = "scales of a weight";
            let error = twofour::Error::Length { what, expected: rows * cols, found: scales.len() };
            return Err(Error::from(error).in_layer(&self.name));
        }
        let mask = Mask::from_fn(rows, cols, |row, col| scales[row * cols + col] != 0.0);
        let rounded = MaskedWeight::rounded(engine, (mask, scales), largest, &mut self.weight);
        self.operand = Weight::Masked(rounded.map_err(|error| error.in_layer(&self.name))?);
        Ok(())
    }

    /// Replaces the mask of a layer of [`Linear::make_masked`], and applies it; nothing for other layers.
    ///
    /// # Errors
    /// [`Error::InLayer`] for a mask of another shape.
    pub fn set_mask(&mut self, engine: &E, mask: Mask) -> Result<()> {
        self.expect_shape_of(&mask)?;
        let Weight::Masked(masked) = &mut self.operand else { return Ok(()) };
        Ok(masked.set_mask(engine, mask, &mut self.weight).map_err(|error| error.in_layer(&self.name))?)
    }

    fn expect_shape_of(&self, mask: &Mask) -> Result<()> {
        let (found, expected) = ((mask.rows(), mask.cols()), (self.out_features, self.in_features));
        if found == expected {
            return Ok(());
        }
        let error = twofour::Error::Shape { what: "mask and weight", found, expected };
        Err(Error::from(error).in_layer(&self.name))
    }

    /// The mask of [`Linear::make_masked`], and what happens to the weights that it prunes.
    pub fn masked(&self) -> Option<(&Mask, Masking)> {
        match &self.operand {
            Weight::Masked(masked) => Some((masked.mask(), masked.masking())),
            _ => None,
        }
    }

    /// The mask that the layer computes under, where it is 2:4 or masked. Waits.
    ///
    /// # Errors
    /// Those of the device.
    pub fn mask(&self) -> Result<Option<Mask>> {
        match &self.operand {
            Weight::Sparse(sparse) => Ok(Some(sparse.mask()?)),
            Weight::Masked(masked) => Ok(Some(masked.mask().clone())),
            _ => Ok(None),
        }
    }

    /// A hash of the mask, the same for the same mask on all devices of this engine. Waits.
    pub(crate) fn mask_hash(&self) -> Result<Option<u64>> {
        match &self.operand {
            Weight::Sparse(sparse) => Ok(Some(sparse.mask_hash()?)),
            Weight::Masked(masked) => Ok(Some(masked.hash())),
            _ => Ok(None),
        }
    }

    /// Whether the layer computes under a mask: whether it is 2:4 or masked.
    pub fn has_mask(&self) -> bool {
        matches!(self.operand, Weight::Sparse(_) | Weight::Masked(_))
    }

    /// Whether at most two of every four weights of a row are nonzero in what the layer computes with, so that it can
    /// be stored as a 2:4 weight.
    pub fn is_two_of_four(&self) -> bool {
        match &self.operand {
            Weight::Sparse(_) => true,
            Weight::Masked(masked) => masked.mask().verify(Pattern::TWO_FOUR, Axis::Row).is_ok(),
            _ => false,
        }
    }

    /// The dense weight in f32, with zeros where [`Linear::make_masked`] prunes it: what
    /// [`Sparsifier::squash_mask`](twofour::sparsify::Sparsifier::squash_mask) leaves. Waits.
    ///
    /// # Errors
    /// Those of the device.
    pub fn squashed(&self, engine: &E) -> Result<Vec<f32>> {
        match &self.operand {
            Weight::Masked(masked) => Ok(masked.values(engine, &self.weight)?),
            _ => Ok(engine.read(self.weight.master())?),
        }
    }
}
