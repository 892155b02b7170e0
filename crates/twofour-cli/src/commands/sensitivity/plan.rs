//! Which layers are pruned under a budget.

use std::{collections::BTreeSet, path::Path, str::FromStr};

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use twofour::file::Reader;

use super::{layer::Layer, perplexity::DensePerplexity};
use crate::{
    commands::text,
    exit::Usage,
    present::{Screen, units},
};

/// What may be lost, or is to be saved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Budget {
    /// The factor that the perplexity may have over the dense one, as the product of the layers' own.
    Perplexity(f64),
    /// The most bytes of all weights.
    Bytes(u64),
    /// The share of the chosen weights that are pruned, at most.
    Sparse(f64),
}

impl FromStr for Budget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, value) = text.split_once('=').unwrap_or((text, ""));
        let number = |value: &str| value.parse().ok().filter(|value: &f64| value.is_finite());
        match kind {
            "perplexity" => match value.strip_suffix('x').and_then(number) {
                Some(factor) if factor >= 1.0 => Ok(Budget::Perplexity(factor)),
                _ => Err("perplexity=FACTORx, as in perplexity=1.05x: 1 or more times the dense one".to_owned()),
            },
            "bytes" => match value.parse() {
                Ok(bytes) => Ok(Budget::Bytes(bytes)),
                Err(_) => Err("bytes=N, a number of bytes of all weights".to_owned()),
            },
            "sparse" => match number(value) {
                Some(share) if (0.0..=1.0).contains(&share) => Ok(Budget::Sparse(share)),
                _ => Err("sparse=SHARE, from 0 to 1, as in sparse=0.4".to_owned()),
            },
            _ => Err("perplexity=1.05x, bytes=N or sparse=SHARE".to_owned()),
        }
    }
}

/// Which layers are pruned.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// The weights to prune.
    pub(crate) sparse: BTreeSet<String>,
    /// Those that stay dense.
    dense: BTreeSet<String>,
    /// The share of the chosen weights that are pruned.
    sparse_share: f64,
    /// Bytes of all weights once the pruned ones are compressed.
    bytes: u64,
    /// The factor over the dense perplexity, as the product of those that each layer has alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity_factor: Option<f64>,
}

impl Plan {
    /// Takes the layers that cost least for each weight, as many as the budget allows.
    pub(super) fn under(
        budget: Budget,
        layers: &[Layer],
        reader: &Reader,
        dense: Option<DensePerplexity>,
    ) -> Result<Self> {
        let bytes = reader.tensors().filter_map(|tensor| tensor.dtype.bytes(&tensor.shape)).sum::<usize>() as u64;
        Self::of(budget, layers, bytes, dense.map(|dense| dense.perplexity))
    }

    fn of(budget: Budget, layers: &[Layer], bytes: u64, dense: Option<f64>) -> Result<Self> {
        let all: u64 = layers.iter().map(Layer::weights).sum();
        let mut order: Vec<&Layer> = layers.iter().collect();
        let per_weight = |layer: &Layer| layer.cost(dense) / layer.weights().max(1) as f64;
        order.sort_by(|a, b| per_weight(a).total_cmp(&per_weight(b)));
        let mut plan =
            Plan { sparse: BTreeSet::new(), dense: BTreeSet::new(), sparse_share: 0.0, bytes, perplexity_factor: None };
        let (mut cost, mut weights) = (0.0, 0);
        for layer in order {
            let fits = match budget {
                Budget::Perplexity(factor) => cost + layer.cost(dense) <= factor.ln(),
                Budget::Bytes(most) => plan.bytes > most,
                Budget::Sparse(share) => (weights + layer.weights()) as f64 <= share * all as f64,
            };
            if !fits {
                plan.dense.insert(layer.name.clone());
                continue;
            }
            plan.sparse.insert(layer.name.clone());
            cost += layer.cost(dense);
            weights += layer.weights();
            plan.bytes -= layer.saved();
        }
        if let Budget::Bytes(most) = budget
            && plan.bytes > most
        {
            let found = plan.bytes;
            bail!(Usage(format!(
                "--budget bytes={most}: with all of the chosen layers pruned the weights take {found}"
            )));
        }
        plan.sparse_share = weights as f64 / all.max(1) as f64;
        plan.perplexity_factor = dense.map(|_| cost.exp());
        Ok(plan)
    }

    /// Reads a file that [`Plan::text`] was written to.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let plan: Result<Plan, _> = serde_json::from_str(&text::read(path)?);
        match plan {
            Ok(plan) if plan.sparse.is_empty() => bail!("{}: the plan prunes no weight", path.display()),
            Ok(plan) => Ok(plan),
            Err(error) => bail!("{}: {error}; a plan of twofour sensitivity --budget is expected", path.display()),
        }
    }

    /// The plan as JSON.
    pub(super) fn text(&self) -> Result<String> {
        Ok(format!("{}\n", serde_json::to_string_pretty(self)?))
    }

    /// Shows it.
    pub(super) fn tell(&self, screen: &mut Screen) -> Result<()> {
        let all = self.sparse.len() + self.dense.len();
        let factor = match self.perplexity_factor {
            Some(factor) => format!(", perplexity by about {factor:.3} (each layer's own factor, multiplied)"),
            None => String::new(),
        };
        screen.line(format_args!(
            "plan: {} of {} pruned, {} of their weights; weights take {} compressed{factor}",
            self.sparse.len(),
            units::plural(all, "layer"),
            units::percent(self.sparse_share),
            units::bytes(self.bytes)
        ))
    }
}

#[cfg(test)]
mod tests {
    use twofour::file::StoredDType;

    use super::*;

    fn layer(name: &str, rows: usize, error: f64, perplexity: Option<f64>) -> Layer {
        let errors = vec![9.0, error];
        Layer { name: name.to_owned(), shape: [rows, 16], dtype: StoredDType::F16, errors, perplexity }
    }

    fn names(plan: &Plan) -> Vec<&str> {
        plan.sparse.iter().map(String::as_str).collect()
    }

    #[test]
    fn layers_that_cost_least_for_a_weight_are_pruned_first() {
        // 64, 64, 128 and 256 weights.
        let layers =
            [layer("a", 4, 0.4, None), layer("b", 4, 0.1, None), layer("c", 8, 0.1, None), layer("d", 16, 3.2, None)];
        let of = |budget| Plan::of(budget, &layers, 2048, None);
        assert_eq!(names(&of(Budget::Sparse(0.25)).unwrap()), ["c"]);
        assert_eq!(names(&of(Budget::Sparse(0.4)).unwrap()), ["b", "c"]);
        assert_eq!(names(&of(Budget::Sparse(1.0)).unwrap()), ["a", "b", "c", "d"]);
        assert!(names(&of(Budget::Sparse(0.0)).unwrap()).is_empty());
        // A weight of two bytes becomes 9 / 16 of its size: c saves 112 bytes, b 56.
        let plan = of(Budget::Bytes(1900)).unwrap();
        assert_eq!((names(&plan), plan.bytes, plan.sparse_share), (vec!["b", "c"], 2048 - 112 - 56, 0.375));
        assert_eq!(of(Budget::Bytes(2048)).unwrap().sparse.len(), 0);
        assert!(of(Budget::Bytes(1000)).unwrap_err().to_string().contains("bytes=1000"));
    }

    #[test]
    fn a_budget_of_perplexity_bounds_the_product_of_the_layers_factors() {
        let layers = [
            layer("a", 4, 9.0, Some(10.2)),
            layer("b", 4, 0.1, Some(10.5)),
            layer("better", 4, 5.0, Some(9.9)),
            layer("worst", 16, 0.0, Some(30.0)),
        ];
        let of = |factor| Plan::of(Budget::Perplexity(factor), &layers, 2048, Some(10.0)).unwrap();
        assert_eq!(names(&of(1.0)), ["better"]);
        assert_eq!(names(&of(1.03)), ["a", "better"]);
        let plan = of(1.08);
        assert_eq!(names(&plan), ["a", "b", "better"]);
        assert!((plan.perplexity_factor.unwrap() - 1.02 * 1.05).abs() < 1e-12);
        assert_eq!(names(&of(4.0)).len(), 4);
    }

    #[test]
    fn budgets_are_read_and_wrong_ones_say_what_is_expected() {
        assert_eq!("perplexity=1.05x".parse(), Ok(Budget::Perplexity(1.05)));
        assert_eq!("bytes=1000".parse(), Ok(Budget::Bytes(1000)));
        assert_eq!("sparse=0.4".parse(), Ok(Budget::Sparse(0.4)));
        for wrong in
            ["perplexity=1.05", "perplexity=0.9x", "perplexity=nanx", "bytes=-1", "sparse=2", "sparse=", "x=1", ""]
        {
            assert!(wrong.parse::<Budget>().is_err(), "{wrong}");
        }
    }
}
