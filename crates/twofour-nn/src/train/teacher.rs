//! A model that another one learns from.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use twofour::{Axis, Mask, MatrixRef, Pattern};

use super::{Trainer, TrainingData};
use crate::{
    Error, Result,
    engine::Engine,
    linear::Linear,
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
        self.fill_zeros(&teacher)?;
        let known = KnownTeacher { loss, checksum: checksum.finalize() };
        self.teacher = Some(Teacher { model: teacher, known });
        Ok(self)
    }

    /// Gives the zeros of 2:4 layers whose method chooses among all weights those of the teacher, at the first step;
    /// the masks that the zeros are stay.
    fn fill_zeros(&mut self, teacher: &D::Model<E>) -> Result<()> {
        let Trainer { engine, model, plan, parts, .. } = self;
        let teachers: HashMap<&str, &Linear<E>> = teacher.linears().map(|linear| (linear.name(), linear)).collect();
        for linear in model.linears_mut() {
            let part = parts.get(linear.name()).and_then(|&part| plan.parts().nth(part));
            let Some(teacher) = part.filter(|part| part.method.fills_zeros()).and(teachers.get(linear.name())) else {
                continue;
            };
            let (rows, cols) = (linear.out_features(), linear.in_features());
            let mut values = engine.read(linear.weight().master())?;
            let mask = Mask::of_nonzeros(MatrixRef::new(rows, cols, &values)?);
            if (teacher.out_features(), teacher.in_features()) != (rows, cols)
                || mask.verify(Pattern::TWO_FOUR, Axis::Row).is_err()
            {
                continue;
            }
            let (mut change, mut kept) = (0f64, 0f64);
            for (value, taught) in values.iter_mut().zip(engine.read(teacher.weight().master())?) {
                if *value == 0.0 {
                    *value = taught;
                    continue;
                }
                change += f64::from(*value - taught).powi(2);
                kept += f64::from(*value).powi(2);
            }
            if change > kept {
                return Err(Error::Setting {
                    what: "the teacher of a model whose masks are learned",
                    found: format!("another order of features in `{}`", linear.name()),
                    expected: "the model that was pruned, with its features in the same order",
                });
            }
            linear.weight_mut().write(engine, &values)?;
            linear.refresh(engine, false)?;
        }
        Ok(())
    }

    pub(super) fn known_teacher(&self) -> Option<KnownTeacher> {
        self.teacher.as_ref().map(|teacher| teacher.known)
    }
}
