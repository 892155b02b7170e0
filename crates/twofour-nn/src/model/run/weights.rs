//! The model that a checkpoint of training holds.

use std::path::Path;

use serde::Deserialize;
use twofour::{
    MatrixRef,
    estimate::{Estimator, estimate},
    file::Reader,
};
use twofour_transformer::cpu::grid;

use super::{
    WeightScales,
    file::{CHECKPOINT_FILE, SavedLayer, expect_whole, mask_beside, mask_of, state_of},
};
use crate::Result;

/// The weights that the model of a checkpoint computes with: the masters, 2:4 and masked layers under their masks, and
/// rounded to the integers that they train in.
pub(crate) struct CheckpointModel<C> {
    reader: Reader,
    state: ModelState<C>,
}

/// What the checkpoint's metadata says of the model.
#[derive(Deserialize)]
struct ModelState<C> {
    model: C,
    sparse_layers: Vec<SavedLayer>,
    #[serde(default)]
    masked_layers: Vec<String>,
}

impl<C: for<'a> Deserialize<'a>> CheckpointModel<C> {
    /// Whether a path is a checkpoint's file with a model of this kind.
    pub(crate) fn is_at(path: &Path) -> bool {
        let is_named = path.file_name().is_some_and(|name| name == CHECKPOINT_FILE) && path.is_file();
        is_named && Reader::open(path).is_ok_and(|reader| state_of::<ModelState<C>>(&reader).is_ok())
    }

    /// The model of a checkpoint.
    ///
    /// # Errors
    /// [`Error::State`] for a checkpoint that is damaged, or of a model of another kind.
    pub(crate) fn new(reader: Reader) -> Result<Self> {
        let state = state_of(&reader)?;
        expect_whole(&reader)?;
        Ok(CheckpointModel { reader, state })
    }
}

impl<C> CheckpointModel<C> {
    /// What its tensors' names begin with.
    const PREFIX: &'static str = "model.";

    /// The model's description.
    pub(crate) fn config(&self) -> &C {
        &self.state.model
    }

    /// The checkpoint's file.
    pub(crate) fn path(&self) -> &Path {
        self.reader.path()
    }

    /// Name and shape of each parameter.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = (&str, &[usize])> {
        let tensors = self.reader.tensors();
        tensors.filter_map(|tensor| Some((tensor.name.strip_prefix(Self::PREFIX)?, tensor.shape.as_slice())))
    }

    /// The values of a parameter.
    ///
    /// # Errors
    /// A parameter that is not there, a mask that does not fit it.
    pub(crate) fn values(&self, name: &str) -> Result<Vec<f32>> {
        let view = self.reader.tensor(&format!("{}{name}", Self::PREFIX))?;
        let values = view.to_vec::<f32>()?;
        let (Some(layer), &[rows, cols]) = (name.strip_suffix(".weight"), view.info.shape.as_slice()) else {
            return Ok(values);
        };
        let matrix = MatrixRef::new(rows, cols, &values)?;
        if let Some(saved) = self.state.sparse_layers.iter().find(|saved| saved.name == layer) {
            // Only the soft threshold has a scale.
            return Ok(match saved.scale.map(f32::from_bits) {
                Some(scale) => estimate(matrix, Estimator::SoftThreshold, scale)?.to_dense(),
                None => mask_of(&self.reader, layer, (rows, cols))?.apply(matrix)?,
            });
        }
        if self.state.masked_layers.iter().any(|masked| masked == layer) {
            let mask = mask_beside(&self.reader, name, (rows, cols))?;
            let Some(scales) = WeightScales::read(&self.reader, name, (rows, cols))? else {
                return Ok(mask.apply(matrix)?);
            };
            let mut rounded = vec![0.0; values.len()];
            grid::round(scales.bits.largest(), &scales.of_elements(&mask), &values, &mut rounded);
            return Ok(rounded);
        }
        Ok(values)
    }
}
