//! Squared ReLU in feed-forward blocks, pruned to 2:4 at each pass; weights are dense (Haziza et al., "Accelerating
//! Transformer Inference and Training with 2:4 Activation Sparsity", 2025).

use twofour::{layer::MaskRule, select::Transposable};

use super::{Method, Rules, SparsityPlan, TrainingMethod, conflict};
use crate::{
    Error, Result,
    linear::{LayerForm, SparsePrecision},
};

pub(super) const METHOD: Method = Method { name: "activation", method: &Activation };

/// The reason why this method refuses settings of masks of weights.
const INPUT: &str = "it prunes the input of a layer, at each pass";

struct Activation;

impl TrainingMethod for Activation {
    fn defaults(&self, plan: &mut SparsityPlan, _: u64) {
        plan.rule = MaskRule::Transposable(Transposable::GreedyAbs);
    }

    fn excludes(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("mask_every", INPUT),
            ("weight_gradient", INPUT),
            ("precision", "its GEMMs are in f16 and bf16"),
            ("observe", INPUT),
        ]
    }

    fn rules(&self) -> Rules {
        Rules::Transposable
    }

    fn check_plan(&self, plan: &SparsityPlan) -> Result<()> {
        if let Some(name) = plan.layers.iter().find(|name| !name.ends_with(".mlp.down")) {
            let expected = "the second layer of a feed-forward block, whose input the method `activation` prunes";
            return Err(Error::Setting { what: "sparsity.layers", found: name.clone(), expected });
        }
        if !matches!(plan.rule, MaskRule::Transposable(_)) || plan.precision != SparsePrecision::Activations {
            let reason = "inputs are pruned by transposable rules, and multiplied in the precision of activations";
            return Err(conflict("the method `activation`", "`mask` or `precision`", reason));
        }
        Ok(())
    }

    fn sparse_form(&self) -> LayerForm {
        LayerForm::TwoOfFourInput
    }

    fn layers(&self) -> &'static str {
        "blocks.*.mlp.down"
    }

    fn only_these_layers(&self) -> Option<&'static str> {
        Some("inputs of other layers are not pruned")
    }

    fn unsuitable(&self, has_gates: bool, is_encoder: bool) -> Option<&'static str> {
        match (has_gates, is_encoder) {
            (true, _) => Some(
                "found \"activation\", whose squared ReLU takes the place of an activation without a gate; a \"llama\" \
                 has gates",
            ),
            (_, true) => Some("found \"activation\", whose squared ReLU a \"bert\" does not have"),
            _ => None,
        }
    }
}
