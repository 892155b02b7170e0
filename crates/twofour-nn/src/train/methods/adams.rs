//! AdamS of CAST (Huang et al., 2025): layers compute with their dense weights, and those outside of the present mask
//! decay ever more strongly, so that the mask may move until they are pruned.
//!
//! With the gradient `g`, `α` from 0 to 1 over the steps, and the mask of the two largest magnitudes of every four
//!
//! ```text
//! m ← β₁ m + (1 - β₁) g
//! u = m where kept, (1 - α) m + α λ sign(w) where pruned
//! v ← β₂ v + (1 - β₂) u²
//! w ← w - η û / (√v̂ + ε)
//! ```
//!
//! The mask is chosen after every step. From `dense_until` on layers are 2:4 under the last mask, and what it keeps
//! trains on. The paper chooses masks every 10 steps, prunes at the end, and scales rows by learned factors, which are
//! left out here.

use twofour::layer::WeightGradient;

use super::{
    CheckedPart, Decay, DecayTarget, Method, SparsityPlan, SparsitySettings, TrainingMethod, conflict, step_of,
};
use crate::{
    Result,
    engine::PrunedDecay,
    linear::LayerForm,
    settings::{Mistakes, OwnKind, OwnSetting, OwnValue},
};

pub(super) const METHOD: Method = Method { name: "adams", method: &AdamS };

/// λ of the paper for LLaMA-2-7B.
const PUBLISHED: f64 = 4e-7;

/// The share of all steps after which layers are 2:4.
const DENSE_UNTIL: OwnSetting = OwnSetting {
    key: "dense_until",
    kind: OwnKind::Number("a share above 0 and at most 1", |share| share > 0.0 && share <= 1.0),
    default: Some(0.9),
    elsewhere: "only \"adams\" computes with dense weights that decay",
};

/// The key of the step before which layers are dense, among the plan's numbers.
const DENSE_UNTIL_STEP: &str = "dense_until_step";

struct AdamS;

fn dense_until(plan: &SparsityPlan) -> u64 {
    plan.own.number(DENSE_UNTIL_STEP).map_or(0, |step| step as u64)
}

fn set_dense_until(plan: &mut SparsityPlan, share: Option<f64>, steps: u64) {
    let share = share.or(DENSE_UNTIL.default).unwrap_or(1.0);
    plan.own.set(DENSE_UNTIL.key, OwnValue::Number(share));
    plan.own.set(DENSE_UNTIL_STEP, OwnValue::Number(step_of(share, steps).max(1) as f64));
}

impl TrainingMethod for AdamS {
    fn defaults(&self, plan: &mut SparsityPlan, steps: u64) {
        plan.weight_gradient = WeightGradient::Masked;
        plan.mask_every = 0;
        plan.decay = Some(Decay { strength: PUBLISHED, target: DecayTarget::Gradient });
        plan.observes = true;
        set_dense_until(plan, None, steps);
    }

    fn has(&self) -> &'static [&'static str] {
        &["decay"]
    }

    fn own(&self) -> &'static [OwnSetting] {
        &[DENSE_UNTIL]
    }

    fn excludes(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("mask", "its masks are those of the largest magnitudes"),
            ("mask_every", "a mask is chosen after every step until layers are 2:4"),
            ("weight_gradient", "it is dense until layers are 2:4, and then masked"),
            ("decay_target", "it takes the place of the first moment"),
            ("begin", "layers are dense until the share of dense_until"),
            ("end", "its layers are 2:4 at the end"),
            ("observe", "its masks are observed until layers are 2:4"),
        ]
    }

    fn can_observe(&self) -> bool {
        true
    }

    fn refuses(&self, _: WeightGradient) -> Option<&'static str> {
        None
    }

    fn check(&self, part: &CheckedPart<'_>, m: &mut Mistakes) {
        if part.settings.decay.is_some_and(|decay| decay.strength().is_none()) {
            let problem =
                "found \"auto\", whose trial runs are for masks that are chosen while layers are 2:4; give a number";
            m.add(part.section.place("decay"), part.key("decay"), problem);
        }
    }

    fn resolve(&self, plan: &mut SparsityPlan, settings: &SparsitySettings, steps: u64) -> Result<()> {
        plan.observes = true;
        set_dense_until(plan, settings.own.number(DENSE_UNTIL.key), steps);
        Ok(())
    }

    fn check_plan(&self, plan: &SparsityPlan) -> Result<()> {
        if !plan.observes || plan.mask_every != 0 || plan.end.is_some() {
            let reason = "pruned weights of dense layers decay by the mask that is observed";
            return Err(conflict("the method `adams`", "masks that are not observed, or an end", reason));
        }
        Ok(())
    }

    fn form_at(&self, plan: &SparsityPlan, step: u64) -> LayerForm {
        if step < dense_until(plan) { LayerForm::Dense } else { LayerForm::TwoOfFour }
    }

    fn layers(&self) -> &'static str {
        "blocks.*"
    }

    fn pruned_decay(&self, plan: &SparsityPlan, step: u64) -> PrunedDecay {
        let until = dense_until(plan);
        let strength = plan.decay.map_or(0.0, |decay| decay.strength as f32);
        if step < until {
            PrunedDecay::Moment { share: (step + 1) as f32 / until as f32, strength }
        } else {
            PrunedDecay::None
        }
    }

    fn requires_adamw(&self) -> Option<&'static str> {
        Some("pruned weights decay in the place of their first moment, by the root of the second")
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use twofour::{Axis, Pattern};

    use super::*;
    use crate::{
        engine::{Memory as _, cpu::CpuEngine},
        model::{GptConfig, TransformerConfig},
        recipe::{Override, Recipe},
        train::{Corpus, Trainer, TrainingSettings},
    };

    const STEPS: u64 = 60;

    fn trainer(strength: f64) -> Trainer<CpuEngine> {
        let model = GptConfig { layers: 2, width: 32, heads: 2, context: 16, feed_forward: 64 };
        let training =
            TrainingSettings { batch: 4, steps: STEPS, learning_rate: 4e-3, warm_up: 4, ..Default::default() };
        let text = b"Two of every four weights are kept, and the others are zero. ".repeat(30);
        let corpus = Arc::new(Corpus::new(text, 0.1).unwrap());
        let layers = (0..2).map(|layer| format!("blocks.{layer}.mlp.up")).collect();
        let decay = Some(Decay { strength, target: DecayTarget::Gradient });
        let plan = SparsityPlan { decay, ..SparsityPlan::of_method(Method::ADAMS, layers, STEPS) };
        Trainer::new(CpuEngine, TransformerConfig::from(&model), &training, plan, corpus).unwrap()
    }

    /// The share of the squares of planned weights outside of the two largest of every four.
    fn outside(trainer: &Trainer<CpuEngine>) -> f64 {
        let planned = trainer.model().linears().filter(|linear| linear.observed().is_some());
        let [pruned, all] = planned.fold([0.0; 2], |[pruned, all], linear| {
            let (rows, cols) = (linear.out_features(), linear.in_features());
            let weight = CpuEngine.read(linear.weight().master()).unwrap();
            let matrix = twofour::MatrixRef::new(rows, cols, &weight).unwrap();
            let kept = twofour::select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
            let square = |values: &[f32]| values.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
            let (own, kept) = (square(&weight), square(&kept.apply(matrix).unwrap()));
            [pruned + own - kept, all + own]
        });
        pruned / all
    }

    #[test]
    fn pruned_weights_decay_masks_move_and_layers_are_two_of_four_at_the_end() {
        let (mut trainer, mut dense) = (trainer(4e-4), trainer(0.0));
        let (before, first) = (trainer.validate(8).unwrap(), outside(&trainer));
        let mut flips = 0.0;
        for step in 0..54 {
            let report = trainer.step().unwrap();
            assert!(!report.is_sparse && report.layer_flip_rates.is_empty(), "step {step}");
            flips += report.observed_flip_rate.unwrap();
            dense.step().unwrap();
        }
        assert!(flips > 0.1, "{flips}");
        let [decayed, grown] = [outside(&trainer), outside(&dense)];
        assert!(decayed < 0.5 * first && decayed < 0.8 * grown, "{first} {decayed} {grown}");
        let planned = |trainer: &Trainer<CpuEngine>| {
            let linears = trainer.model().linears().filter(|linear| linear.has_mask());
            linears.map(|linear| linear.mask().unwrap().unwrap()).collect::<Vec<_>>()
        };
        let masks = planned(&trainer);
        assert!(trainer.is_sparse() && masks.len() == 2);
        masks.iter().for_each(|mask| mask.verify(Pattern::TWO_FOUR, Axis::Row).unwrap());
        (54..STEPS).for_each(|_| assert!(trainer.step().unwrap().is_sparse));
        assert!(planned(&trainer) == masks && trainer.validate(8).unwrap() < before - 1.0);
    }

    #[test]
    fn a_recipe_chooses_it_by_an_override_and_what_it_excludes_is_named() {
        const RECIPE: &str = "\
model = { layers = 1, width = 16, heads = 2, context = 8 }
data = { text = 'a.txt' }
training = { steps = 20, batch = 2, warm_up = 1 }
sparsity = { method = 'fixed' }
";
        let parse = |settings: &[&str]| {
            let overrides: Vec<Override> = settings.iter().map(|text| text.parse().unwrap()).collect();
            Recipe::parse(RECIPE, Path::new(""), &overrides)
        };
        let plan = parse(&["sparsity.method=adams", "sparsity.decay=1e-5", "sparsity.dense_until=0.5"]).unwrap();
        let plan = plan.sparsity_plan().unwrap();
        assert_eq!((plan.method, dense_until(&plan), plan.layers.len()), (Method::ADAMS, 10, 4));
        assert_eq!([9, 10].map(|step| plan.form_at(step, false)), [LayerForm::Dense, LayerForm::TwoOfFour]);
        let PrunedDecay::Moment { share, strength } = plan.method.pruned_decay(&plan, 4) else { panic!() };
        assert_eq!((share, strength), (0.5, 1e-5));
        for (setting, word) in [
            ("sparsity.mask_every=3", "after every step"),
            ("sparsity.decay=\"auto\"", "give a number"),
            ("training.optimizer=\"sgd\"", "requires AdamW"),
            ("sparsity.dense_until=0", "a share above 0"),
        ] {
            let message = parse(&["sparsity.method=adams", setting]).unwrap_err().to_string();
            assert!(message.contains(word), "{setting}: {message}");
        }
    }
}
