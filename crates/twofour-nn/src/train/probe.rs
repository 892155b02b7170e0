//! How well features tell classes apart.

use serde::Serialize;

use super::ImageSet;
use crate::{
    Result,
    block::BatchShape,
    engine::Engine,
    logistic::{LogisticRegression, Samples},
    model::{TrainedModel as _, Vit},
};

/// Logistic regression on a model's features: fitted to the training images, judged by the validation images.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct LinearProbe {
    /// The share of the validation images that are classified rightly.
    pub validation_accuracy: f64,
    /// The share of the training images that are classified rightly.
    pub training_accuracy: f64,
    /// Iterations of the solver.
    pub iterations: usize,
}

impl ImageSet {
    /// Fits logistic regression ([`LogisticRegression::fit`], strength 1) to the features that the head of a model
    /// reads of the training images, in batches of `batch`. The model is one that these images were
    /// [prepared](crate::train::TrainingData::prepare) for.
    ///
    /// # Errors
    /// Those of [`Vit::features`]; features that are NaN or infinite.
    pub fn probe<E: Engine>(&self, engine: &E, model: &mut Vit<E>, batch: usize) -> Result<LinearProbe> {
        let (features, labels) = E::scope(|| self.features_of(engine, model, self.training(), batch))?;
        let (unseen, classes_of) = E::scope(|| self.features_of(engine, model, self.validation(), batch))?;
        let (width, classes) = (model.config().width, model.config().classes);
        let training = Samples::new(&features, &labels, width, classes)?;
        let validation = Samples::new(&unseen, &classes_of, width, classes)?;
        let fitted = LogisticRegression::fit(&training, 1.0)?;
        Ok(LinearProbe {
            validation_accuracy: fitted.accuracy(&validation),
            training_accuracy: fitted.accuracy(&training),
            iterations: fitted.iterations(),
        })
    }

    /// Features and classes of images by their numbers.
    fn features_of<E: Engine>(
        &self,
        engine: &E,
        model: &mut Vit<E>,
        images: &[u32],
        batch: usize,
    ) -> Result<(Vec<f32>, Vec<u32>)> {
        let positions = model.positions();
        let (mut features, mut labels) = (vec![], vec![]);
        for images in images.chunks(batch.max(1)) {
            let batch = self.batch_of(images.iter().copied(), positions);
            let shape = BatchShape { batch: images.len(), positions };
            let [found, _] = model.features(engine, &batch.inputs, shape)?;
            features.extend(found);
            labels.extend(batch.targets);
        }
        Ok((features, labels))
    }
}
