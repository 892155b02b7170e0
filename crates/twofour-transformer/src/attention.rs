//! The shape of attention, and what becomes of scores before their softmax.

use std::ops::Range;

/// The shape of attention. Query head `h` attends to the keys and values of head `h / (heads / kv_heads)`: grouped
/// queries (Ainslie et al., "GQA", 2023).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub positions: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values, a divisor of `heads`.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether a token attends only to itself and those before it.
    pub causal: bool,
    /// What becomes of scores.
    pub scores: ScoreOptions,
}

/// What becomes of the scores `q kᵀ` before their softmax. The default is `q kᵀ / sqrt(head_dim)` of all keys.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ScoreOptions {
    /// A token attends only to those at a distance below this: itself and `window - 1` before it, and without the
    /// causal mask as many behind it.
    pub window: Option<usize>,
    /// The factor of scores, instead of `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Scaled scores `s` become `soft_cap · tanh(s / soft_cap)`.
    pub soft_cap: Option<f32>,
}

/// What is wrong with an option: which, its value, and what it must be.
pub(crate) type Fault = (&'static str, String, &'static str);

impl ScoreOptions {
    /// Returns whether there is a window or a soft cap, which not every kernel has.
    #[cfg(feature = "cuda")]
    pub(crate) fn has_options(&self) -> bool {
        self.window.is_some() || self.soft_cap.is_some()
    }

    /// Returns what is wrong, if anything is.
    pub(crate) fn fault(&self) -> Option<Fault> {
        let ScoreOptions { window, scale, soft_cap } = *self;
        let is_wrong = |number: &f32| !number.is_finite() || *number <= 0.0;
        if window == Some(0) {
            return Some(("the window of attention", "0".to_owned(), "at least 1"));
        }
        let numbers = [("the scale of attention", scale), ("the soft cap of attention", soft_cap)];
        let (what, number) = numbers.into_iter().find(|(_, number)| number.as_ref().is_some_and(is_wrong))?;
        Some((what, number.unwrap_or_default().to_string(), "positive and finite"))
    }
}

impl AttentionShape {
    /// Returns the tokens of the batch.
    pub fn tokens(&self) -> usize {
        self.batch * self.positions
    }

    /// Returns the elements of the merged heads of a token.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the elements of queries, keys and values of a token.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Returns the factor of scores.
    pub fn scale(&self) -> f32 {
        self.scores.scale.unwrap_or_else(|| 1.0 / (self.head_dim as f32).sqrt())
    }

    /// Returns the positions that a query attends to.
    pub fn keys_of(&self, query: usize) -> Range<usize> {
        let window = self.scores.window.unwrap_or(self.positions);
        let end = if self.causal { query + 1 } else { query.saturating_add(window).min(self.positions) };
        (query + 1).saturating_sub(window)..end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(positions: usize, causal: bool, window: Option<usize>) -> AttentionShape {
        let scores = ScoreOptions { window, ..ScoreOptions::default() };
        AttentionShape { batch: 1, positions, heads: 1, kv_heads: 1, head_dim: 4, causal, scores }
    }

    #[test]
    fn a_query_attends_to_keys_within_the_window() {
        for (positions, window) in
            [(1, Some(1)), (9, None), (9, Some(1)), (9, Some(4)), (9, Some(9)), (9, Some(usize::MAX))]
        {
            for causal in [false, true] {
                let shape = shape(positions, causal, window);
                for query in 0..positions {
                    let attends = |key: &usize| {
                        (!causal || *key <= query) && window.is_none_or(|window| key.abs_diff(query) < window)
                    };
                    let expected: Vec<usize> = (0..positions).filter(attends).collect();
                    assert_eq!(shape.keys_of(query).collect::<Vec<_>>(), expected, "{shape:?}, {query}");
                }
            }
        }
    }

    #[test]
    fn options_that_no_score_can_have_are_named() {
        let of = |window, scale, soft_cap| ScoreOptions { window, scale, soft_cap }.fault().map(|(what, ..)| what);
        assert_eq!(of(None, None, None), None);
        assert_eq!(of(Some(1), Some(0.25), Some(50.0)), None);
        assert_eq!(of(Some(0), None, None), Some("the window of attention"));
        for number in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert_eq!(of(None, Some(number), None), Some("the scale of attention"));
            assert_eq!(of(None, None, Some(number)), Some("the soft cap of attention"));
        }
    }
}
