//! Adapters: low-rank updates that train beside 2:4 weights, while the model is frozen.
//!
//! | kind | what a layer computes with | merged |
//! |---|---|---|
//! | [`AdapterKind::Lora`] | `W + s · B A` (Hu et al., ICLR 2022) | under the mask, which loses `(1 - m) ⊙` the update |
//! | [`AdapterKind::Lors`] | `W + s · m ⊙ (B A)` (LoRS, 2025) | the same |
//! | [`AdapterKind::Spp`] | `W + s · A' ⊙ b ⊙ W` (Lu et al., ICML 2024) | the same |
//!
//! `m` is one where `W` is not zero, `s` is `alpha / rank`; the rows of `A'` are those of `A`, each `out / rank` times.
//! With the gradient `G` of what the layer computes with, and `H = G`, or `m ⊙ G` of LoRS,
//!
//! ```text
//! LoRA, LoRS:  ∂/∂B = s · H Aᵀ                        ∂/∂A = s · Bᵀ H
//! SPP:         ∂/∂b_i = s · Σ_j G_ij W_ij A'_ij       ∂/∂A_kj = s · Σ_(i of k) G_ij W_ij b_i
//! ```
//!
//! Factors and their moments are on the host, and train by AdamW there.

use std::collections::BTreeMap;

use rayon::prelude::*;
use twofour::{
    Mask, MatrixRef,
    adamw_step::{self, Moments, VariancePhase},
    file::{PlannedTensor, Reader, StoredDType},
    layer::WeightGradient,
};

use super::{
    HostMasks, MaskedLayer, Merged, Method, SparseBegin, SparsityPlan, SparsitySettings, TrainingMethod, WeightOnHost,
    conflict,
};
use crate::{
    Error, Result,
    engine::AdamWStep,
    linear::{LayerForm, Masking, SparsePrecision},
    random::Stream,
    settings::{Named, OwnKind, OwnSetting, OwnSettings, OwnValue, name_of},
};

pub(super) const METHOD: Method = Method { name: "adapters", method: &Adapters };

const ELSEWHERE: &str = "only \"adapters\" trains factors beside weights";

const RANK: OwnSetting = OwnSetting {
    key: "rank",
    kind: OwnKind::Number("a whole number from 1 to 65536", |x| (1.0..=65536.0).contains(&x) && x.fract() == 0.0),
    default: Some(16.0),
    elsewhere: ELSEWHERE,
};

const ALPHA: OwnSetting = OwnSetting {
    key: "alpha",
    kind: OwnKind::Number("a number above 0", |x| x > 0.0),
    default: Some(32.0),
    elsewhere: ELSEWHERE,
};

const KIND: OwnSetting =
    OwnSetting { key: "adapter", kind: OwnKind::Word(&["lora", "lors", "spp"]), default: None, elsewhere: ELSEWHERE };

/// The metadata key of a checkpoint's state beside factors, moments and masks.
const STATE_KEY: &str = "twofour.adapters";

/// What a checkpoint has of each of the two factors.
const PARTS: [&str; 3] = ["", ".first_moment", ".second_moment"];

/// How an adapter changes a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdapterKind {
    /// The product of its factors is added to all elements.
    Lora,
    /// The product of its factors is added where the weight is not zero.
    #[default]
    Lors,
    /// The elements are multiplied.
    Spp,
}

impl Named for AdapterKind {
    const ALL: &'static [(&'static str, Self)] =
        &[("lora", AdapterKind::Lora), ("lors", AdapterKind::Lors), ("spp", AdapterKind::Spp)];
}

impl AdapterKind {
    /// The name in a recipe.
    pub fn name(self) -> &'static str {
        name_of(self)
    }

    /// The kind of a plan's layers.
    fn of(plan: &SparsityPlan) -> Self {
        let word = plan.own.word(KIND.key);
        Self::ALL.iter().find(|(name, _)| word == Some(*name)).map_or(AdapterKind::default(), |(_, kind)| *kind)
    }
}

struct Adapters;

impl Adapters {
    /// Brings the settings to a plan: those that are given, and defaults.
    fn resolve_own(plan: &mut SparsityPlan, given: &OwnSettings) {
        for setting in [RANK, ALPHA] {
            if let Some(number) = given.number(setting.key).or(setting.default) {
                plan.own.set(setting.key, OwnValue::Number(number));
            }
        }
        let kind = given.word(KIND.key).unwrap_or(AdapterKind::default().name());
        plan.own.set(KIND.key, OwnValue::Word(kind.to_owned()));
    }
}

fn rank_of(plan: &SparsityPlan) -> usize {
    plan.own.number(RANK.key).map_or(1, |rank| rank as usize)
}

impl TrainingMethod for Adapters {
    fn defaults(&self, plan: &mut SparsityPlan, _: u64) {
        plan.mask_every = 0;
        Self::resolve_own(plan, &OwnSettings::default());
    }

    fn own(&self) -> &'static [OwnSetting] {
        &[KIND, RANK, ALPHA]
    }

    fn excludes(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("mask", "its masks are those of the zeros of the model that training starts from"),
            ("mask_every", "its masks stay"),
            ("weight_gradient", "its factors take the gradient of what their layer computes with"),
            ("precision", "its GEMMs are in the precision of activations"),
            ("observe", "its masks stay"),
            ("begin", "the model is frozen from the first step on"),
            ("end", "the model is frozen to the last step"),
        ]
    }

    fn resolve(&self, plan: &mut SparsityPlan, settings: &SparsitySettings, _: u64) -> Result<()> {
        Self::resolve_own(plan, &settings.own);
        Ok(())
    }

    fn check_plan(&self, plan: &SparsityPlan) -> Result<()> {
        for OwnSetting { key, kind, .. } in [RANK, ALPHA] {
            let OwnKind::Number(expected, holds) = kind else { continue };
            let found = plan.own.number(key);
            if !found.is_some_and(|number| number.is_finite() && holds(number)) {
                let found = found.map_or("nothing".to_owned(), |number| number.to_string());
                return Err(Error::Setting { what: key, found, expected });
            }
        }
        let word = plan.own.word(KIND.key).unwrap_or_default();
        if !AdapterKind::ALL.iter().any(|(name, _)| *name == word) {
            let expected = "\"lora\", \"lors\" or \"spp\"";
            return Err(Error::Setting { what: KIND.key, found: format!("{word:?}"), expected });
        }
        let is_plain = plan.decay.is_none() && !plan.observes && plan.precision == SparsePrecision::Activations;
        let is_always = plan.begin == SparseBegin::Step(0) && plan.end.is_none() && plan.two_of_four_from.is_none();
        if !is_plain || !is_always || plan.weight_gradient != WeightGradient::Dense {
            let reason = "its weights and masks stay from the first step to the last";
            let others = "decay, observed masks, 8-bit floats, another weight gradient, a beginning or an end";
            return Err(conflict("the method `adapters`", others, reason));
        }
        Ok(())
    }

    fn sparse_form(&self) -> LayerForm {
        LayerForm::Masked
    }

    fn layers(&self) -> &'static str {
        "*"
    }

    fn unsuitable(&self, _: bool, is_encoder: bool) -> Option<&'static str> {
        is_encoder.then_some("found \"adapters\", which are for decoders; use \"fixed\"")
    }

    fn keeps_zeros(&self) -> bool {
        true
    }

    fn freezes_model(&self) -> bool {
        true
    }

    fn factor_elements(&self, plan: &SparsityPlan, outputs: usize, inputs: usize) -> usize {
        let rank = rank_of(plan);
        match AdapterKind::of(plan) {
            AdapterKind::Spp => rank * inputs + outputs,
            AdapterKind::Lora | AdapterKind::Lors => rank * (inputs + outputs),
        }
    }

    fn requires_adamw(&self) -> Option<&'static str> {
        Some("factors train by it")
    }

    fn trains_weights(&self, _: &SparsityPlan, _: u64) -> bool {
        false
    }

    fn chooses_at(&self, _: &SparsityPlan, _: u64) -> bool {
        true
    }

    fn masking(&self, _: &SparsityPlan) -> Masking {
        Masking::InPlace
    }

    fn masks(&self, layers: &[MaskedLayer<'_>], seed: u64) -> Result<Option<Box<dyn HostMasks>>> {
        let kinds: Vec<AdapterKind> = layers.iter().map(|layer| AdapterKind::of(layer.plan)).collect();
        if let Some(other) = kinds.iter().find(|kind| **kind != kinds[0]) {
            let [first, second] = [kinds[0], *other].map(|kind| format!("`adapter = \"{}\"`", kind.name()));
            return Err(Error::Conflict { first, second, reason: "an adapter's folder holds one kind" });
        }
        let of = |layer: &MaskedLayer<'_>| Ok((layer.weight.to_owned(), Adapter::new(layer, seed)?));
        Ok(Some(Box::new(HostAdapters { layers: layers.iter().map(of).collect::<Result<_>>()? })))
    }

    fn prunes(&self, _: &SparsityPlan) -> Option<String> {
        Some("its zeros alone: it is frozen, and an adapter trains beside it".to_owned())
    }
}

/// The factors of an adapter of one weight.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterFactors {
    /// How they change it.
    pub kind: AdapterKind,
    /// Their rank.
    pub rank: usize,
    /// The factor of the update times the rank.
    pub alpha: f64,
    /// Rows and columns of the weight.
    pub shape: [usize; 2],
    /// `A`, `[rank, in]`.
    pub a: Vec<f32>,
    /// `B`, `[out, rank]`; of SPP `b`, `[out]`.
    pub b: Vec<f32>,
}

/// Columns whose gradients one task adds up.
const COLUMNS: usize = 128;

impl AdapterFactors {
    /// The factor of the update.
    pub fn scale(&self) -> f32 {
        (self.alpha / self.rank as f64) as f32
    }

    /// Rows of the weight that share one of `A` in SPP.
    pub fn repeated(&self) -> usize {
        (self.shape[0] / self.rank).max(1)
    }

    /// Writes the update of a row of the weight, in the order of operations of
    /// [`Merge`](twofour::file::Merge).
    fn update(&self, row: usize, weight: &[f32], update: &mut [f32]) {
        let (cols, scale) = (self.shape[1], self.scale());
        match self.kind {
            AdapterKind::Spp => {
                let columns = &self.a[row / self.repeated() * cols..][..cols];
                for ((update, weight), column) in update.iter_mut().zip(weight).zip(columns) {
                    *update = column * self.b[row] * weight * scale;
                }
            }
            AdapterKind::Lora | AdapterKind::Lors => {
                update.fill(0.0);
                for (factor, a) in self.b[row * self.rank..][..self.rank].iter().zip(self.a.chunks(cols)) {
                    update.iter_mut().zip(a).for_each(|(update, a)| *update += factor * a);
                }
                update.iter_mut().for_each(|update| *update *= scale);
                if self.kind == AdapterKind::Lors {
                    let zeros = update.iter_mut().zip(weight).filter(|(_, weight)| **weight == 0.0);
                    zeros.for_each(|(update, _)| *update = 0.0);
                }
            }
        }
    }

    /// What the layer of a weight computes with.
    fn updated(&self, weight: &[f32]) -> Vec<f32> {
        let cols = self.shape[1];
        let mut updated = vec![0f32; weight.len()];
        updated.par_chunks_mut(cols).zip(weight.par_chunks(cols)).enumerate().for_each(|(row, (updated, weight))| {
            self.update(row, weight, updated);
            updated.iter_mut().zip(weight).for_each(|(updated, weight)| *updated += weight);
        });
        updated
    }

    /// The gradients of both factors by that of what the layer of a weight computes with.
    fn gradients(&self, weight: &[f32], gradient: &[f32]) -> [Vec<f32>; 2] {
        let ([rows, cols], scale, rank) = (self.shape, self.scale(), self.rank);
        // The rows of A that a row of the weight has, and their elements of B.
        let of_row = |row: usize| match self.kind {
            AdapterKind::Spp => (row / self.repeated(), &self.b[row..=row]),
            AdapterKind::Lora | AdapterKind::Lors => (0, &self.b[row * rank..][..rank]),
        };
        // What the gradients of both are taken from, of some columns of a row.
        let taken = |row: usize, columns: std::ops::Range<usize>| -> Vec<f32> {
            let at = row * cols + columns.start..row * cols + columns.end;
            let pairs = gradient[at.clone()].iter().zip(&weight[at]);
            match self.kind {
                AdapterKind::Lora => pairs.map(|(gradient, _)| *gradient).collect(),
                AdapterKind::Lors => pairs.map(|(gradient, w)| if *w == 0.0 { 0.0 } else { *gradient }).collect(),
                AdapterKind::Spp => pairs.map(|(gradient, w)| gradient * w).collect(),
            }
        };
        let mut b = vec![0f32; self.b.len()];
        b.par_chunks_mut(self.b.len() / rows).enumerate().for_each(|(row, b)| {
            let (taken, (first, _)) = (taken(row, 0..cols), of_row(row));
            for (b, a) in b.iter_mut().zip(self.a[first * cols..].chunks(cols)) {
                *b = scale * taken.iter().zip(a).map(|(taken, a)| taken * a).sum::<f32>();
            }
        });
        let of_columns = |first: usize| {
            let width = COLUMNS.min(cols - first);
            let mut sums = vec![0f32; rank * width];
            for row in 0..rows {
                let (taken, (k, b)) = (taken(row, first..first + width), of_row(row));
                for (sums, b) in sums[k * width..].chunks_mut(width).zip(b) {
                    sums.iter_mut().zip(&taken).for_each(|(sum, taken)| *sum += b * taken);
                }
            }
            sums
        };
        let starts: Vec<usize> = (0..cols).step_by(COLUMNS).collect();
        let parts: Vec<Vec<f32>> = starts.par_iter().map(|first| of_columns(*first)).collect();
        let mut a = vec![0f32; rank * cols];
        for (first, part) in starts.into_iter().zip(parts) {
            let width = COLUMNS.min(cols - first);
            for (k, part) in part.chunks(width).enumerate() {
                let row = &mut a[k * cols + first..][..width];
                row.iter_mut().zip(part).for_each(|(a, sum)| *a = scale * sum);
            }
        }
        [a, b]
    }
}

/// The adapters of all layers, by the names of their weights.
#[derive(Debug)]
struct HostAdapters {
    layers: BTreeMap<String, Adapter>,
}

/// The adapter of one weight.
#[derive(Debug, Clone)]
struct Adapter {
    factors: AdapterFactors,
    /// Both moments of each factor.
    moments: [[Vec<f32>; 2]; 2],
    /// The weight, which is frozen; empty before the first step.
    base: Vec<f32>,
    mask: Mask,
    /// What the layer computes with from the next step on, until it is taken.
    updated: Option<Vec<f32>>,
}

impl Adapter {
    fn new(layer: &MaskedLayer<'_>, seed: u64) -> Result<Self> {
        let &MaskedLayer { plan, weight, shape: (rows, cols) } = layer;
        let (kind, rank) = (AdapterKind::of(plan), rank_of(plan));
        if kind == AdapterKind::Spp && !rows.is_multiple_of(rank) {
            let found = format!("{rank} for the {rows} rows of `{weight}`");
            return Err(Error::Setting { what: "the rank of SPP", found, expected: "a divisor of the rows" });
        }
        // As peft begins: A uniform, B zero, so that the first step computes what the model does.
        let (stream, bound) = (Stream::new(seed, &format!("adapter of {weight}")), 1.0 / (cols as f64).sqrt());
        let a = (0..rank * cols).map(|at| ((2.0 * stream.uniform(at as u64) - 1.0) * bound) as f32).collect();
        let b = vec![0.0; if kind == AdapterKind::Spp { rows } else { rows * rank }];
        let alpha = plan.own.number(ALPHA.key).unwrap_or(1.0);
        let factors = AdapterFactors { kind, rank, alpha, shape: [rows, cols], a, b };
        let moments = [&factors.a, &factors.b].map(|factor| [vec![0.0; factor.len()], vec![0.0; factor.len()]]);
        let mask = Mask::from_fn(rows, cols, |_, _| true);
        Ok(Adapter { factors, moments, base: vec![], mask, updated: None })
    }

    /// Takes a weight as the one that is frozen.
    fn begin(&mut self, weight: MatrixRef<'_, f32>) {
        self.base = weight.data().to_vec();
        if self.factors.kind != AdapterKind::Lora {
            self.mask = Mask::of_nonzeros(weight);
        }
    }

    /// A step of AdamW by the gradient of what the layer computed with.
    fn learn(&mut self, gradient: &[f32], step: &AdamWStep) -> Result<()> {
        let AdamWStep { learning_rate, beta1, beta2, epsilon, weight_decay, step, gradient_scale, .. } = *step;
        let phase = VariancePhase::Moving;
        let settings = adamw_step::AdamWStep { learning_rate, beta1, beta2, epsilon, weight_decay, step, phase };
        let gradients = self.factors.gradients(&self.base, gradient);
        let factors = [&mut self.factors.a, &mut self.factors.b];
        for ((factor, mut gradient), [mean, variance]) in factors.into_iter().zip(gradients).zip(&mut self.moments) {
            gradient.iter_mut().for_each(|element| *element *= gradient_scale);
            adamw_step::update(factor, &gradient, Moments { mean, variance, largest: None }, settings)?;
        }
        self.updated = Some(self.factors.updated(&self.base));
        Ok(())
    }

    /// Keys, shapes and values of what a checkpoint has beside the mask.
    fn parts(&self, name: &str) -> Vec<(String, [usize; 2], &Vec<f32>)> {
        let [rows, cols] = self.factors.shape;
        let shapes = [[self.factors.rank, cols], [rows, self.factors.b.len() / rows.max(1)]];
        let factors = ["adapter_a", "adapter_b"].into_iter().zip([&self.factors.a, &self.factors.b]);
        let mut all = vec![];
        for (((factor, values), shape), [first, second]) in factors.zip(shapes).zip(&self.moments) {
            let parts = PARTS.into_iter().zip([values, first, second]);
            all.extend(parts.map(|(part, values)| (format!("{name}.{factor}{part}"), shape, values)));
        }
        all
    }

    /// A checksum of the frozen weight.
    fn checksum(&self) -> u32 {
        let mut hasher = crc32fast::Hasher::new();
        self.base.iter().for_each(|value| hasher.update(&value.to_le_bytes()));
        hasher.finalize()
    }
}

impl HostAdapters {
    fn layer(&mut self, name: &str) -> Result<&mut Adapter> {
        let no_parameter = || twofour::Error::NoParameter { name: name.to_owned() };
        Ok(self.layers.get_mut(name).ok_or_else(no_parameter)?)
    }
}

impl HostMasks for HostAdapters {
    fn reads_gradient(&self, weight: &str) -> bool {
        self.layers.get(weight).is_some_and(|own| !own.base.is_empty())
    }

    fn choose(&mut self, weight: &WeightOnHost<'_>, _: u64) -> Result<(Mask, u64)> {
        let own = self.layer(weight.name)?;
        if own.base.is_empty() {
            own.begin(weight.master);
        } else if let Some((gradient, step)) = weight.gradient.zip(weight.step) {
            own.learn(gradient, step)?;
        }
        Ok((own.mask.clone(), 0))
    }

    fn mask(&self, weight: &str) -> Option<&Mask> {
        self.layers.get(weight).map(|own| &own.mask)
    }

    fn take_weight(&mut self, weight: &str) -> Option<Vec<f32>> {
        self.layers.get_mut(weight)?.updated.take()
    }

    fn factors(&self, weight: &str) -> Option<&AdapterFactors> {
        self.layers.get(weight).map(|own| &own.factors)
    }

    fn merged(&self, weight: &str) -> Result<Option<Merged>> {
        let Some(Adapter { factors, base, .. }) = self.layers.get(weight) else { return Ok(None) };
        let [rows, cols] = factors.shape;
        let mut merged = factors.updated(base);
        let [mut whole, mut change, mut lost] = [0f64; 3];
        for (value, base) in merged.iter_mut().zip(base) {
            let square = f64::from(*value - base).powi(2);
            whole += f64::from(*base).powi(2);
            change += square;
            if *base == 0.0 {
                lost += square;
                *value = 0.0;
            }
        }
        let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole).sqrt() } else { 0.0 };
        let mask = Mask::of_nonzeros(MatrixRef::new(rows, cols, base)?);
        Ok(Some(Merged { weight: merged, mask, update: share(change, whole), lost: share(lost, change) }))
    }

    fn tensors(&self) -> Vec<(PlannedTensor, Vec<u8>)> {
        let mut all = vec![];
        for (name, own) in &self.layers {
            let (rows, bytes) = (own.mask.rows(), own.mask.cols().div_ceil(8));
            let row = |row: usize| own.mask.row_words(row).iter().flat_map(|word| word.to_le_bytes()).take(bytes);
            let planned = PlannedTensor::new(format!("{name}.mask"), StoredDType::U8, [rows, bytes]);
            all.push((planned, (0..rows).flat_map(row).collect()));
            for (key, shape, values) in own.parts(name) {
                let planned = PlannedTensor::new(key, StoredDType::F32, shape);
                all.push((planned, values.iter().flat_map(|value| value.to_le_bytes()).collect()));
            }
        }
        all
    }

    fn metadata(&self) -> Vec<(String, String)> {
        let sums: BTreeMap<&str, u32> = self.layers.iter().map(|(name, own)| (name.as_str(), own.checksum())).collect();
        // Whole numbers and strings always become JSON.
        vec![(STATE_KEY.to_owned(), serde_json::to_string(&sums).unwrap_or_default())]
    }

    fn load(&mut self, reader: &Reader) -> Result<()> {
        let fault = |reason: String| Error::State { path: reader.path().to_owned(), reason };
        let text = reader.metadata().get(STATE_KEY);
        let text = text.ok_or_else(|| fault(format!("its metadata has no `{STATE_KEY}`: it holds no adapters")))?;
        let sums: BTreeMap<String, u32> =
            serde_json::from_str(text).map_err(|error| fault(format!("metadata `{STATE_KEY}`: {error}")))?;
        let mut layers = self.layers.clone();
        for (name, own) in &mut layers {
            let sum = *sums.get(name).ok_or_else(|| fault(format!("it has no adapter of `{name}`")))?;
            if sum != own.checksum() {
                let what = "weights of the model that adapters are beside";
                return Err(Error::OtherRun { path: reader.path().to_owned(), what });
            }
            let read = own.parts(name).into_iter().map(|(key, shape, _)| {
                let view = reader.tensor(&key)?;
                if view.info.shape != shape {
                    return Err(fault(format!("`{key}` is {:?}, not {shape:?}", view.info.shape)));
                }
                let values = view.to_vec::<f32>()?;
                match values.iter().all(|value| value.is_finite()) {
                    true => Ok(values),
                    false => Err(fault(format!("`{key}` has elements that are not finite"))),
                }
            });
            let read: Vec<Vec<f32>> = read.collect::<Result<_>>()?;
            let Ok([a, a_mean, a_variance, b, b_mean, b_variance]) = <[Vec<f32>; 6]>::try_from(read) else {
                return Err(fault(format!("the adapter of `{name}` is not whole")));
            };
            (own.factors.a, own.factors.b) = (a, b);
            (own.moments, own.updated) = ([[a_mean, a_variance], [b_mean, b_variance]], None);
        }
        self.layers = layers;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use twofour::{Axis, Pattern, sparsify::ParameterRule as _};

    use super::*;
    use crate::{
        engine::{Memory as _, cpu::CpuEngine},
        model::{Gpt, GptConfig, TransformerConfig},
        recipe::{Override, Recipe},
        train::{Corpus, SparsifierRule, Trainer, TrainingSettings},
    };

    const STEPS: u64 = 40;

    fn plan(kind: AdapterKind) -> SparsityPlan {
        let layers = (0..2).map(|layer| format!("blocks.{layer}.mlp.up")).collect();
        let mut plan = SparsityPlan::of_method(Method::ADAPTERS, layers, STEPS);
        let mut given = OwnSettings::default();
        given.set("adapter", OwnValue::Word(kind.name().to_owned()));
        given.set("rank", OwnValue::Number(4.0));
        Adapters::resolve_own(&mut plan, &given);
        plan
    }

    /// A trainer of a random model whose planned layers are 2:4.
    fn trainer(plan: SparsityPlan) -> Trainer<CpuEngine> {
        let sizes = GptConfig { layers: 2, width: 32, heads: 2, context: 16, feed_forward: 64 };
        let training =
            TrainingSettings { batch: 4, steps: STEPS, learning_rate: 1e-2, warm_up: 4, ..Default::default() };
        let text = b"Two of every four weights are kept, and the others are zero. ".repeat(30);
        let corpus = Arc::new(Corpus::new(text, 0.1).unwrap());
        let config = TransformerConfig::from(&sizes);
        let random = Trainer::new(CpuEngine, config.clone(), &training, SparsityPlan::dense(), corpus.clone()).unwrap();
        let values = |name: &str, _: &[usize]| {
            let all = random.model().parameters();
            let parameter = all.into_iter().find(|parameter| parameter.name() == name).unwrap();
            let values = CpuEngine.read(parameter.master())?;
            if !name.ends_with("mlp.up.weight") {
                return Ok(values);
            }
            let matrix = MatrixRef::new(parameter.shape()[0], parameter.shape()[1], &values)?;
            Ok(SparsifierRule::TWO_OF_FOUR.mask(matrix, 1.0)?.apply(matrix)?)
        };
        let model = Gpt::build(&CpuEngine, &config, values).unwrap();
        Trainer::with_model(CpuEngine, model, &training, plan, corpus).unwrap()
    }

    fn masters(trainer: &Trainer<CpuEngine>) -> BTreeMap<String, Vec<f32>> {
        let parameters = trainer.model().parameters().into_iter();
        parameters.map(|p| (p.name().to_owned(), CpuEngine.read(p.master()).unwrap())).collect()
    }

    #[test]
    fn factors_train_and_nothing_of_the_model_does() {
        for kind in [AdapterKind::Lora, AdapterKind::Lors, AdapterKind::Spp] {
            let mut trainer = trainer(plan(kind));
            let (first, before) = (masters(&trainer), trainer.validate(8).unwrap());
            (0..STEPS).for_each(|_| drop(trainer.step().unwrap()));
            for (name, values) in masters(&trainer) {
                let is_adapted = name.ends_with("mlp.up.weight");
                assert_eq!(values != first[&name], is_adapted, "{kind:?}: {name}");
                let keeps_zeros = values.iter().zip(&first[&name]).all(|(value, first)| *first != 0.0 || *value == 0.0);
                assert_eq!(keeps_zeros, !is_adapted || kind != AdapterKind::Lora, "{kind:?}: {name}");
            }
            let after = trainer.validate(8).unwrap();
            assert!(after < before - 0.01, "{kind:?}: {before} to {after}");
            let merged = trainer.merge_adapters().unwrap();
            assert_eq!(merged.len(), 2);
            for (name, [update, lost]) in merged {
                assert!(update > 0.0 && (lost > 0.0) == (kind == AdapterKind::Lora), "{kind:?}: {name} {lost}");
            }
            for linear in trainer.model().linears().filter(|linear| linear.name().ends_with("mlp.up")) {
                linear.mask().unwrap().unwrap().verify(Pattern::TWO_FOUR, Axis::Row).unwrap();
            }
            assert_eq!(trainer.validate(8).unwrap() == after, kind != AdapterKind::Lora, "{kind:?}");
        }
    }

    #[test]
    fn a_run_that_is_resumed_goes_on_bit_for_bit_and_another_base_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        for kind in [AdapterKind::Lora, AdapterKind::Spp] {
            let mut whole = trainer(plan(kind));
            (0..7).for_each(|_| drop(whole.step().unwrap()));
            whole.save(directory.path()).unwrap();
            let mut resumed = trainer(plan(kind));
            resumed.resume(directory.path()).unwrap();
            for step in 0..4 {
                let [a, b] = [&mut whole, &mut resumed].map(|trainer| trainer.step().unwrap());
                assert_eq!(a.loss.to_bits(), b.loss.to_bits(), "{kind:?}, step {step}");
            }
            assert!(masters(&whole) == masters(&resumed), "{kind:?}");
            let mut other = trainer(plan(kind));
            let weight = other.model().linears().find(|linear| linear.name().ends_with("mlp.up")).unwrap();
            let name = weight.weight().name().to_owned();
            let masks: &mut dyn std::any::Any = &mut *other.masks[0].masks;
            masks.downcast_mut::<HostAdapters>().unwrap().layers.get_mut(&name).unwrap().base[0] += 1.0;
            let message = other.resume(directory.path()).unwrap_err().to_string();
            assert!(message.contains("beside"), "{message}");
        }
    }

    #[test]
    fn gradients_of_factors_are_those_of_differences() {
        let (shape, rank) = ([6usize, 8], 3usize);
        let stream = Stream::new(5, "factors");
        let random = |first: u64, count: usize| -> Vec<f32> {
            (0..count).map(|at| stream.normal(first + at as u64) as f32).collect()
        };
        let mut weight = random(0, 48);
        weight.iter_mut().enumerate().filter(|(at, _)| at % 4 < 2).for_each(|(_, value)| *value = 0.0);
        let gradient = random(100, 48);
        for kind in [AdapterKind::Lora, AdapterKind::Lors, AdapterKind::Spp] {
            let b = random(300, if kind == AdapterKind::Spp { 6 } else { 18 });
            let factors = AdapterFactors { kind, rank, alpha: 2.0, shape, a: random(200, 24), b };
            let loss = |factors: &AdapterFactors| -> f64 {
                let updated = factors.updated(&weight);
                updated.iter().zip(&gradient).map(|(w, g)| f64::from(*w) * f64::from(*g)).sum()
            };
            let found = factors.gradients(&weight, &gradient);
            for (which, found) in found.iter().enumerate() {
                for (at, found) in found.iter().enumerate() {
                    let moved = |by: f32| {
                        let mut other = factors.clone();
                        [&mut other.a, &mut other.b][which][at] += by;
                        loss(&other)
                    };
                    let expected = (moved(0.125) - moved(-0.125)) / 0.25;
                    assert!((f64::from(*found) - expected).abs() < 1e-4, "{kind:?} {which} {at}: {found}, {expected}");
                }
            }
        }
    }

    #[test]
    fn settings_that_adapters_do_not_have_are_mistakes() {
        let parse = |sets: &[&str]| {
            let text = "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 16\n[data]\ntext = [\"t.txt\"]\n[training]\nsteps \
                        = 10\n[sparsity]\nmethod = \"adapters\"\n";
            let sets: Vec<Override> = sets.iter().map(|set| set.parse().unwrap()).collect();
            Recipe::parse(text, Path::new(""), &sets).unwrap_err().to_string()
        };
        for (set, words) in [
            ("sparsity.rank=16", "the pruned model that stays as it is"),
            ("sparsity.rank=1.5", "a whole number"),
            ("sparsity.alpha=0", "a number above 0"),
            ("sparsity.adapter=dora", "did you mean `lora`"),
            ("sparsity.begin=0.5", "frozen from the first step"),
            ("sparsity.weight_gradient=masked", "excluded by the method \"adapters\""),
        ] {
            let found = parse(&[set]);
            assert!(found.contains(words), "{set}: {found}");
        }
        let found = parse(&["sparsity.method=fixed", "sparsity.rank=2"]);
        assert!(found.contains("only \"adapters\" trains factors"), "{found}");
        let mut mixed = plan(AdapterKind::Spp);
        let other = SparsityPlan { layers: vec![mixed.layers.pop().unwrap()], ..plan(AdapterKind::Lora) };
        mixed.overrides.push(other);
        let layers: Vec<_> = mixed.parts().map(|plan| MaskedLayer { plan, weight: "w", shape: (8, 8) }).collect();
        assert!(Adapters.masks(&layers, 0).unwrap_err().to_string().contains("one kind"));
        let spp = plan(AdapterKind::Spp);
        let odd = [MaskedLayer { plan: &spp, weight: "w", shape: (6, 8) }];
        assert!(Adapters.masks(&odd, 0).unwrap_err().to_string().contains("4 for the 6 rows"));
    }
}
