//! What pruning methods require of a layer's inputs.

use std::borrow::Cow;

use super::{Hessian, InputNorms};
use crate::Result;

/// How much is gathered of a layer's inputs. Each kind includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StatisticKind {
    /// Nothing: the weights are enough.
    Nothing,
    /// The norm of each input feature: `8 n` bytes.
    Norms,
    /// All products of two input features: `4 n²` bytes.
    Hessian,
}

/// What was gathered of a layer's inputs.
#[derive(Debug, Clone, PartialEq)]
pub enum Statistic {
    /// The norm of each input feature.
    Norms(InputNorms),
    /// All products of two input features.
    Hessian(Hessian),
}

impl Statistic {
    /// No tokens yet, of a layer with this many input features; `None` where nothing is to be gathered.
    ///
    /// # Errors
    /// Those of [`Hessian::new`].
    pub fn new(kind: StatisticKind, features: usize) -> Result<Option<Self>> {
        Ok(match kind {
            StatisticKind::Nothing => None,
            StatisticKind::Norms => Some(Statistic::Norms(InputNorms::new(features))),
            StatisticKind::Hessian => Some(Statistic::Hessian(Hessian::new(features)?)),
        })
    }

    /// Adds a batch of activations `[tokens, features]`, row-major.
    ///
    /// # Errors
    /// Those of [`InputNorms::add`] and [`Hessian::add`].
    pub fn add(&mut self, batch: &[f32]) -> Result<()> {
        match self {
            Statistic::Norms(norms) => norms.add(batch),
            Statistic::Hessian(hessian) => hessian.add(batch),
        }
    }

    /// The norms of the input features.
    pub fn norms(&self) -> Cow<'_, InputNorms> {
        match self {
            Statistic::Norms(norms) => Cow::Borrowed(norms),
            Statistic::Hessian(hessian) => Cow::Owned(InputNorms::of_hessian(hessian)),
        }
    }

    /// The Hessian, if it was gathered.
    pub fn hessian(&self) -> Option<&Hessian> {
        match self {
            Statistic::Norms(_) => None,
            Statistic::Hessian(hessian) => Some(hessian),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_includes_those_before_it() {
        let batch = [1.0f32, -2.0, 0.5, 3.0];
        let gathered = |kind| {
            let mut statistic = Statistic::new(kind, 2).unwrap().unwrap();
            statistic.add(&batch).unwrap();
            statistic
        };
        let (norms, hessian) = (gathered(StatisticKind::Norms), gathered(StatisticKind::Hessian));
        assert_eq!(*norms.norms(), *hessian.norms());
        assert_eq!(norms.norms().sums_of_squares(), [1.25, 13.0]);
        assert!(norms.hessian().is_none() && hessian.hessian().is_some());
        assert!(Statistic::new(StatisticKind::Nothing, 2).unwrap().is_none());
        assert!(StatisticKind::Nothing < StatisticKind::Norms && StatisticKind::Norms < StatisticKind::Hessian);
    }
}
