//! Perplexity of a text.

use std::{borrow::Cow, ops::Range};

use crate::{Error, Result};

/// How a text is cut into windows that fit a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Windows {
    /// Tokens of a window, with the one that it begins with.
    pub window: usize,
    /// Tokens from the beginning of one window to that of the next; a larger number than a window has of the text means
    /// that windows do not overlap.
    pub stride: usize,
    /// The token that each window begins with, for models that predict badly without it
    /// ([`TransformerConfig::begins_windows`](crate::model::TransformerConfig::begins_windows)).
    pub begin: Option<u32>,
}

/// What [`Decoder::perplexity`](super::Decoder::perplexity) returns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Perplexity {
    /// The exponential of the mean of `-log p` over the tokens.
    pub perplexity: f64,
    /// How many tokens were scored.
    pub tokens: usize,
}

impl Perplexity {
    /// The perplexity of `tokens` tokens whose `-log p` have this sum.
    ///
    /// # Errors
    /// [`Error::NotFinite`] where it is NaN or infinite.
    pub(crate) fn of(sum: f64, tokens: usize) -> Result<Self> {
        let perplexity = (sum / tokens as f64).exp();
        if perplexity.is_finite() {
            Ok(Self { perplexity, tokens })
        } else {
            Err(Error::NotFinite { what: "perplexity" })
        }
    }
}

impl Windows {
    /// Checks the sizes, for a model of that context.
    ///
    /// # Errors
    /// [`Error::Setting`] for a window below 2 or beyond the context, a stride of zero or beyond the window.
    pub fn validate(&self, context: usize) -> Result<()> {
        if self.window < 2 || self.window > context {
            let found = format!("{} for a context of {context}", self.window);
            return Err(Error::Setting { what: "window", found, expected: "between 2 and the model's context" });
        }
        if self.stride == 0 || self.stride > self.window {
            let found = format!("{} for a window of {}", self.stride, self.window);
            return Err(Error::Setting { what: "stride", found, expected: "between 1 and the window" });
        }
        Ok(())
    }

    /// Beginning and end of each window of a text of that many tokens, and how many of its last tokens are scored:
    /// those that no earlier window scored, but never a window's first token.
    pub fn of(self, tokens: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
        let mut scored = 0;
        let unscored = usize::from(self.begin.is_none());
        let length = (self.window + unscored).saturating_sub(1).max(1);
        let begins = (0..tokens).step_by(self.stride.clamp(1, length));
        begins.map_while(move |begin| {
            if scored >= tokens {
                return None;
            }
            let end = (begin + length).min(tokens);
            let count = end - scored.max(begin + unscored);
            scored = end;
            Some((begin..end, count))
        })
    }

    /// The text without the token that it begins with, where windows have it anyway.
    pub(in crate::model) fn text(self, tokens: &[u32]) -> &[u32] {
        let begin = self.begin.as_slice();
        tokens.strip_prefix(begin).unwrap_or(tokens)
    }

    /// What a model reads of a window.
    pub(in crate::model) fn tokens(self, text: &[u32], range: Range<usize>) -> Cow<'_, [u32]> {
        match self.begin {
            None => Cow::Borrowed(&text[range]),
            Some(begin) => Cow::Owned([&[begin], &text[range]].concat()),
        }
    }

    /// How many tokens that is.
    pub(in crate::model) fn length(self, range: &Range<usize>) -> usize {
        usize::from(self.begin.is_some()) + range.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_perplexity_that_is_no_number_is_an_error() {
        assert_eq!(Perplexity::of(0.0, 3).unwrap(), Perplexity { perplexity: 1.0, tokens: 3 });
        for sum in [f64::NAN, f64::INFINITY, 1e6] {
            assert!(matches!(Perplexity::of(sum, 3), Err(Error::NotFinite { what: "perplexity" })), "{sum}");
        }
    }

    #[test]
    fn every_token_is_scored_once_and_a_windows_first_never() {
        for (tokens, window, stride) in
            [(10, 4, 4), (10, 4, 2), (10, 4, 1), (9, 4, 3), (2, 4, 4), (5, 4, 4), (33, 32, 7)]
        {
            let mut times = vec![0; tokens];
            let mut firsts = vec![];
            for (range, count) in (Windows { window, stride, begin: None }).of(tokens) {
                assert!(range.len() <= window && count < range.len(), "{range:?} {count}");
                times[range.end - count..range.end].iter_mut().for_each(|times| *times += 1);
                firsts.push(range.start);
            }
            for (token, times) in times.into_iter().enumerate() {
                // A window's first is scored by the window before it, if that reaches it.
                let is_lost = token == 0 || (firsts.contains(&token) && stride == window);
                assert_eq!(times, usize::from(!is_lost), "token {token} of {tokens}, {window} by {stride}");
            }
        }
    }

    #[test]
    fn behind_a_token_that_windows_begin_with_every_token_is_scored() {
        for (tokens, window, stride) in
            [(10, 4, 4), (10, 4, 2), (10, 4, 3), (9, 4, 1), (1, 4, 4), (2, 2, 2), (5, 2, 1), (33, 32, 7)]
        {
            let windows = Windows { window, stride, begin: Some(7) };
            let text: Vec<u32> = (100..100 + tokens as u32).collect();
            let mut times = vec![0; tokens];
            for (range, count) in windows.of(tokens) {
                let read = windows.tokens(&text, range.clone());
                assert!(read.len() <= window && count < read.len() && read[0] == 7, "{range:?} {count}");
                times[range.end - count..range.end].iter_mut().for_each(|times| *times += 1);
            }
            assert_eq!(times, vec![1; tokens], "{tokens}, {window} by {stride}");
            assert_eq!(windows.text(&[7, 1, 7]), [1, 7]);
            assert_eq!(windows.text(&[1, 7]), [1, 7]);
        }
    }
}
