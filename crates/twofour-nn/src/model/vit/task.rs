//! Classifying images.

use std::collections::{HashMap, hash_map::Entry};

use twofour::layer::Accumulate;

use super::{Pooling, VitConfig};
use crate::{
    Error, Result,
    block::{BatchShape, Workspace},
    engine::{Buffer as _, Engine, Kind, LinearShape, Nonlinearity},
    linear::Linear,
    model::{
        GptConfig, ImageInput, IndexBatch, Saved, Task, TransformerConfig,
        file::VIT_KEY,
        transformer::{Builder, INITIAL_DEVIATION, Places, expect_below},
    },
    parameter::Parameter,
    parts::parts,
};

/// The embedding of patches, and the head that scores the classes of an image.
#[derive(Debug)]
pub struct ImageClasses<E: Engine> {
    input: PatchEmbedding<E>,
    head: Linear<E>,
    pooling: Pooling,
    /// The weights with which each token is pooled to each image, `[images · tokens, images]`, by number of images.
    weights: HashMap<usize, E::Buffer>,
}

/// The embedding of patches and their positions.
#[derive(Debug)]
pub struct PatchEmbedding<E: Engine> {
    /// `[tokens, width]`.
    positions: Parameter<E>,
    patches: Linear<E>,
    places: Places<E>,
    /// The tokens of all images, `[images, tokens, values of a patch]`.
    images: Option<E::Buffer>,
}

parts!(PatchEmbedding<E> { positions, patches });

/// The patches of a batch, `[tokens, values of a patch]`.
#[derive(Debug)]
pub struct SavedPatches<E: Engine>(E::Buffer);

/// What the head reads of each image.
#[derive(Debug)]
pub struct Pooled<E: Engine>(E::Buffer);

impl<E: Engine> Pooled<E> {
    /// `[images, width]`.
    pub(super) fn features(&self) -> &E::Buffer {
        &self.0
    }
}

impl<E: Engine> Saved<E> for SavedPatches<E> {
    fn into_buffers(self) -> Vec<E::Buffer> {
        vec![self.0]
    }
}

impl<E: Engine> Saved<E> for Pooled<E> {
    fn into_buffers(self) -> Vec<E::Buffer> {
        vec![self.0]
    }
}

impl<E: Engine> PatchEmbedding<E> {
    /// Tokens of all images in the engine's memory.
    fn image_tokens(&self) -> usize {
        self.images.as_ref().map_or(0, |images| images.len() / self.patches.in_features())
    }
}

impl<E: Engine> ImageClasses<E> {
    pub(super) fn set_images(&mut self, images: E::Buffer) {
        self.input.images = Some(images);
    }

    /// The shape of pooling as a product: `pooledᵀ` is that of a weight gradient, whose output gradient is the matrix
    /// of weights.
    fn pooling_shape(&self, shape: BatchShape) -> LinearShape {
        LinearShape { tokens: shape.tokens(), out_features: shape.batch, in_features: self.head.in_features() }
    }

    /// Makes the weights of pooling for batches of that shape.
    fn place(&mut self, engine: &E, BatchShape { batch: images, positions: tokens }: BatchShape) -> Result<()> {
        let Entry::Vacant(vacant) = self.weights.entry(images) else { return Ok(()) };
        let mut weights = vec![0f32; images * tokens * images];
        for (token, weights) in weights.chunks_exact_mut(images).enumerate() {
            weights[token / tokens] = match self.pooling {
                Pooling::Mean => 1.0 / tokens as f32,
                Pooling::Class if token % tokens == 0 => 1.0,
                Pooling::Class => 0.0,
            };
        }
        let mut buffer = engine.zeros(Kind::Compute, weights.len())?;
        engine.write(&mut buffer, &weights)?;
        vacant.insert(buffer);
        Ok(())
    }

    fn weights(&self, shape: BatchShape) -> Result<&E::Buffer> {
        self.weights.get(&shape.batch).ok_or_else(unprepared)
    }
}

fn unprepared() -> Error {
    let (what, found) = ("the model", "without images".to_owned());
    Error::Setting { what, found, expected: "prepared for its data" }
}

impl<E: Engine> Task<E> for ImageClasses<E> {
    type Config = VitConfig;
    type Batch = IndexBatch<E>;
    type Input = PatchEmbedding<E>;
    type Head = Linear<E>;
    type SavedInput = SavedPatches<E>;
    type SavedHead = Pooled<E>;

    const IS_CLASSIFIER: bool = true;

    fn transformer(config: &VitConfig) -> Result<TransformerConfig> {
        config.validate()?;
        let &VitConfig { image, channels, patch, layers, width, heads, feed_forward, epsilon, .. } = config;
        let class_token = config.pooling == Pooling::Class;
        let sizes = GptConfig { layers, width, heads, context: config.tokens(), feed_forward };
        let image = ImageInput { image, channels, patch, class_token, registers: 0 };
        let mut transformer = TransformerConfig::vit(&sizes, image);
        transformer.norm.epsilon = epsilon;
        if config.squared_relu {
            transformer.feed_forward.activation = Nonlinearity::SquaredRelu;
        }
        Ok(transformer)
    }

    fn deviation(_: &VitConfig, _: &str) -> f64 {
        INITIAL_DEVIATION
    }

    fn build(builder: &Builder<'_, E>, config: &VitConfig) -> Result<Self> {
        let patches = builder.linear("patches", (config.width, config.patch_len()), true)?;
        let positions = builder.table("positions.weight", config.tokens())?;
        Ok(ImageClasses {
            input: PatchEmbedding { positions, patches, places: Places::default(), images: None },
            head: builder.linear("head", (config.classes, config.width), true)?,
            pooling: config.pooling,
            weights: HashMap::new(),
        })
    }

    fn input(&self) -> &PatchEmbedding<E> {
        &self.input
    }

    fn head(&self) -> &Linear<E> {
        &self.head
    }

    fn input_and_head_mut(&mut self) -> (&mut PatchEmbedding<E>, &mut Linear<E>) {
        (&mut self.input, &mut self.head)
    }

    fn positions(config: &VitConfig) -> usize {
        config.tokens()
    }

    fn note_squared_relu(config: &mut VitConfig) -> Result<()> {
        config.squared_relu = true;
        Ok(())
    }

    fn metadata(config: &VitConfig) -> serde_json::Result<(&'static str, String)> {
        Ok((VIT_KEY, serde_json::to_string(config)?))
    }

    fn expect_shape(&self, config: &VitConfig, shape: BatchShape) -> Result<()> {
        if shape.batch == 0 || shape.positions != config.tokens() {
            let (what, found) = ("the batch", format!("{} images of {} tokens", shape.batch, shape.positions));
            return Err(Error::Setting { what, found, expected: "images of the model's size, at least one" });
        }
        Ok(())
    }

    fn expect_batch(&self, config: &VitConfig, batch: (&[u32], &[u32]), shape: BatchShape) -> Result<()> {
        let inputs = ("inputs", batch.0, shape.tokens(), self.input.image_tokens());
        for (what, ids, expected, bound) in [inputs, ("targets", batch.1, shape.batch, config.classes)] {
            if ids.len() != expected {
                return Err(Error::length(what, expected, ids.len()));
            }
            expect_below(what, ids, bound)?;
        }
        Ok(())
    }

    fn upload(
        &self,
        engine: &E,
        _: &VitConfig,
        batch: (&[u32], &[u32]),
        _: BatchShape,
        to: &mut Option<IndexBatch<E>>,
    ) -> Result<()> {
        IndexBatch::upload(engine, batch, to)
    }

    fn targets(batch: &IndexBatch<E>) -> &E::Buffer {
        &batch.targets
    }

    fn classes(&self, _: BatchShape) -> usize {
        self.head.out_features()
    }

    fn embed(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (_, batch): (&VitConfig, &IndexBatch<E>),
        shape: BatchShape,
    ) -> Result<(E::Buffer, SavedPatches<E>)> {
        self.place(engine, shape)?;
        let PatchEmbedding { positions, patches, places, images } = &mut self.input;
        let (tokens, width, patch_len) = (shape.tokens(), patches.out_features(), patches.in_features());
        let images = images.as_ref().ok_or_else(unprepared)?;
        let mut inputs = workspace.compute(engine, tokens * patch_len)?;
        engine.embedding(images, patch_len, &batch.inputs, &mut inputs)?;
        let mut x = workspace.compute(engine, tokens * width)?;
        patches.forward(engine, &inputs, tokens, &mut x)?;
        let mut placed = workspace.compute(engine, tokens * width)?;
        engine.embedding(positions.compute(), width, places.of(engine, shape)?, &mut placed)?;
        engine.add(&placed, &mut x)?;
        workspace.give([placed]);
        Ok((x, SavedPatches(inputs)))
    }

    fn embed_gradient(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (SavedPatches(inputs), _): (SavedPatches<E>, &IndexBatch<E>),
        dx: E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<()> {
        let PatchEmbedding { positions, patches, places, .. } = &mut self.input;
        patches.parameter_gradients(engine, &dx, &inputs, shape.tokens(), accumulate)?;
        let (places, width) = (places.of(engine, shape)?, patches.out_features());
        positions.record(accumulate, |gradient, accumulate| {
            engine.embedding_gradient(&dx, width, places, accumulate, gradient)
        })?;
        workspace.give([dx, inputs]);
        Ok(())
    }

    fn scores(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (hidden, _): (&E::Buffer, &IndexBatch<E>),
        shape: BatchShape,
    ) -> Result<(E::Buffer, Pooled<E>)> {
        let (width, classes) = (self.head.in_features(), self.head.out_features());
        let (of_pooling, weights) = (self.pooling_shape(shape), self.weights(shape)?);
        let mut sums = workspace.take(engine, Kind::Wide, shape.batch * width)?;
        engine.weight_gradient(of_pooling, weights, hidden, Accumulate::Overwrite, &mut sums)?;
        let mut pooled = workspace.compute(engine, shape.batch * width)?;
        engine.round(&sums, &mut pooled)?;
        let mut scores = workspace.compute(engine, shape.batch * classes)?;
        self.head.forward(engine, &pooled, shape.batch, &mut scores)?;
        workspace.give([sums]);
        Ok((scores, Pooled(pooled)))
    }

    fn scores_gradient(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (hidden, Pooled(pooled), _): (E::Buffer, Pooled<E>, &IndexBatch<E>),
        d_scores: E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        self.head.parameter_gradients(engine, &d_scores, &pooled, shape.batch, accumulate)?;
        let mut d_pooled = pooled;
        self.head.input_gradient(engine, &d_scores, shape.batch, &mut d_pooled)?;
        let mut d_hidden = hidden;
        engine.input_gradient(self.pooling_shape(shape), self.weights(shape)?, &d_pooled, &mut d_hidden)?;
        workspace.give([d_scores, d_pooled]);
        Ok(d_hidden)
    }
}
