//! The vision transformer that trains: forward pass, loss and gradients.

mod build;
mod config;
#[cfg(test)]
mod tests;
mod trained;

use std::collections::{HashMap, hash_map::Entry};

use twofour::layer::Accumulate;

use super::{
    Layer,
    layers::{self, SavedLayer, gradients},
};
use crate::{
    Error, Result,
    block::{BatchShape, Norm, Normalized, Workspace},
    engine::{Engine, Kind, LinearShape, StepPhase},
    linear::Linear,
    parameter::Parameter,
};

pub use config::{Pooling, VitConfig};
pub(super) use trained::VIT_KEY;

/// A vision transformer for classification (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021), pre-norm as DINOv2's: patches go through a linear layer,
/// learned positions are added, and after layers of full attention and GELU feed-forward blocks the head reads the norm of the class token, or the mean over the
/// patches. Linear layers are dense or 2:4, each for itself.
///
/// The class token is a patch of zeros before the patches: what it is, its position learns. The images are in the engine's memory, and samples name their
/// patches by number.
#[derive(Debug)]
pub struct Vit<E: Engine> {
    config: VitConfig,
    /// `[tokens, width]`.
    positions: Parameter<E>,
    patches: Linear<E>,
    layers: Vec<Layer<E>>,
    norm: Norm<E>,
    head: Linear<E>,
    /// The tokens of all images, `[images, tokens, values of a patch]`.
    images: Option<E::Buffer>,
    /// By number of images in a batch.
    placements: HashMap<usize, Placement<E>>,
    workspace: Workspace<E>,
}

/// What a number of images have in common.
#[derive(Debug)]
struct Placement<E: Engine> {
    /// The position of each token, `[images, tokens]`.
    positions: E::Buffer,
    /// The weights with which each token is pooled to each image, `[images · tokens, images]`.
    pooling: E::Buffer,
}

/// What the backward pass reads.
struct Saved<E: Engine> {
    inputs: E::Buffer,
    layers: Vec<SavedLayer<E>>,
    output: Normalized<E>,
    pooled: E::Buffer,
}

impl<E: Engine> Vit<E> {
    /// The sizes.
    pub fn config(&self) -> &VitConfig {
        &self.config
    }

    /// The layers, first to last.
    pub fn layers(&self) -> &[Layer<E>] {
        &self.layers
    }

    /// The shape of pooling as a product: `pooledᵀ` is that of a weight gradient, whose output gradient is the matrix of weights.
    fn pooling_shape(&self, shape: BatchShape) -> LinearShape {
        LinearShape { tokens: shape.tokens(), out_features: shape.batch, in_features: self.config.width }
    }

    /// Makes what the batches of that many images have in common.
    fn place(&mut self, engine: &E, images: usize) -> Result<()> {
        let Entry::Vacant(vacant) = self.placements.entry(images) else { return Ok(()) };
        let (tokens, all) = (self.config.tokens(), images * self.config.tokens());
        let mut positions = engine.zeros(Kind::Index, all)?;
        engine.write_ids(&mut positions, &(0..all).map(|token| (token % tokens) as u32).collect::<Vec<_>>())?;
        let mut weights = vec![0f32; all * images];
        for (token, weights) in weights.chunks_exact_mut(images).enumerate() {
            weights[token / tokens] = match self.config.pooling {
                Pooling::Mean => 1.0 / tokens as f32,
                Pooling::Class if token % tokens == 0 => 1.0,
                Pooling::Class => 0.0,
            };
        }
        let mut pooling = engine.zeros(Kind::Compute, all * images)?;
        engine.write(&mut pooling, &weights)?;
        vacant.insert(Placement { positions, pooling });
        Ok(())
    }

    /// The scores of the classes for each image, `[images, classes]`, and what was saved.
    fn forward(&mut self, engine: &E, ids: &E::Buffer, shape: BatchShape) -> Result<(E::Buffer, Saved<E>)> {
        let VitConfig { width, classes, .. } = self.config;
        let (tokens, patch_len, pooling_shape) = (shape.tokens(), self.config.patch_len(), self.pooling_shape(shape));
        if shape.batch == 0 || shape.positions != self.config.tokens() {
            let found = format!("{} images of {} tokens", shape.batch, shape.positions);
            return Err(Error::Setting {
                what: "the batch",
                found,
                expected: "images of the model's size, at least one",
            });
        }
        self.place(engine, shape.batch)?;
        let Vit { images, placements, workspace, .. } = self;
        let (Some(images), Some(placement)) = (images, placements.get(&shape.batch)) else {
            let (what, found) = ("the model", "without images".to_owned());
            return Err(Error::Setting { what, found, expected: "prepared for its data" });
        };
        let mut inputs = workspace.compute(engine, tokens * patch_len)?;
        engine.embedding(images, patch_len, ids, &mut inputs)?;
        let mut x = workspace.compute(engine, tokens * width)?;
        self.patches.forward(engine, &inputs, tokens, &mut x)?;
        let mut placed = workspace.compute(engine, tokens * width)?;
        engine.embedding(self.positions.compute(), width, &placement.positions, &mut placed)?;
        engine.add(&placed, &mut x)?;
        workspace.give([placed]);
        let (output, layers) = layers::forward(engine, workspace, (&self.layers, &self.norm), x, shape)?;
        let mut sums = workspace.take(engine, Kind::Wide, shape.batch * width)?;
        engine.weight_gradient(pooling_shape, &placement.pooling, &output.y, Accumulate::Overwrite, &mut sums)?;
        let mut pooled = workspace.compute(engine, shape.batch * width)?;
        engine.round(&sums, &mut pooled)?;
        let mut logits = workspace.compute(engine, shape.batch * classes)?;
        self.head.forward(engine, &pooled, shape.batch, &mut logits)?;
        workspace.give([sums]);
        Ok((logits, Saved { inputs, layers, output, pooled }))
    }

    fn release(&mut self, saved: Saved<E>) {
        let Saved { inputs, layers, output, pooled } = saved;
        layers::release(&mut self.workspace, layers);
        self.workspace.give([inputs, pooled].into_iter().chain(output.into_buffers()));
    }

    /// Brings tokens, checked, to the engine's memory.
    fn ids(&mut self, engine: &E, what: &'static str, ids: &[u32], (len, most): (usize, usize)) -> Result<E::Buffer> {
        if ids.len() != len {
            return Err(Error::Length { what, expected: len, found: ids.len() });
        }
        if let Some((position, &token)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= most) {
            return Err(Error::Token { what, token, position, vocabulary: most });
        }
        let mut buffer = self.workspace.take(engine, Kind::Index, len)?;
        engine.write_ids(&mut buffer, ids)?;
        Ok(buffer)
    }

    /// Tokens of all images in the engine's memory.
    fn image_tokens(&self) -> usize {
        use crate::engine::Buffer as _;
        self.images.as_ref().map_or(0, |images| images.len() / self.config.patch_len())
    }

    /// The features that the head reads and the scores of the classes, `[images, width]` and `[images, classes]`, of images by their tokens
    /// `[images, tokens]`.
    ///
    /// # Errors
    /// A model that is not prepared; tokens of images that it does not have.
    pub fn features(&mut self, engine: &E, inputs: &[u32], shape: BatchShape) -> Result<[Vec<f32>; 2]> {
        let ids = self.ids(engine, "inputs", inputs, (shape.tokens(), self.image_tokens()))?;
        let (logits, saved) = self.forward(engine, &ids, shape)?;
        let found = [engine.read(&saved.pooled)?, engine.read(&logits)?];
        self.release(saved);
        self.workspace.give([ids, logits]);
        Ok(found)
    }

    /// Adds the sum of the cross-entropies, in nats, of the images' classes to `loss`; returns how many images are classified as their targets say.
    ///
    /// # Errors
    /// Those of [`Vit::features`]; a class that the model does not have.
    pub fn loss(
        &mut self,
        engine: &E,
        (inputs, targets): (&[u32], &[u32]),
        shape: BatchShape,
        loss: &mut E::Buffer,
    ) -> Result<usize> {
        let classes = self.config.classes;
        let ids = self.ids(engine, "inputs", inputs, (shape.tokens(), self.image_tokens()))?;
        let classes_of = self.ids(engine, "targets", targets, (shape.batch, classes))?;
        let (mut logits, saved) = self.forward(engine, &ids, shape)?;
        self.release(saved);
        let scores = engine.read(&logits)?;
        let first_choice = |scores: &[f32]| {
            let best = scores.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
            best.map_or(0, |(class, _)| class as u32)
        };
        let correct = scores.chunks(classes).zip(targets).filter(|(scores, class)| first_choice(scores) == **class);
        let correct = correct.count();
        engine.cross_entropy(classes, &mut logits, &classes_of, None, loss)?;
        self.workspace.give([logits, ids, classes_of]);
        Ok(correct)
    }

    /// The passes of a training step.
    fn gradients_of(
        &mut self,
        engine: &E,
        (ids, targets): (&E::Buffer, &E::Buffer),
        shape: BatchShape,
        (scale, accumulate): (f32, Accumulate),
        loss: &mut E::Buffer,
        ready: &mut dyn FnMut(Vec<&mut E::Buffer>) -> Result<()>,
    ) -> Result<()> {
        let (tokens, width, pooling_shape) = (shape.tokens(), self.config.width, self.pooling_shape(shape));
        let (mut d_logits, saved) = self.forward(engine, ids, shape)?;
        engine.cross_entropy(self.config.classes, &mut d_logits, targets, Some(scale), loss)?;
        engine.begin_phase(StepPhase::Backward)?;
        let Saved { inputs, layers, output: Normalized { x, y: normalized, statistics }, pooled } = saved;
        let Vit { placements, workspace, .. } = self;
        let Some(placement) = placements.get(&shape.batch) else { return Ok(()) };
        self.head.parameter_gradients(engine, &d_logits, &pooled, shape.batch, accumulate)?;
        let mut d_pooled = pooled;
        self.head.input_gradient(engine, &d_logits, shape.batch, &mut d_pooled)?;
        let mut d_normalized = normalized;
        engine.input_gradient(pooling_shape, &placement.pooling, &d_pooled, &mut d_normalized)?;
        let mut dx = workspace.compute(engine, tokens * width)?;
        engine.clear(&mut dx)?;
        self.norm.backward(engine, (&x, &statistics), &d_normalized, &mut dx, accumulate)?;
        workspace.give([d_logits, d_pooled, d_normalized, x].into_iter().chain(statistics.into_buffers()));
        ready(gradients(self.norm.parameters_mut().chain(self.head.parameters_mut())))?;
        let dx = layers::backward(engine, workspace, (&mut self.layers, layers), dx, accumulate, ready)?;
        self.patches.parameter_gradients(engine, &dx, &inputs, tokens, accumulate)?;
        self.positions.record(accumulate, |gradient, accumulate| {
            engine.embedding_gradient(&dx, width, &placement.positions, accumulate, gradient)
        })?;
        workspace.give([dx, inputs]);
        ready(gradients(std::iter::once(&mut self.positions).chain(self.patches.parameters_mut())))
    }
}
