//! A model that another one learns from.

use serde::{Deserialize, Serialize};

use super::{Trainer, TrainingData};
use crate::{
    Result,
    engine::Engine,
    model::{DistillationLoss, ModelParts as _, Objective, TrainedModel as _},
};

/// A model that a trainer's model learns from.
#[derive(Debug)]
pub(super) struct Teacher<M> {
    model: M,
    known: KnownTeacher,
}

/// What a checkpoint knows of a teacher.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct KnownTeacher {
    loss: DistillationLoss,
    /// The CRC-32 of its parameters, in their order.
    checksum: u32,
}

impl<M> Teacher<M> {
    pub(super) fn objective(&mut self) -> Objective<'_, M> {
        Objective::Teacher(&mut self.model, self.known.loss)
    }
}

impl<E: Engine, D: TrainingData> Trainer<E, D> {
    /// The trainer of a model that learns from a teacher: its steps lessen the loss of a student in place of the
    /// cross-entropy of targets. [`Trainer::validate`] returns the cross-entropy still. The teacher, a model on the
    /// trainer's engine, stays as it is.
    ///
    /// # Errors
    /// Those of [`TrainedModel::expect_teacher`](crate::model::TrainedModel::expect_teacher) and of
    /// [`TrainingData::prepare`].
    pub fn learn_from(mut self, mut teacher: D::Model<E>, loss: DistillationLoss) -> Result<Self> {
        self.model.expect_teacher(&teacher, &loss)?;
        self.data.prepare(&self.engine, &mut teacher)?;
        let mut checksum = crc32fast::Hasher::new();
        for parameter in teacher.parameters() {
            let values = self.engine.read(parameter.master())?;
            checksum.update(bytemuck::cast_slice(&values));
        }
        let known = KnownTeacher { loss, checksum: checksum.finalize() };
        self.teacher = Some(Teacher { model: teacher, known });
        Ok(self)
    }

    pub(super) fn known_teacher(&self) -> Option<KnownTeacher> {
        self.teacher.as_ref().map(|teacher| teacher.known)
    }
}
