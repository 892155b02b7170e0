//! Adapters: low-rank updates that train beside 2:4 weights, while the model is frozen.
//!
//! A layer computes with
//! - [`AdapterKind::Lora`]: `W + s · B A` (Hu et al., ICLR 2022), which merges under the mask and loses `(1 - m) ⊙` the
//!   update;
//! - [`AdapterKind::Lors`]: `W + s · m ⊙ (B A)` (LoRS, 2025), which merges as it is;
//! - [`AdapterKind::Spp`]: `W + s · A' ⊙ b ⊙ W` (Lu et al., ICML 2024), which merges as it is.
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

mod factors;
mod state;

use twofour::layer::WeightGradient;

pub use factors::{AdapterFactors, AdapterKind};
use state::{Adapter, HostAdapters};

use super::{
    HostMasks, MaskedLayer, Merged, Method, SparseBegin, SparsityPlan, SparsitySettings, TrainingMethod, WeightOnHost,
    conflict,
};
use crate::{
    Error, Result,
    linear::{LayerForm, Masking, SparsePrecision},
    settings::{Named, OwnKind, OwnSetting, OwnSettings, OwnValue},
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

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, path::Path, sync::Arc};

    use twofour::{Axis, MatrixRef, Pattern, sparsify::ParameterRule as _};

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
    fn settings_that_adapters_do_not_have_are_mistakes() {
        let parse = |sets: &[&str]| {
            let text = "[model]\nlayers = 1\nwidth = 16\nheads = 2\ncontext = 16\n[data]\ntext = [\"t.txt\"]\n\
                        [training]\nsteps = 10\n[sparsity]\nmethod = \"adapters\"\n";
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
