//! The models whose steps are measured, and what they learn from.

use std::{borrow::Cow, sync::Arc};

use anyhow::Result;
use twofour::{layer::MaskRule, select::Transposable};
use twofour_nn::{
    linear::SparsePrecision,
    model::{Gpt, GptConfig, Pooling, TransformerConfig, Vit, VitConfig},
    recipe::TrainingSettings,
    train::{Corpus, ImageSet, TrainingData},
};
use twofour_transformer::engine::cuda::CudaEngine;

/// Sequences of a GPT's batch.
const BATCH: usize = 8;

/// Elements of a head of the GPTs whose width is given.
const HEAD: usize = 64;

/// GPT-2 774M's blocks, over bytes.
const LARGE: GptConfig = GptConfig { layers: 36, width: 1280, heads: 20, context: 1024, feed_forward: 5120 };

/// Height, width of a patch, and values of a pixel.
const PATCH: (usize, usize) = (14, 3);

/// A model by name.
#[derive(Debug, Clone)]
pub(super) struct StepModel {
    name: Cow<'static, str>,
    pub(super) sizes: Sizes,
}

/// The sizes of a model.
#[derive(Debug, Clone, Copy)]
pub(super) enum Sizes {
    Gpt {
        config: GptConfig,
        batch: usize,
    },
    /// Of ViT-L's width.
    Vit {
        layers: usize,
        tokens: usize,
        batch: usize,
    },
}

/// Blocks of GPT-2 774M.
const fn gpt2(layers: usize) -> Sizes {
    Sizes::Gpt { config: GptConfig { layers, ..LARGE }, batch: BATCH }
}

/// The models of the suite `step`: a third of GPT-2 774M, and all of it; ViT-L with images of two sizes.
pub(super) const MODELS: [StepModel; 4] = [
    StepModel { name: Cow::Borrowed("gpt2-12-layers"), sizes: gpt2(12) },
    StepModel { name: Cow::Borrowed("gpt2-774m"), sizes: gpt2(LARGE.layers) },
    StepModel { name: Cow::Borrowed("vit-l-32x257"), sizes: Sizes::Vit { layers: 24, tokens: 257, batch: 32 } },
    StepModel { name: Cow::Borrowed("vit-l-8x1626"), sizes: Sizes::Vit { layers: 24, tokens: 1626, batch: 8 } },
];

impl StepModel {
    /// The name.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Blocks of a GPT with MLPs of a shape `[out, in]`, over one sequence of at most 1024 tokens, or several of 1024;
    /// or a reason why there is none.
    pub(super) fn gpt(layers: usize, [outputs, inputs]: [usize; 2], tokens: usize) -> Result<Self, String> {
        if !inputs.is_multiple_of(HEAD) {
            return Err(format!(
                "a width of {inputs} has no whole number of heads of {HEAD}; choose a multiple of {HEAD}"
            ));
        }
        let context = tokens.min(LARGE.context);
        if !tokens.is_multiple_of(context) || tokens < 2 {
            let most = LARGE.context;
            return Err(format!(
                "{tokens} tokens are no sequences of {most}; choose 2 to {most}, or a multiple of {most}"
            ));
        }
        let config = GptConfig { layers, width: inputs, heads: inputs / HEAD, context, feed_forward: outputs };
        let batch = tokens / context;
        let name = Cow::Owned(format!("{outputs}x{inputs}, {batch} x {context}"));
        Ok(StepModel { name, sizes: Sizes::Gpt { config, batch } })
    }
}

/// The models of a name, or of a family: those whose names go on after a hyphen.
pub(super) fn named<'a>(models: &'a [StepModel], name: &'a str) -> impl Iterator<Item = &'a StepModel> {
    models
        .iter()
        .filter(move |model| model.name.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('-')))
}

/// The name of a contender, and how its MLPs are.
pub(super) type ContenderForm = (&'static str, Option<(MaskRule, SparsePrecision)>);

const GREEDY: MaskRule = MaskRule::Transposable(Transposable::GreedyAbs);

/// The contenders of a ViT are the first two.
const CONTENDERS: [ContenderForm; 4] = [
    ("dense", None),
    ("2:4, greedy", Some((GREEDY, SparsePrecision::Activations))),
    ("2:4, magnitude", Some((MaskRule::Magnitude, SparsePrecision::Activations))),
    ("2:4, greedy, fp8", Some((GREEDY, SparsePrecision::Fp8))),
];

/// Makes the model that learns from samples `D`.
type Build<D> = dyn Fn(&CudaEngine) -> twofour_nn::Result<<D as TrainingData>::Model<CudaEngine>>;

/// A model to be trained, and its data.
pub(super) struct Task<D: TrainingData> {
    pub(super) kind: &'static str,
    /// Layers, width, heads, tokens of a sample, width of the feed-forward block.
    pub(super) sizes: [usize; 5],
    pub(super) batch: usize,
    pub(super) contenders: &'static [ContenderForm],
    pub(super) build: Box<Build<D>>,
    pub(super) data: Arc<D>,
}

impl Task<Corpus> {
    /// A GPT over bytes.
    pub(super) fn gpt(config: GptConfig, batch: usize) -> Result<Self> {
        let GptConfig { layers, width, heads, context, feed_forward } = config;
        let build = move |engine: &CudaEngine| {
            Gpt::build(engine, &TransformerConfig::from(&config), |name, shape| {
                Ok(values(name, shape.iter().product()))
            })
        };
        Ok(Task {
            kind: "gpt",
            sizes: [layers, width, heads, context, feed_forward],
            batch,
            contenders: &CONTENDERS,
            build: Box::new(build),
            data: Arc::new(corpus()?),
        })
    }
}

impl Task<ImageSet> {
    /// Layers of ViT-L over images of some tokens.
    pub(super) fn vit(layers: usize, tokens: usize, batch: usize) -> Result<Self> {
        let config = vit_config(layers, tokens);
        let sizes = [layers, config.width, config.heads, tokens, config.feed_forward];
        let build = move |engine: &CudaEngine| {
            Vit::build(engine, &config, |name, shape| Ok(values(name, shape.iter().product())))
        };
        let data = Arc::new(images(tokens, batch)?);
        Ok(Task { kind: "vit", sizes, batch, contenders: &CONTENDERS[..2], build: Box::new(build), data })
    }
}

/// The work of `bench/python/vit_step.py`: an image is a row of as many patches of 588 values, so that every token is a
/// patch, and the head reads the mean over all.
fn vit_config(layers: usize, tokens: usize) -> VitConfig {
    let (patch, channels) = PATCH;
    VitConfig {
        image: [patch, patch * tokens],
        channels,
        patch,
        classes: 1000,
        pooling: Pooling::Mean,
        layers,
        width: 1024,
        heads: 16,
        feed_forward: 4096,
        epsilon: 1e-6,
        squared_relu: false,
    }
}

/// The settings of a run that never ends.
pub(super) fn settings(batch: usize) -> TrainingSettings {
    TrainingSettings { batch, steps: 10_000, warm_up: 100, learning_rate: 3e-4, ..Default::default() }
}

/// A MiB of bytes that look random. The trainer requires a validation part.
fn corpus() -> Result<Corpus> {
    let text = (0..1u32 << 20).map(|at| (bits(at) >> 24) as u8).collect();
    Ok(Corpus::new(text, 0.01)?)
}

/// Two batches of images that look random, of the first 250 classes. The trainer requires a validation part.
fn images(tokens: usize, batch: usize) -> Result<ImageSet> {
    let ((patch, channels), count) = (PATCH, 2 * batch);
    let shape = [patch, patch * tokens, channels];
    let pixels = 0..(count * shape.iter().product::<usize>()) as u32;
    let labels = (0..count as u32).map(|image| (bits(!image) % 250) as u8).collect();
    Ok(ImageSet::new(shape, pixels.map(|at| (bits(at) >> 24) as u8).collect(), labels, 0.125)?)
}

/// Bits that look random.
fn bits(at: u32) -> u32 {
    let mixed = (at ^ at >> 16).wrapping_mul(0x85EB_CA6B);
    (mixed ^ mixed >> 13).wrapping_mul(0xC2B2_AE35)
}

/// Initial values, of the deviation that a transformer has: drawn quickly, because nothing is learned from them.
fn values(name: &str, count: usize) -> Vec<f32> {
    if name.ends_with("bias") {
        return vec![0.0; count];
    }
    if name.ends_with("norm.weight") {
        return vec![1.0; count];
    }
    let seed = name.bytes().fold(0u32, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
    let value = |at: u32| (bits(at.wrapping_add(seed)) as f32 / u32::MAX as f32 - 0.5) * 0.07;
    (0..count as u32).map(value).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use twofour_nn::{
        model::{Gpt, GptConfig, TransformerConfig, Vit, VitConfig},
        train::{SparsityPlan, Trainer},
    };
    use twofour_transformer::engine::cpu::CpuEngine;

    use super::{BATCH, LARGE, MODELS, Sizes, StepModel, bits, corpus, images, named, settings, values, vit_config};

    /// What a GPU is given trains: here with a tiny model of the same context on a CPU.
    #[test]
    fn the_settings_and_the_text_train() {
        corpus().unwrap().expect_sequences_of(LARGE.context).unwrap();
        let config = GptConfig { layers: 1, width: 8, heads: 2, context: 16, feed_forward: 16 };
        let model = Gpt::build(&CpuEngine, &TransformerConfig::from(&config), |name, shape| {
            Ok(values(name, shape.iter().product()))
        })
        .unwrap();
        let corpus = Arc::new(corpus().unwrap());
        let mut trainer =
            Trainer::with_model(CpuEngine, model, &settings(BATCH), SparsityPlan::dense(), corpus).unwrap();
        let report = trainer.step().unwrap();
        assert_eq!((report.skipped, report.targets), (false, BATCH * 16));
    }

    /// The images of a GPU's ViT train, here a tiny one of as many tokens.
    #[test]
    fn the_images_train() {
        let (tokens, batch) = (5, 4);
        let config = VitConfig { width: 8, heads: 2, feed_forward: 16, ..vit_config(1, tokens) };
        assert_eq!((config.tokens(), config.patch_len()), (tokens, 588));
        let model = Vit::build(&CpuEngine, &config, |name, shape| Ok(values(name, shape.iter().product()))).unwrap();
        let images = Arc::new(images(tokens, batch).unwrap());
        let mut trainer =
            Trainer::with_model(CpuEngine, model, &settings(batch), SparsityPlan::dense(), images).unwrap();
        let report = trainer.step().unwrap();
        assert_eq!((report.skipped, report.targets), (false, batch));
    }

    #[test]
    fn a_name_selects_a_model_or_a_family() {
        let of = |name| named(&MODELS, name).map(StepModel::name).collect::<Vec<_>>();
        assert_eq!(of("vit-l"), ["vit-l-32x257", "vit-l-8x1626"]);
        assert_eq!(of("vit-l-8x1626"), ["vit-l-8x1626"]);
        assert_eq!(of("gpt2"), ["gpt2-12-layers", "gpt2-774m"]);
        assert!(of("vit").len() == 2 && of("vi").is_empty() && of("").is_empty());
    }

    /// The parameters of DINOv2's ViT-L but for its patches, its layer scale and its head (timm: 304 M).
    #[test]
    fn sizes_are_those_of_vit_l() {
        let model = named(&MODELS, "vit-l-32x257").next().unwrap();
        let Sizes::Vit { layers, tokens, batch } = model.sizes else { panic!("{model:?}") };
        let config = vit_config(layers, tokens);
        config.validate().unwrap();
        let block = 12 * 1024 * 1024 + 13 * 1024;
        let others = 588 * 1024 + 1024 + 257 * 1024 + 2 * 1024 + 1000 * 1024 + 1000;
        assert_eq!((config.parameters(), batch), (24 * block + others, 32));
    }

    #[test]
    fn initial_values_spread_as_a_gpt_s() {
        let values = values("blocks.0.mlp.up.weight", 100_000);
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / 1e5;
        let deviation = (values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 1e5).sqrt();
        assert!(mean.abs() < 5e-4 && (0.019..0.022).contains(&deviation), "{mean}, {deviation}");
        let mut bytes = [0; 256];
        (0..1u32 << 16).for_each(|at| bytes[(bits(at) >> 24) as usize] += 1);
        assert!(bytes.iter().all(|count| (150..400).contains(count)), "{bytes:?}");
    }
}
