//! Masks that are learned while weights are frozen (MaskLLM; Fang et al., NeurIPS 2024).
//!
//! Every group of four weights has a logit `p_k` for each of the six ways to keep two of them. In a step a way is drawn
//! by a Gumbel-softmax, `y = softmax((κ p + g) / τ)` with Gumbel noise `g`: the layer computes under the largest `y_k`,
//! and gradients go to the logits through all of `y` (straight-through estimator, Jang et al., ICLR 2017). With the
//! gradient `G` of the weight `W` and `m_j`, the sum of the `y_k` that keep weight `j`,
//!
//! ```text
//! ∂/∂p_k = κ / τ · y_k (a_k - Σ_l y_l a_l),   a_k = Σ_{j kept by k} (G_j W_j - 2 λ W_j² m_j)
//! ```
//!
//! where λ rewards kept magnitude. Over the steps `κ` rises and `τ` and `λ` fall, so that draws settle. From
//! `learned_by` on the likeliest way of every group stays, and weights train under it.

use std::collections::BTreeMap;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use twofour::{
    Mask,
    file::{PlannedTensor, Reader, StoredDType},
    layer::WeightGradient,
    sparsify::ParameterRule as _,
};

use super::{
    CheckedPart, HostMasks, MaskedLayer, Method, SparseBegin, SparsifierRule, SparsityPlan, SparsitySettings,
    TrainingMethod, WeightOnHost, conflict,
    masks::{Stored, mask_tensor, no_weight},
    step_of,
};
use crate::{
    Error, Result,
    linear::{LayerForm, SparsePrecision},
    model::mask_beside,
    random::Stream,
    settings::{Mistakes, OwnKind, OwnSetting, OwnSettings, OwnValue},
};

pub(super) const METHOD: Method = Method { name: "learnable", method: &Learnable };

const fn above_zero(key: &'static str, default: f64) -> OwnSetting {
    let kind = OwnKind::Number("a number above 0", |x| x > 0.0);
    OwnSetting { key, kind, default: Some(default), elsewhere: ELSEWHERE }
}

const fn from_zero(key: &'static str, default: f64) -> OwnSetting {
    let kind = OwnKind::Number("a number from 0 up", |x| x >= 0.0);
    OwnSetting { key, kind, default: Some(default), elsewhere: ELSEWHERE }
}

const ELSEWHERE: &str = "only \"learnable\" learns its masks";

/// The settings, with the published numbers: but for the last one, with which weights are frozen to the end there.
const OWN: [OwnSetting; 8] = [
    above_zero("mask_learning_rate", 5e-4),
    above_zero("temperature", 4.0),
    above_zero("final_temperature", 0.05),
    above_zero("logit_scale", 100.0),
    above_zero("final_logit_scale", 500.0),
    from_zero("prior", 3.0),
    from_zero("kept_magnitude", 1e-5),
    OwnSetting {
        key: "learned_by",
        kind: OwnKind::Number("a share from 0 to 1", |share| (0.0..=1.0).contains(&share)),
        default: Some(0.75),
        elsewhere: ELSEWHERE,
    },
];

/// The step from which masks stay, among the plan's numbers.
const LEARNED_BY_STEP: &str = "learned_by_step";

/// The weights of a group that each way keeps.
const WAYS: [[usize; 2]; 6] = [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]];

/// The deviation of logits at first.
const DEVIATION: f64 = 0.01;

/// Decay rates of the moments of logits, and what is added to the root of the second.
const BETAS: [f32; 2] = [0.9, 0.95];
const EPSILON: f32 = 1e-8;

/// The metadata key of a checkpoint's state beside logits, moments and masks.
const STATE_KEY: &str = "twofour.learnable";

struct Learnable;

impl Learnable {
    /// Brings the numbers to a plan: those that are given, and defaults.
    fn resolve_numbers(plan: &mut SparsityPlan, given: &OwnSettings, steps: u64) {
        for setting in &OWN {
            if let Some(number) = given.number(setting.key).or(setting.default) {
                plan.own.set(setting.key, OwnValue::Number(number));
            }
        }
        let share = plan.own.number("learned_by").unwrap_or(1.0);
        plan.own.set(LEARNED_BY_STEP, OwnValue::Number(step_of(share, steps) as f64));
    }
}

/// The step from which the masks of a plan stay.
fn learned_by(plan: &SparsityPlan) -> u64 {
    plan.own.number(LEARNED_BY_STEP).map_or(0, |step| step as u64)
}

/// The step in which the first mask is drawn.
fn begin_of(plan: &SparsityPlan) -> u64 {
    match plan.begin {
        SparseBegin::Step(step) | SparseBegin::Settled { earliest: step, .. } => step,
    }
}

impl TrainingMethod for Learnable {
    fn defaults(&self, plan: &mut SparsityPlan, steps: u64) {
        plan.mask_every = 0;
        Self::resolve_numbers(plan, &OwnSettings::default(), steps);
    }

    fn own(&self) -> &'static [OwnSetting] {
        &OWN
    }

    fn excludes(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("mask", "its masks are learned"),
            ("mask_every", "a mask is drawn at every step until they are learned"),
            ("weight_gradient", "its logits take the dense one"),
            ("precision", "its GEMMs are in the precision of activations"),
            ("observe", "its own masks are measured whenever they are drawn"),
        ]
    }

    fn check(&self, part: &CheckedPart<'_>, m: &mut Mistakes) {
        let share = part.settings.own.number("learned_by").or(OWN[7].default).unwrap_or(1.0);
        let (begin, learned) = (part.settings.begin.unwrap_or(0.0), step_of(share, part.steps));
        let end = part.settings.end.map_or(part.steps, |end| step_of(end, part.steps));
        let first = step_of(begin, part.steps);
        if !(first + 1..=end).contains(&learned) {
            let problem = format!(
                "masks would be learned by step {learned} of {}, expected a step after {first}, where they begin, and \
                 at most {end}",
                part.steps
            );
            m.add(part.section.place("learned_by"), part.key("learned_by"), problem);
        }
    }

    fn resolve(&self, plan: &mut SparsityPlan, settings: &SparsitySettings, steps: u64) -> Result<()> {
        Self::resolve_numbers(plan, &settings.own, steps);
        Ok(())
    }

    fn check_plan(&self, plan: &SparsityPlan) -> Result<()> {
        for OwnSetting { key, kind, .. } in OWN {
            let OwnKind::Number(expected, holds) = kind else { continue };
            let found = plan.own.number(key);
            if !found.is_some_and(|number| number.is_finite() && holds(number)) {
                let found = found.map_or("nothing".to_owned(), |number| number.to_string());
                return Err(Error::Setting { what: key, found, expected });
            }
        }
        let is_plain = plan.decay.is_none() && !plan.observes && plan.precision == SparsePrecision::Activations;
        if !is_plain || plan.weight_gradient != WeightGradient::Dense || plan.two_of_four_from.is_some() {
            let reason = "its layers are dense GEMMs under a mask, and their gradients dense";
            let others = "decay, observed masks, 8-bit floats, another weight gradient or a stage before";
            return Err(conflict("the method `learnable`", others, reason));
        }
        Ok(())
    }

    fn sparse_form(&self) -> LayerForm {
        LayerForm::Masked
    }

    fn fills_zeros(&self) -> bool {
        true
    }

    fn trains_weights(&self, plan: &SparsityPlan, step: u64) -> bool {
        !(begin_of(plan)..learned_by(plan)).contains(&step)
    }

    fn chooses_at(&self, plan: &SparsityPlan, steps_done: u64) -> bool {
        (begin_of(plan)..=learned_by(plan)).contains(&steps_done)
    }

    fn masks(&self, layers: &[MaskedLayer<'_>], seed: u64) -> Result<Option<Box<dyn HostMasks>>> {
        let of = |layer: &MaskedLayer<'_>| (layer.weight.to_owned(), LearnedMask::new(layer, seed));
        Ok(Some(Box::new(LearnedMasks { masks: layers.iter().map(of).collect() })))
    }

    fn prunes(&self, _: &SparsityPlan) -> Option<String> {
        Some("two of every four, which are learned".to_owned())
    }
}

/// The masks of all layers, by the names of their weights.
#[derive(Debug)]
struct LearnedMasks {
    masks: BTreeMap<String, LearnedMask>,
}

/// The numbers of a step.
#[derive(Debug, Clone, Copy)]
struct Annealed {
    scale: f32,
    temperature: f32,
    kept_magnitude: f32,
}

/// The mask of a weight, and its logits.
#[derive(Debug, Clone)]
struct LearnedMask {
    numbers: OwnSettings,
    /// The steps of the first draw and from which the mask stays.
    span: [u64; 2],
    stream: Stream,
    mask: Mask,
    /// `[groups, 6]`; empty before the first draw.
    logits: Vec<f32>,
    moments: [Vec<f32>; 2],
    state: LearnedState,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct LearnedState {
    /// The step of the last draw.
    drawn_at: u64,
    /// Updates of the logits.
    updates: i32,
}

impl LearnedMask {
    fn new(layer: &MaskedLayer<'_>, seed: u64) -> Self {
        let &MaskedLayer { plan, weight, shape: (rows, cols) } = layer;
        LearnedMask {
            numbers: plan.own.clone(),
            span: [begin_of(plan), learned_by(plan)],
            stream: Stream::new(seed, &format!("ways of {weight}")),
            mask: Mask::from_fn(rows, cols, |_, _| true),
            logits: vec![],
            moments: [vec![], vec![]],
            state: LearnedState::default(),
        }
    }

    /// Groups of a row, the last of which may be short.
    fn groups_of_row(&self) -> usize {
        self.mask.cols().div_ceil(4)
    }

    fn number(&self, key: &str) -> f32 {
        self.numbers.number(key).unwrap_or_default() as f32
    }

    fn annealed(&self, step: u64) -> Annealed {
        let [first, last] = self.span;
        let share = step.saturating_sub(first) as f32 / last.saturating_sub(first).max(1) as f32;
        let between = |from: &str, to: &str| self.number(from) + (self.number(to) - self.number(from)) * share.min(1.0);
        Annealed {
            scale: between("logit_scale", "final_logit_scale"),
            temperature: between("temperature", "final_temperature"),
            kept_magnitude: self.number("kept_magnitude") * (1.0 - share.min(1.0)),
        }
    }

    /// Logits that prefer the largest magnitudes.
    fn begin(&mut self, weight: &WeightOnHost<'_>) -> Result<()> {
        let prior = SparsifierRule::TWO_OF_FOUR.mask(weight.master, 1.0)?;
        let (groups, strength) = (self.groups_of_row(), f64::from(self.number("prior")) * DEVIATION);
        let logit = |index: usize| {
            let (group, way) = (index / WAYS.len(), WAYS[index % WAYS.len()]);
            let (row, first) = (group / groups, group % groups * 4);
            let is_kept = |at: usize| first + at < prior.cols() && prior.is_kept(row, first + at);
            let shared = way.into_iter().filter(|at| is_kept(*at)).count() as f64;
            (DEVIATION * self.stream.normal(index as u64) + strength * (shared - 1.0)) as f32
        };
        let count = prior.rows() * groups * WAYS.len();
        let logits: Vec<f32> = (0..count).into_par_iter().map(logit).collect();
        (self.logits, self.moments) = (logits, [vec![0.0; count], vec![0.0; count]]);
        Ok(())
    }

    /// `κ p + g` of a group in a step.
    fn noisy(&self, group: usize, step: u64, scale: f32) -> [f32; 6] {
        // Beyond the indices of the logits at first.
        let index = (step + 1).wrapping_mul(2 * self.logits.len() as u64).wrapping_add((group * WAYS.len()) as u64);
        std::array::from_fn(|way| {
            let gumbel = -(-self.stream.uniform(index.wrapping_add(way as u64)).ln()).ln();
            scale * self.logits[group * WAYS.len() + way] + gumbel as f32
        })
    }

    /// The gradient of the logits of a group, by those of its weights in the step of the last draw.
    fn logit_gradient(&self, group: usize, annealed: Annealed, weights: [f32; 4], gradients: [f32; 4]) -> [f32; 6] {
        let Annealed { scale, temperature, kept_magnitude } = annealed;
        let noisy = self.noisy(group, self.state.drawn_at, scale);
        let most = noisy.into_iter().fold(f32::NEG_INFINITY, f32::max);
        let powers = noisy.map(|value| ((value - most) / temperature).exp());
        let shares = powers.map(|power| power / powers.iter().sum::<f32>());
        let mut kept = [0f32; 4];
        WAYS.iter().zip(shares).for_each(|(way, share)| way.iter().for_each(|at| kept[*at] += share));
        let of_mask: [f32; 4] = std::array::from_fn(|at| {
            gradients[at] * weights[at] - 2.0 * kept_magnitude * weights[at] * weights[at] * kept[at]
        });
        let of_ways = WAYS.map(|[a, b]| of_mask[a] + of_mask[b]);
        let mean: f32 = of_ways.iter().zip(shares).map(|(of_way, share)| of_way * share).sum();
        std::array::from_fn(|way| scale / temperature * shares[way] * (of_ways[way] - mean))
    }

    /// A step of Adam by the gradient of the weight in the step of the last draw; none where that is not finite, so
    /// that the step was skipped.
    fn learn(&mut self, weight: &WeightOnHost<'_>) {
        let Some(gradient) = weight.gradient.filter(|gradient| gradient.iter().all(|g| g.is_finite())) else { return };
        let (annealed, groups, cols) = (self.annealed(self.state.drawn_at), self.groups_of_row(), self.mask.cols());
        let of_group = |values: &[f32], group: usize| -> [f32; 4] {
            let (row, first) = (group / groups, group % groups * 4);
            std::array::from_fn(|at| if first + at < cols { values[row * cols + first + at] } else { 0.0 })
        };
        let count = self.logits.len() / WAYS.len();
        let gradients: Vec<[f32; 6]> = (0..count)
            .into_par_iter()
            .map(|group| {
                let [weights, gradients] = [weight.master.data(), gradient].map(|values| of_group(values, group));
                self.logit_gradient(group, annealed, weights, gradients)
            })
            .collect();
        self.state.updates += 1;
        let rate = self.number("mask_learning_rate");
        let corrections = BETAS.map(|beta| 1.0 - beta.powi(self.state.updates));
        let [first, second] = &mut self.moments;
        let moments = first.iter_mut().zip(second);
        for ((logit, (first, second)), g) in self.logits.iter_mut().zip(moments).zip(gradients.as_flattened()) {
            *first += (1.0 - BETAS[0]) * (g - *first);
            *second += (1.0 - BETAS[1]) * (g * g - *second);
            *logit -= rate * (*first / corrections[0]) / ((*second / corrections[1]).sqrt() + EPSILON);
        }
    }

    /// The mask of a step: one that is drawn, or, where masks are learned, the likeliest.
    fn drawn(&self, step: u64) -> Mask {
        let (scale, groups) = (self.annealed(step).scale, self.groups_of_row());
        let way_of = |group: usize| {
            let values = match step < self.span[1] {
                true => self.noisy(group, step, scale),
                false => std::array::from_fn(|way| self.logits[group * WAYS.len() + way]),
            };
            let best = (1..WAYS.len()).fold(0, |best, way| if values[way] > values[best] { way } else { best });
            WAYS[best]
        };
        let ways: Vec<[usize; 2]> = (0..self.logits.len() / WAYS.len()).into_par_iter().map(way_of).collect();
        Mask::from_fn(self.mask.rows(), self.mask.cols(), |row, col| ways[row * groups + col / 4].contains(&(col % 4)))
    }
}

impl HostMasks for LearnedMasks {
    fn reads_gradient(&self, weight: &str) -> bool {
        self.masks.get(weight).is_some_and(|mask| !mask.logits.is_empty())
    }

    fn choose(&mut self, weight: &WeightOnHost<'_>, steps_done: u64) -> Result<(Mask, u64)> {
        let own = self.masks.get_mut(weight.name).ok_or_else(|| no_weight(weight.name))?;
        if own.logits.is_empty() {
            own.begin(weight)?;
        } else {
            own.learn(weight);
        }
        own.state.drawn_at = steps_done;
        let mask = own.drawn(steps_done);
        let flips = mask.flips(&own.mask)?;
        own.mask = mask.clone();
        Ok((mask, flips))
    }

    fn mask(&self, weight: &str) -> Option<&Mask> {
        self.masks.get(weight).map(|own| &own.mask)
    }

    fn tensors(&self) -> Vec<(PlannedTensor, Vec<u8>)> {
        let mut all = vec![];
        for (name, own) in &self.masks {
            all.push(mask_tensor(name, &own.mask));
            let shape = [own.logits.len() / WAYS.len(), WAYS.len()];
            let [first, second] = &own.moments;
            for (part, values) in PARTS.into_iter().zip([&own.logits, first, second]) {
                let planned = PlannedTensor::new(format!("{name}.{part}"), StoredDType::F32, shape);
                all.push((planned, values.iter().flat_map(|value| value.to_le_bytes()).collect()));
            }
        }
        all
    }

    fn metadata(&self) -> Vec<(String, String)> {
        let states: BTreeMap<&str, LearnedState> =
            self.masks.iter().map(|(name, own)| (name.as_str(), own.state)).collect();
        // Whole numbers and strings always become JSON.
        vec![(STATE_KEY.to_owned(), serde_json::to_string(&states).unwrap_or_default())]
    }

    fn load(&mut self, reader: &Reader) -> Result<()> {
        let stored = Stored(reader);
        let states: BTreeMap<String, LearnedState> = stored.states(STATE_KEY, "learned masks")?;
        let mut masks = self.masks.clone();
        for (name, own) in &mut masks {
            own.state = *states.get(name).ok_or_else(|| stored.fault(format!("it has no learned mask of `{name}`")))?;
            let (rows, cols) = (own.mask.rows(), own.mask.cols());
            let view = |part: &str, shapes: &[[usize; 2]]| stored.tensor(&format!("{name}.{part}"), shapes);
            own.mask = mask_beside(reader, name, (rows, cols))?;
            // Before the first draw there are no logits.
            let shapes = [[rows * own.groups_of_row(), WAYS.len()], [0, WAYS.len()]];
            let [logits, first, second] = PARTS.map(|part| Ok::<_, Error>(view(part, &shapes)?.to_vec::<f32>()?));
            (own.logits, own.moments) = (logits?, [first?, second?]);
            if own.moments.iter().any(|moment| moment.len() != own.logits.len()) {
                return Err(stored.fault(format!("`{name}` has other logits than moments")));
            }
        }
        self.masks = masks;
        Ok(())
    }
}

/// What a checkpoint has of a weight's logits.
const PARTS: [&str; 3] = ["logits", "logits.first_moment", "logits.second_moment"];

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use twofour::{Axis, MatrixRef, Pattern};

    use super::*;
    use crate::{
        engine::{Memory as _, cpu::CpuEngine},
        model::{GptConfig, TransformerConfig},
        recipe::{Override, Recipe},
        train::{Corpus, Trainer, TrainingSettings},
    };

    const STEPS: u64 = 40;

    fn plan(learned_by: f64) -> SparsityPlan {
        let layers = (0..2).map(|layer| format!("blocks.{layer}.mlp.up")).collect();
        let mut plan = SparsityPlan::of_method(Method::LEARNABLE, layers, STEPS);
        let mut given = OwnSettings::default();
        given.set("learned_by", OwnValue::Number(learned_by));
        given.set("mask_learning_rate", OwnValue::Number(2e-3));
        Learnable::resolve_numbers(&mut plan, &given, STEPS);
        plan
    }

    fn trainer(plan: SparsityPlan) -> Trainer<CpuEngine> {
        let model = GptConfig { layers: 2, width: 32, heads: 2, context: 16, feed_forward: 64 };
        let training =
            TrainingSettings { batch: 4, steps: STEPS, learning_rate: 3e-3, warm_up: 4, ..Default::default() };
        let text = b"Two of every four weights are kept, and the others are zero. ".repeat(30);
        let corpus = Arc::new(Corpus::new(text, 0.1).unwrap());
        Trainer::new(CpuEngine, TransformerConfig::from(&model), &training, plan, corpus).unwrap()
    }

    /// Master weight and mask of each planned layer.
    fn learned(trainer: &Trainer<CpuEngine>) -> Vec<(Vec<f32>, Mask)> {
        let planned = trainer.model().linears().filter(|linear| trainer.plan().part_of(linear.name()).is_some());
        planned.map(|l| (CpuEngine.read(l.weight().master()).unwrap(), l.mask().unwrap().unwrap())).collect()
    }

    #[test]
    fn weights_are_frozen_until_masks_are_learned_and_then_train_under_them() {
        let mut trainer = trainer(plan(0.5));
        let (first, before) = (learned(&trainer), trainer.validate(8).unwrap());
        let mut flips = vec![];
        for step in 0..20 {
            flips.push(trainer.step().unwrap().flip_rate);
            for ((weights, mask), (own, _)) in learned(&trainer).iter().zip(&first) {
                assert_eq!(weights, own, "step {step}");
                mask.verify(Pattern::TWO_FOUR, Axis::Row).unwrap();
                assert_eq!(mask.density(), 0.5);
            }
        }
        assert!(flips[..3].iter().all(|rate| *rate > 0.1) && flips[16] < flips[0], "{flips:?}");
        let settled = learned(&trainer);
        (20..STEPS).for_each(|step| assert_eq!(trainer.step().unwrap().flip_rate, 0.0, "step {step}"));
        for ((weights, mask), (before, settled)) in learned(&trainer).iter().zip(&settled) {
            assert!(weights != before && mask == settled);
        }
        assert!(trainer.validate(8).unwrap() < before - 1.0);
    }

    #[test]
    fn a_run_that_is_resumed_draws_the_same_masks() {
        let directory = tempfile::tempdir().unwrap();
        for saved_at in [0, 7, 25] {
            let mut whole = trainer(plan(0.5));
            (0..saved_at).for_each(|_| drop(whole.step().unwrap()));
            whole.save(directory.path()).unwrap();
            let mut resumed = trainer(plan(0.5));
            resumed.resume(directory.path()).unwrap();
            for step in 0..6 {
                let [a, b] = [&mut whole, &mut resumed].map(|trainer| trainer.step().unwrap());
                assert_eq!((a.loss.to_bits(), a.flip_rate), (b.loss.to_bits(), b.flip_rate), "{saved_at}, step {step}");
                assert!(learned(&whole) == learned(&resumed));
            }
        }
    }

    /// The masks of one weight without a trainer.
    fn alone(plan: &SparsityPlan, shape: (usize, usize)) -> LearnedMask {
        LearnedMask::new(&MaskedLayer { plan, weight: "w", shape }, 3)
    }

    #[test]
    fn gradients_of_logits_are_those_of_differences() {
        let plan = plan(1.0);
        let mut own = alone(&plan, (1, 4));
        let (weights, gradients) = ([0.3f32, -0.8, 0.5, 0.1], [0.7f32, -0.2, 0.4, -0.9]);
        let annealed = Annealed { scale: 2.0, temperature: 1.5, kept_magnitude: 0.2 };
        own.logits = vec![0.1, -0.3, 0.2, 0.4, -0.1, 0.05];
        let loss = |own: &LearnedMask| {
            let noisy = own.noisy(0, 0, annealed.scale).map(|value| (f64::from(value) / 1.5).exp());
            let sum: f64 = noisy.iter().sum();
            let kept =
                |at: usize| WAYS.iter().zip(noisy).filter(|(way, _)| way.contains(&at)).map(|(_, y)| y / sum).sum();
            (0..4)
                .map(|at| {
                    let (w, g, m): (f64, f64, f64) = (weights[at].into(), gradients[at].into(), kept(at));
                    g * w * m - 0.2 * (w * m).powi(2)
                })
                .sum::<f64>()
        };
        let found = own.logit_gradient(0, annealed, weights, gradients);
        for (way, found) in found.into_iter().enumerate() {
            let at = |moved: f32| {
                let mut other = own.clone();
                other.logits[way] += moved;
                loss(&other)
            };
            let expected = (at(1e-2) - at(-1e-2)) / 2e-2;
            assert!((f64::from(found) - expected).abs() < 1e-3, "{way}: {found}, {expected}");
        }
    }

    #[test]
    fn a_mask_that_the_loss_prefers_to_the_largest_magnitudes_is_learned() {
        let ((rows, cols), steps, plan) = ((8, 30), 200, plan(1.0));
        let stream = Stream::new(1, "planted");
        let weights: Vec<f32> = (0..rows * cols).map(|at| stream.normal(at as u64) as f32).collect();
        let master = MatrixRef::new(rows, cols, &weights).unwrap();
        // What is to be kept is where magnitudes are small.
        let inverse: Vec<f32> = weights.iter().map(|w| 1.0 / (0.1 + w.abs())).collect();
        let inverse = MatrixRef::new(rows, cols, &inverse).unwrap();
        let planted = SparsifierRule::TWO_OF_FOUR.mask(inverse, 1.0).unwrap();
        let own = LearnedMask { span: [0, steps], ..alone(&plan, (rows, cols)) };
        let mut masks = LearnedMasks { masks: BTreeMap::from([("w".to_owned(), own)]) };
        let (mut mask, _) = masks.choose(&WeightOnHost { name: "w", master, gradient: None, step: None }, 0).unwrap();
        let is_kept = |mask: &Mask, at: usize| f32::from(mask.is_kept(at / cols, at % cols));
        let begun = mask.flips(&planted).unwrap();
        for step in 1..=steps {
            // Of half the squared distance to the planted weights, one for each.
            let gradient: Vec<f32> = (0..weights.len())
                .map(|at| (is_kept(&mask, at) - is_kept(&planted, at)) / weights[at].signum() * 100.0)
                .collect();
            let own = WeightOnHost { name: "w", master, gradient: Some(&gradient), step: None };
            mask = masks.choose(&own, step).unwrap().0;
        }
        let wrong = mask.flips(&planted).unwrap();
        assert!(wrong * 10 < begun, "{wrong} of {begun}");
        mask.verify(Pattern::TWO_FOUR, Axis::Row).unwrap();
    }

    const RECIPE: &str = "\
model = { layers = 2, width = 64, heads = 4, context = 32 }
data = { text = 'a.txt' }
training = { steps = 100, batch = 8 }
sparsity = { method = 'learnable' }
";

    fn parse(sets: &[&str]) -> Result<Recipe, String> {
        let sets: Vec<Override> = sets.iter().map(|set| set.parse().unwrap()).collect();
        Recipe::parse(RECIPE, Path::new(""), &sets).map_err(|mistakes| mistakes.to_string())
    }

    #[test]
    fn a_recipe_has_its_settings_and_other_methods_do_not() {
        let recipe = parse(&["sparsity.temperature=2", "sparsity.begin=0.1", "sparsity.learned_by=0.5"]).unwrap();
        let plan = recipe.sparsity_plan().unwrap();
        assert_eq!((plan.begin, learned_by(&plan), plan.layers.len()), (SparseBegin::Step(10), 50, 4));
        assert_eq!((plan.own.number("temperature"), plan.own.number("prior")), (Some(2.0), Some(3.0)));
        let text = toml::to_string(&recipe).unwrap();
        assert_eq!(Recipe::parse(&text, Path::new(""), &[]).unwrap(), recipe, "{text}");
        for (set, words) in [
            ("sparsity.temperature=0", "sparsity.temperature: found 0, expected a number above 0"),
            ("sparsity.temprature=1", "did you mean `temperature`?"),
            ("sparsity.learned_by=0", "sparsity.learned_by: masks would be learned by step 0 of 100"),
            ("sparsity.mask_every=2", "sparsity.mask_every: excluded by the method \"learnable\""),
            ("sparsity.weight_gradient=dense", "excluded by the method \"learnable\": its logits take the dense one"),
        ] {
            let found = parse(&[set]).unwrap_err();
            assert!(found.contains(words), "{set}: {found}");
        }
        let found = parse(&["sparsity.method=ste", "sparsity.prior=1"]).unwrap_err();
        assert!(found.contains("sparsity.prior: excluded by the method \"ste\": only \"learnable\" learns"), "{found}");
    }

    #[test]
    fn plans_that_contradict_themselves_are_refused() {
        let with = |key: &str, number: f64| {
            let mut plan = plan(0.5);
            plan.own.set(key, OwnValue::Number(number));
            plan.check().unwrap_err().to_string()
        };
        assert!(with("temperature", 0.0).contains("temperature") && with("prior", f64::NAN).contains("NaN"));
        let observed = SparsityPlan { observes: true, ..plan(0.5) };
        assert!(observed.check().unwrap_err().to_string().contains("observed"));
    }
}
