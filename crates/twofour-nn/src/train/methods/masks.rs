//! Masks that a method chooses itself.

use std::{any::Any, collections::BTreeMap, fmt::Debug};

use serde::de::DeserializeOwned;
use twofour::{
    Mask, MatrixRef,
    file::{PlannedTensor, Reader, StoredDType, TensorView},
};

use super::{AdapterFactors, SparsityPlan};
use crate::{Error, Result, engine::AdamWStep};

/// A layer whose masks a method chooses.
#[derive(Debug, Clone, Copy)]
pub struct MaskedLayer<'a> {
    /// Its part of the plan.
    pub plan: &'a SparsityPlan,
    /// The name of its weight.
    pub weight: &'a str,
    /// Rows and columns of its weight.
    pub shape: (usize, usize),
}

/// What a mask is chosen by.
#[derive(Debug)]
pub struct WeightOnHost<'a> {
    /// The name of the weight.
    pub name: &'a str,
    /// The master weight.
    pub master: MatrixRef<'a, f32>,
    /// The gradient of the last step, of every element, where [`HostMasks::reads_gradient`] says so; none before the
    /// first step.
    pub gradient: Option<&'a [f32]>,
    /// The numbers of the optimizer in the last step, its factor for clipping included; none before the first step, and
    /// where it was skipped.
    pub step: Option<&'a AdamWStep>,
}

/// A frozen weight with its adapter.
#[derive(Debug)]
pub struct Merged {
    /// The sum, with the zeros of the weight.
    pub weight: Vec<f32>,
    /// Where the weight is not zero.
    pub mask: Mask,
    /// The norm of the whole update by that of the weight.
    pub update: f64,
    /// The norm of what the weight's zeros lose of the update, by that of the update.
    pub lost: f64,
}

/// The integers that a masked weight is rounded to.
#[derive(Debug)]
pub struct Rounded {
    /// The scale of each element, 0 where the mask prunes.
    pub scales: Vec<f32>,
    /// The largest magnitude of the integers.
    pub largest: f32,
}

/// The masks of layers that compute with dense GEMMs under a mask, as a method chooses them on the host.
pub trait HostMasks: Debug + Send + Any {
    /// Whether the mask of a weight depends on its gradient.
    fn reads_gradient(&self, _weight: &str) -> bool {
        false
    }

    /// Chooses the mask of a weight after so many steps; returns it with the number of elements that changed.
    ///
    /// # Errors
    /// A weight or a gradient that is not finite.
    fn choose(&mut self, weight: &WeightOnHost<'_>, steps_done: u64) -> Result<(Mask, u64)>;

    /// The present mask of a weight.
    fn mask(&self, weight: &str) -> Option<&Mask>;

    /// How the weight is rounded under its mask, where it is.
    fn rounding(&self, _weight: &str) -> Option<Rounded> {
        None
    }

    /// The weight that the layer computes with after [`HostMasks::choose`], where that changed it; once.
    fn take_weight(&mut self, _weight: &str) -> Option<Vec<f32>> {
        None
    }

    /// The factors that train beside a weight.
    fn factors(&self, _weight: &str) -> Option<&AdapterFactors> {
        None
    }

    /// A weight with what trains beside it.
    ///
    /// # Errors
    /// A weight of another shape.
    fn merged(&self, _weight: &str) -> Result<Option<Merged>> {
        Ok(None)
    }

    /// The share of the weight that its mask prunes by the method's schedule, where it has one.
    fn level(&self, _weight: &str) -> Option<f64> {
        None
    }

    /// The tensors of a checkpoint that hold its state, with their bytes.
    fn tensors(&self) -> Vec<(PlannedTensor, Vec<u8>)>;

    /// The metadata of a checkpoint that hold its state.
    fn metadata(&self) -> Vec<(String, String)>;

    /// Goes back to what a checkpoint has.
    ///
    /// # Errors
    /// What is not there, or does not fit; nothing has changed then.
    fn load(&mut self, reader: &Reader) -> Result<()>;
}

/// The tensor of a checkpoint that holds a mask, which [`mask_beside`](crate::model::mask_beside) reads.
pub(super) fn mask_tensor(weight: &str, mask: &Mask) -> (PlannedTensor, Vec<u8>) {
    let (rows, bytes) = (mask.rows(), mask.cols().div_ceil(8));
    let row = |row: usize| mask.row_words(row).iter().flat_map(|word| word.to_le_bytes()).take(bytes);
    let planned = PlannedTensor::new(format!("{weight}.mask"), StoredDType::U8, [rows, bytes]);
    (planned, (0..rows).flat_map(row).collect())
}

/// The error for a weight that a method has no mask of.
pub(super) fn no_weight(name: &str) -> Error {
    twofour::Error::NoParameter { name: name.to_owned() }.into()
}

/// A checkpoint of masks, to read them from.
#[derive(Clone, Copy)]
pub(super) struct Stored<'a>(pub(super) &'a Reader);

impl<'a> Stored<'a> {
    /// An error for what does not fit.
    pub(super) fn fault(self, reason: String) -> Error {
        Error::State { path: self.0.path().to_owned(), reason }
    }

    /// The state of each weight that the metadata have under `key`.
    pub(super) fn states<T: DeserializeOwned>(self, key: &str, masks: &str) -> Result<BTreeMap<String, T>> {
        let text = self.0.metadata().get(key);
        let text = text.ok_or_else(|| self.fault(format!("its metadata has no `{key}`: it holds no {masks}")))?;
        serde_json::from_str(text).map_err(|error| self.fault(format!("metadata `{key}`: {error}")))
    }

    /// A tensor of one of these shapes.
    pub(super) fn tensor(self, name: &str, shapes: &[[usize; 2]]) -> Result<TensorView<'a>> {
        let view = self.0.tensor(name)?;
        if shapes.iter().any(|shape| view.info.shape == shape) {
            return Ok(view);
        }
        let shapes: Vec<String> = shapes.iter().map(|shape| format!("{shape:?}")).collect();
        Err(self.fault(format!("`{name}` is {:?}, not {}", view.info.shape, shapes.join(" or "))))
    }
}
