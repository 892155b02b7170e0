//! What a pass over a batch brings a model nearer to.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The loss of a student, in nats a target.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct DistillationLoss {
    /// The weight of the divergence KL(teacher ‖ student).
    pub divergence: f64,
    /// The weight of the cross-entropy of targets.
    pub cross_entropy: f64,
    /// The weight of the mean over layers and tokens of `‖x - t‖² / ‖t‖²`, for the hidden states `x` of the student and
    /// `t` of the teacher behind each layer.
    pub hidden: f64,
}

impl Default for DistillationLoss {
    fn default() -> Self {
        DistillationLoss { divergence: 1.0, cross_entropy: 0.0, hidden: 0.0 }
    }
}

impl DistillationLoss {
    /// Checks the weights.
    ///
    /// # Errors
    /// [`Error::Setting`] for a weight that is negative or not finite, and where all are 0.
    pub fn check(&self) -> Result<()> {
        let DistillationLoss { divergence, cross_entropy, hidden } = *self;
        let all = [divergence, cross_entropy, hidden];
        if all.iter().all(|weight| weight.is_finite() && *weight >= 0.0) && all.iter().any(|weight| *weight > 0.0) {
            return Ok(());
        }
        let found = format!("divergence {divergence}, cross-entropy {cross_entropy}, hidden states {hidden}");
        let expected = "finite numbers from 0 up, one of them above 0";
        Err(Error::Setting { what: "the weights of a distillation loss", found, expected })
    }
}

/// What a pass over a batch brings a model nearer to.
#[derive(Debug)]
pub enum Objective<'a, M> {
    /// The batch's targets, by cross-entropy.
    Targets,
    /// What a teacher computes on the same inputs.
    Teacher(&'a mut M, DistillationLoss),
}
