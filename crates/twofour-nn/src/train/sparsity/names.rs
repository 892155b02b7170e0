//! Names of layers, masks and gradients in a plan.

use globset::Glob;
use twofour::layer::{MaskRule, WeightGradient};

use crate::{Error, Result};

/// The layers that match any of the patterns, in the model's order.
pub(super) fn matching(patterns: &[String], layers: &[String]) -> Result<Vec<String>> {
    let mut chosen = vec![false; layers.len()];
    for pattern in patterns {
        let no_such_layer = || Error::NoSuchLayer { pattern: pattern.clone(), layers: layers.to_vec() };
        let glob = Glob::new(pattern).map_err(|_| no_such_layer())?.compile_matcher();
        let mut found = false;
        for (chosen, layer) in chosen.iter_mut().zip(layers) {
            let matches = glob.is_match(layer);
            *chosen |= matches;
            found |= matches;
        }
        if !found {
            return Err(no_such_layer());
        }
    }
    Ok(layers.iter().zip(chosen).filter(|(_, chosen)| *chosen).map(|(layer, _)| layer.clone()).collect())
}

/// The rule of that name, as [`MaskRule::name`] has it.
pub(super) fn rule_of(name: &str) -> Result<MaskRule> {
    let expected = "magnitude, greedy, greedy-signed, causal1122, optimal or soft-threshold";
    let rule = MaskRule::CHOOSING.into_iter().find(|rule| rule.name() == name);
    rule.ok_or_else(|| Error::Setting { what: "sparsity.mask", found: name.to_owned(), expected })
}

/// The names of weight gradients in recipes.
const GRADIENTS: [(&str, WeightGradient); 4] = [
    ("dense", WeightGradient::Dense),
    ("masked", WeightGradient::Masked),
    ("mvue", WeightGradient::Mvue),
    ("mvue-approximate", WeightGradient::MvueApproximate),
];

pub(super) fn gradient_of(name: &str) -> Result<WeightGradient> {
    let expected = "dense, masked, mvue or mvue-approximate";
    let gradient = GRADIENTS.iter().find(|(own, _)| *own == name).map(|(_, gradient)| *gradient);
    gradient.ok_or_else(|| Error::Setting { what: "sparsity.weight_gradient", found: name.to_owned(), expected })
}

pub(super) mod rule_name {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use twofour::layer::MaskRule;

    pub(in super::super) fn serialize<S: Serializer>(rule: &MaskRule, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(rule.name())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<MaskRule, D::Error> {
        super::rule_of(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}

pub(super) mod gradient_name {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use twofour::layer::WeightGradient;

    pub(in super::super) fn serialize<S: Serializer>(
        gradient: &WeightGradient,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let name = super::GRADIENTS.iter().find(|(_, own)| own == gradient).map_or("dense", |(name, _)| *name);
        serializer.serialize_str(name)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<WeightGradient, D::Error> {
        super::gradient_of(&String::deserialize(deserializer)?).map_err(D::Error::custom)
    }
}
