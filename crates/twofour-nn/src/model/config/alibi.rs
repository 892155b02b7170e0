//! Attention with linear biases.

use serde::{Deserialize, Serialize};

/// Attention with linear biases, or ALiBi (Press et al., 2022): each score loses the distance of its key, times a slope
/// that is the head's own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Alibi {
    /// Whether scores are given the position of their key instead, times the slope, with slope, position and product
    /// rounded to bf16, all times the scale of scores: the form that Falcon was trained with.
    pub rounded: bool,
}

impl Alibi {
    /// The slopes of so many heads: powers of two down to 1/256.
    ///
    /// ```
    /// use twofour_nn::model::Alibi;
    /// assert_eq!(Alibi::slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
    /// // Of the next power of two those of even numbers, then those of odd ones.
    /// assert_eq!(Alibi::slopes(3), [0.0625, 0.00390625, 0.25]);
    /// ```
    pub fn slopes(heads: usize) -> Vec<f32> {
        let all = heads.next_power_of_two();
        let slope = |number: usize| (-8.0 * number as f64 / all as f64).exp2() as f32;
        match all == heads {
            true => (1..=all).map(slope).collect(),
            false => (2..=all).step_by(2).chain((1..all).step_by(2)).take(heads).map(slope).collect(),
        }
    }
}
