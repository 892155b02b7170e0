//! What a recipe will do, before anything is done.

use std::path::PathBuf;

use serde::Serialize;
use twofour::DataType;

use super::{LayerPlan, Mistakes, ModelConfig, OptimizerKind, Place, Precision, Recipe};
use crate::{
    linear::LayerForm,
    model::EncoderTask,
    settings::is_default,
    train::methods::{SparseBegin, SparsityPlan},
};

/// Where a recipe is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceKind {
    /// The CPU; computes in f32.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

/// Bytes of a run on one device. Activations are estimated from the shapes; the rest is exact but for an engine's
/// workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct MemoryPlan {
    /// f32 master weights, and beside adapters the frozen ones.
    pub masters: u64,
    /// f32 gradients of parameters.
    pub gradients: u64,
    /// Both f32 moments; the momentum alone with gradient descent.
    pub moments: u64,
    /// Copies of dense parameters in the data type of GEMMs.
    pub copies: u64,
    /// Packed 2:4 weights, in both directions where masks are transposable, and masks.
    pub packed: u64,
    /// Activations that a forward pass keeps for the backward pass.
    pub activations: u64,
    /// Weights of a teacher, with their copies, and its logits.
    #[serde(skip_serializing_if = "is_default")]
    pub teacher: u64,
}

impl MemoryPlan {
    /// All of it.
    pub fn total(&self) -> u64 {
        let MemoryPlan { masters, gradients, moments, copies, packed, activations, teacher } = *self;
        [masters, gradients, moments, copies, packed, activations, teacher].into_iter().fold(0, u64::saturating_add)
    }
}

/// The levels of the layers that a sparsifier masks under one rule.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LevelPlan {
    /// Names of the layers.
    pub layers: Vec<String>,
    /// What their masks prune.
    pub rule: String,
    /// Whether pruned weights stay zero.
    pub in_place: bool,
    /// Steps after which masks are chosen, with the level: every step at which the level jumps, and some in between.
    pub levels: Vec<(u64, f64)>,
}

/// When the layers of one part of a recipe are 2:4 or masked: those of the method, or those of one override.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StagePlan {
    /// The method.
    pub method: &'static str,
    /// Names of the layers.
    pub layers: Vec<String>,
    /// When they become 2:4, or 3:4 first.
    pub begin: SparseBegin,
    /// The step before which groups keep three of four; absent where they never do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub two_of_four_from: Option<u64>,
    /// The step before which they become dense again; the end of the run where they do not.
    pub end: u64,
    /// True if weights are 2:4; false for 2:4 inputs and for a sparsifier's masks.
    pub two_of_four_weights: bool,
    /// The form of the layers while they are sparse.
    #[serde(skip)]
    pub form: LayerForm,
}

impl StagePlan {
    /// The first step at which the layers may be sparse.
    pub fn earliest(&self) -> u64 {
        match self.begin {
            SparseBegin::Step(step) => step,
            SparseBegin::Settled { earliest, .. } => earliest,
        }
    }
}

/// What a recipe will do.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RecipePlan {
    /// The kind of device that runs it.
    pub device: DeviceKind,
    /// Number of devices, which divide each batch.
    pub devices: usize,
    /// The data type of activations and of GEMMs.
    pub precision: &'static str,
    /// The method.
    pub method: &'static str,
    /// The model that training starts from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<PathBuf>,
    /// The model that it learns from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub teacher: Option<PathBuf>,
    /// How text becomes tokens; absent for a `vit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// Number of tokens of the model; absent for a `vit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<usize>,
    /// Number of classes of a `vit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classes: Option<usize>,
    /// Trainable parameters.
    pub parameters: usize,
    /// Weights of 2:4 layers, without biases.
    pub sparse_weights: usize,
    /// Weights of the layers that a sparsifier masks, without biases.
    pub masked_weights: usize,
    /// Elements of the adapters that train while the model's parameters are frozen.
    #[serde(skip_serializing_if = "is_default")]
    pub adapter_elements: usize,
    /// Optimizer steps.
    pub steps: u64,
    /// When the first layers become 2:4 or masked, and the step before which the last ones become dense again; absent
    /// where no layer is ever sparse.
    pub sparse: Option<(SparseBegin, u64)>,
    /// When the layers of each part are sparse: those of the method, and those of each override.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<StagePlan>,
    /// Tokens of an optimizer step.
    pub step_tokens: u64,
    /// Tokens of all steps.
    pub tokens: u64,
    /// Bytes.
    pub memory: MemoryPlan,
    /// The linear layers.
    pub layers: Vec<LayerPlan>,
    /// The levels of masked layers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub levels: Vec<LevelPlan>,
}

impl Recipe {
    /// The data type of activations and of GEMMs on a device.
    pub fn precision_on(&self, device: DeviceKind) -> Precision {
        match (self.training.precision, device) {
            (Precision::Automatic, DeviceKind::Cpu) => Precision::F32,
            (Precision::Automatic, DeviceKind::Cuda) => Precision::Bf16,
            (precision, _) => precision,
        }
    }

    /// The data type for an engine of a device.
    ///
    /// # Errors
    /// A precision that the device does not compute in; 2:4 layers in f32 on a GPU.
    pub fn compute_type(&self, device: DeviceKind) -> Result<DataType, Mistakes> {
        let precision = self.precision_on(device);
        let settings = &self.sparsity;
        let mut methods = settings.overrides.iter().filter_map(|own| own.method).chain([settings.method]);
        let has_sparse = self.layers().iter().any(|layer| layer.sparse)
            || methods.any(|m| m.sparse_form() == LayerForm::TwoOfFourInput);
        let problem = match (device, precision) {
            (DeviceKind::Cpu, Precision::Bf16 | Precision::F16) => "the CPU trains in \"f32\"",
            (DeviceKind::Cuda, Precision::F32) if has_sparse => "2:4 layers on a GPU require \"bf16\" or \"f16\"",
            (_, Precision::Bf16) => return Ok(DataType::BF16),
            (_, Precision::F16) => return Ok(DataType::F16),
            (_, Precision::F32 | Precision::Automatic) => return Ok(DataType::F32),
        };
        let mut mistakes = Mistakes::default();
        mistakes.add(Place::Absent, "training.precision", format!("found \"{}\"; {problem}", precision.name()));
        Err(mistakes)
    }

    /// Checks that so many devices can divide each batch evenly.
    ///
    /// # Errors
    /// A batch that is not a multiple of the number of devices, or a micro-batch that does not divide a device's share.
    pub fn expect_even_shares(&self, devices: usize) -> Result<(), Mistakes> {
        let mut mistakes = Mistakes::default();
        let (batch, devices) = (self.training.batch, devices.max(1));
        let share = batch / devices;
        if !batch.is_multiple_of(devices) {
            let problem =
                format!("found {batch}, expected a multiple of {devices}, so that each GPU gets as many sequences");
            mistakes.add(Place::Absent, "training.batch", problem);
        } else if let Some(micro) =
            self.training.micro_batch.filter(|micro| *micro < share && !share.is_multiple_of(*micro))
        {
            let problem =
                format!("found {micro}, expected a divisor of the {share} sequences of each of {devices} GPUs");
            mistakes.add(Place::Absent, "training.micro_batch", problem);
        }
        mistakes.or(())
    }

    /// What the recipe will do on a device.
    pub fn plan(&self, device: DeviceKind) -> RecipePlan {
        self.plan_on(device, 1)
    }

    /// What the recipe will do on several devices, which divide each batch; memory is that of one of them.
    pub fn plan_on(&self, device: DeviceKind, devices: usize) -> RecipePlan {
        let layers = self.layers();
        let precision = self.precision_on(device);
        // A recipe that was not parsed may contradict itself: its plan is not run then.
        let sparsity = self.sparsity_plan().ok();
        let levels = sparsity.iter().flat_map(|plan| plan.parts().filter_map(|part| self.levels_of(part))).collect();
        let stages: Vec<_> =
            sparsity.iter().flat_map(|plan| plan.parts().filter_map(|part| self.stage_of(part))).collect();
        let end = stages.iter().map(|stage| stage.end).max();
        let begin = stages.iter().min_by_key(|stage| stage.earliest()).map(|stage| stage.begin);
        let sparse = layers.iter().filter(|layer| layer.sparse);
        let sparse_weights = sparse.map(LayerPlan::weights).sum();
        let masked_weights = layers.iter().filter(|layer| layer.masked).map(LayerPlan::weights).sum();
        let freezing =
            |layer: &LayerPlan| sparsity.as_ref()?.part_of(&layer.name).filter(|part| part.method.freezes_model());
        let factors = |layer: &LayerPlan| {
            freezing(layer).map(|part| part.method.factor_elements(part, layer.out_features, layer.in_features))
        };
        let adapter_elements = layers.iter().filter_map(factors).sum();
        let frozen_weights = layers.iter().filter(|layer| freezing(layer).is_some()).map(LayerPlan::weights).sum();
        let config = self.model_config();
        let (vocabulary, classes) = match &config {
            ModelConfig::Decoder(config) => (Some(config.vocabulary()), None),
            ModelConfig::Vit(config) => (None, Some(config.classes)),
            ModelConfig::Bert(config) => (Some(config.encoder.vocabulary()), None),
        };
        let parameters = config.parameters();
        let step_tokens = self.training.batch as u64 * config.positions() as u64;
        RecipePlan {
            device,
            devices,
            precision: precision.name(),
            method: self.sparsity.method.name(),
            from: self.model.from.clone(),
            teacher: self.distillation.as_ref().map(|own| own.teacher.clone()),
            tokenizer: vocabulary.map(|_| self.data.tokenizer.clone().into()),
            vocabulary,
            classes,
            parameters,
            sparse_weights,
            masked_weights,
            adapter_elements,
            steps: self.training.steps,
            sparse: begin.zip(end),
            stages,
            step_tokens,
            tokens: step_tokens.saturating_mul(self.training.steps),
            memory: self.memory(
                &layers,
                [parameters, sparse_weights, frozen_weights, adapter_elements].map(|count: usize| count as u64),
                precision,
                devices,
            ),
            layers,
            levels,
        }
    }

    /// When the layers of a part are sparse, where it has some.
    fn stage_of(&self, part: &SparsityPlan) -> Option<StagePlan> {
        let is_sparse = !part.is_dense() && !part.layers.is_empty();
        is_sparse.then(|| StagePlan {
            method: part.method.name(),
            layers: part.layers.clone(),
            begin: part.begin,
            two_of_four_from: part.two_of_four_from,
            end: part.end.unwrap_or(self.training.steps),
            two_of_four_weights: part.method.sparse_form() == LayerForm::TwoOfFour,
            form: part.method.sparse_form(),
        })
    }

    /// The levels of a part that a sparsifier masks.
    fn levels_of(&self, part: &SparsityPlan) -> Option<LevelPlan> {
        let (own, SparseBegin::Step(begin)) = (part.sparsifier.as_ref()?, part.begin) else { return None };
        let end = part.end.unwrap_or(self.training.steps);
        let levels = own.levels([begin, end], part.mask_every);
        let (layers, rule) = (part.layers.clone(), own.to_string());
        (!layers.is_empty()).then_some(LevelPlan { layers, rule, in_place: own.in_place, levels })
    }

    fn memory(
        &self,
        layers: &[LayerPlan],
        [parameters, sparse_weights, frozen_weights, adapter_elements]: [u64; 4],
        precision: Precision,
        devices: usize,
    ) -> MemoryPlan {
        let element = if precision == Precision::F32 { 4 } else { 2 };
        // Kept values and four bits of metadata for each group of four; a mask of one bit for each weight.
        let packed = |layer: &LayerPlan| {
            let weights = layer.out_features as u64 * layer.in_features.next_multiple_of(4) as u64;
            let one = weights / 2 * element + weights / 8;
            one * if layer.transposable { 2 } else { 1 } + weights / 8
        };
        let plan = self.sparsity_plan().ok();
        let rounds = |layer: &LayerPlan| {
            let part = plan.as_ref().and_then(|plan| plan.part_of(&layer.name));
            part.is_some_and(|part| part.method.rounds_weights())
        };
        // Beside adapters weights have gradients alone, and factors have moments.
        let (gradients, moments) = match adapter_elements {
            0 => [parameters - self.frozen_parameters(); 2].into(),
            _ => (frozen_weights, adapter_elements),
        };
        MemoryPlan {
            masters: 4 * (parameters + frozen_weights + adapter_elements),
            gradients: 4 * gradients,
            moments: if self.training.optimizer == OptimizerKind::Sgd { 4 } else { 8 } * moments,
            // In f32 the masters are what is computed with.
            copies: if precision == Precision::F32 { 0 } else { element * (parameters - sparse_weights) },
            packed: layers
                .iter()
                .map(|layer| match (layer.sparse, layer.masked) {
                    (true, _) => packed(layer),
                    (false, true) if rounds(layer) => layer.weights() as u64 * 33 / 8,
                    (false, true) => layer.weights() as u64 / 8,
                    (false, false) => 0,
                })
                .sum(),
            activations: self.activations(element, devices),
            teacher: self.teacher_memory(precision, devices),
        }
    }

    /// Parameters that stay as they are.
    fn frozen_parameters(&self) -> u64 {
        match self.model_config() {
            ModelConfig::Decoder(config) if self.training.frozen_embeddings => {
                let tables = if config.is_tied() { 1 } else { 2 };
                (tables * config.vocabulary() * config.width) as u64
            }
            _ => 0,
        }
    }

    fn teacher_memory(&self, precision: Precision, devices: usize) -> u64 {
        let Some(config) = self.distillation.as_ref().and_then(|own| own.config.as_ref()) else { return 0 };
        let (element, copies) = if precision == Precision::F32 { (4, 0) } else { (2, 2) };
        let logits = self.sequences_at_once(devices).saturating_mul((self.model.context * config.vocabulary()) as u64);
        ((4 + copies) * config.parameters() as u64).saturating_add(logits.saturating_mul(element))
    }

    /// Sequences of a forward pass on one of several devices.
    fn sequences_at_once(&self, devices: usize) -> u64 {
        self.training.micro_batch().min(self.training.batch / devices.max(1)) as u64
    }

    /// Elements that a forward pass keeps for each token: of a block its input twice (one for each residual branch),
    /// both norms, queries, keys and values, probabilities of attention, merged heads, pre-activation and activation;
    /// and the logits.
    fn activations(&self, element: u64, devices: usize) -> u64 {
        let config = self.model_config();
        let [layers, width, context, heads, hidden, outputs] = match &config {
            ModelConfig::Decoder(c) => {
                [c.layers, c.width, c.context(), c.attention.heads, c.feed_forward.hidden, c.vocabulary()]
            }
            ModelConfig::Vit(c) => [c.layers, c.width, c.tokens(), c.heads, c.feed_forward, c.classes],
            ModelConfig::Bert(c) => {
                let e = &c.encoder;
                // Scores are only of tokens that are masked, or two of each token.
                let scores = match c.task {
                    EncoderTask::MaskedTokens => e.vocabulary() * c.targets() / c.positions.max(1),
                    EncoderTask::Answers => 4,
                };
                [e.layers, e.width, c.positions, e.attention.heads, e.feed_forward.hidden, scores]
            }
        }
        .map(|size| size as u64);
        let tokens = self.sequences_at_once(devices) * context;
        let block = 8 * width + heads * context + 2 * hidden;
        let elements = layers.saturating_mul(block) + 2 * width + outputs;
        tokens.saturating_mul(elements).saturating_mul(element)
    }
}
