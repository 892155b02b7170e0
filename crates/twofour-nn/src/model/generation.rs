//! Generation and perplexity, on any device.

use std::{fmt, ops::ControlFlow};

use super::{Perplexity, Sampling, TransformerConfig, Windows, sampling::largest_score};
use crate::{Error, Result, cpu::cross_entropy, random::Stream};

/// A decoder that [`LanguageModel`](super::LanguageModel) runs, on any device and in any type.
pub trait Decoder: fmt::Debug + Send + Sync {
    /// The model's description.
    fn config(&self) -> &TransformerConfig;

    /// Bytes of the linear layers' weights in memory: values, and metadata where they are 2:4; without biases.
    fn weight_bytes(&self) -> usize;

    /// Begins a sequence of up to `capacity` tokens, at most the context.
    ///
    /// # Errors
    /// A capacity of zero or beyond the context; not enough memory.
    fn begin(&self, capacity: usize) -> Result<Box<dyn Sequence + '_>>;

    /// Continues `prompt` by up to `count` tokens, calling `f` with each; `f` may stop it.
    ///
    /// Where the context is full, the sequence begins anew with the later half of what it held, so the text may be of
    /// any length.
    ///
    /// # Errors
    /// [`Error::Setting`] for a bad temperature or an empty prompt; those of [`Sequence::next`].
    fn generate(
        &self,
        prompt: &[u32],
        count: usize,
        sampling: Sampling,
        f: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<()> {
        sampling.validate()?;
        if prompt.is_empty() {
            let (what, found) = ("the prompt", "empty".to_owned());
            return Err(Error::Setting { what, found, expected: "one token or more" });
        }
        let context = self.config().context();
        let mut text = prompt.to_vec();
        let mut unread = text.len().saturating_sub(context);
        let mut sequence = self.begin((text.len() - unread).saturating_add(count).min(context))?;
        for index in 0..count {
            if sequence.remaining() < text.len() - unread {
                sequence.truncate(0);
                unread = text.len() - (context / 2).max(1);
            }
            let token = sequence.next(&text[unread..], sampling, index as u64)?;
            unread = text.len();
            text.push(token);
            if f(token).is_break() {
                break;
            }
        }
        Ok(())
    }

    /// Writes texts at once, and returns each with its prompt. `progress` is told how many tokens were written since it
    /// was called last; its error ends the writing.
    ///
    /// # Errors
    /// Those of [`SampledTexts::validate`], of the model, and of `progress`.
    fn sample(&self, texts: &SampledTexts<'_>, progress: &mut dyn FnMut(usize) -> Result<()>) -> Result<Vec<Vec<u32>>>;

    /// The perplexity of a text, window by window; `progress(done, total)` is told the tokens that are scored.
    ///
    /// # Errors
    /// Those of [`Windows::validate`]; a text of fewer than two tokens; [`Error::NotFinite`]; those of
    /// [`Sequence::negative_log_likelihood`].
    fn perplexity(
        &self,
        tokens: &[u32],
        windows: Windows,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Perplexity> {
        windows.validate(self.config().context())?;
        let tokens = windows.text(tokens);
        if tokens.len() < 2 {
            let found = tokens.len().to_string();
            return Err(Error::Setting { what: "tokens of the text", found, expected: "two or more" });
        }
        let mut sequence = self.begin(windows.window)?;
        let (mut sum, mut scored) = (0.0, 0);
        for (range, count) in windows.of(tokens.len()).filter(|(_, count)| *count > 0) {
            sequence.truncate(0);
            sum += sequence.negative_log_likelihood(&windows.tokens(tokens, range.clone()), count)?;
            scored += count;
            progress(range.end, tokens.len());
        }
        Perplexity::of(sum, scored)
    }
}

/// A sequence in progress, of which a [`Decoder`] keeps the keys and values.
pub trait Sequence {
    /// How many more tokens fit.
    fn remaining(&self) -> usize;

    /// Forgets all tokens but the first `tokens`.
    fn truncate(&mut self, tokens: usize);

    /// Feeds one or more tokens and chooses the next; `index` counts the tokens chosen so far.
    ///
    /// # Errors
    /// No tokens, more than fit, tokens outside the vocabulary; those of the products.
    fn next(&mut self, tokens: &[u32], sampling: Sampling, index: u64) -> Result<u32>;

    /// Feeds tokens to an empty sequence and returns the sum of `-log p`, in nats, of each of the last `count` of them
    /// given those before it.
    ///
    /// # Errors
    /// Those of [`Sequence::next`]; a `count` that leaves no token in front.
    fn negative_log_likelihood(&mut self, tokens: &[u32], count: usize) -> Result<f64>;

    /// Feeds tokens and returns how likely `targets` are, of which the last is the token after them: each given all
    /// tokens before it.
    ///
    /// # Errors
    /// Those of [`Sequence::next`]; more targets than tokens, or targets outside the vocabulary; [`Error::NotFinite`].
    fn likelihood(&mut self, tokens: &[u32], targets: &[u32]) -> Result<Likelihood>;
}

/// Texts that a model writes, each by a seed of its own.
#[derive(Debug, Clone, Copy)]
pub struct SampledTexts<'a> {
    /// The tokens that all of them begin with: one or more.
    pub prompt: &'a [u32],
    /// How many texts.
    pub count: usize,
    /// Tokens of each, with the prompt. A token that ends a text is one among others: the model goes on behind it.
    pub length: usize,
    /// The first text's; the seed of the next ones depends on it.
    pub sampling: Sampling,
}

impl SampledTexts<'_> {
    /// Checks the sizes, for a model of that context.
    ///
    /// # Errors
    /// [`Error::Setting`] for an empty prompt, no texts, a length that the prompt fills or beyond the context, and a
    /// bad temperature.
    pub fn validate(&self, context: usize) -> Result<()> {
        let refused = |what, found: String, expected| Err(Error::Setting { what, found, expected });
        if self.prompt.is_empty() {
            return refused("the prompt", "empty".to_owned(), "one token or more");
        }
        if self.count == 0 {
            return refused("texts to write", "0".to_owned(), "one or more");
        }
        if self.length <= self.prompt.len() || self.length > context {
            let found = format!("{} with a prompt of {} and a context of {context}", self.length, self.prompt.len());
            return refused("the length of a text", found, "beyond the prompt and within the context");
        }
        self.sampling.validate()
    }

    /// How tokens of a text are chosen.
    pub(super) fn sampling(&self, text: usize) -> Sampling {
        let seed = Stream::new(self.sampling.seed, "texts").bits(text as u64);
        Sampling { seed, ..self.sampling }
    }
}

/// How likely a model finds tokens that it is given.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Likelihood {
    /// The sum of `log p`, in nats.
    pub log: f64,
    /// Whether each of them is the most likely one in its place, so that greedy decoding writes them.
    pub is_greedy: bool,
}

impl Likelihood {
    /// The likelihood of no tokens.
    pub(super) const NONE: Likelihood = Likelihood { log: 0.0, is_greedy: true };

    /// Returns the likelihood with more tokens behind these; the rows of `logits: [targets, vocabulary]` score them.
    pub(super) fn then(self, logits: &[f32], vocabulary: usize, targets: &[u32]) -> Result<Self> {
        let Likelihood { log, mut is_greedy } = self;
        for (row, target) in logits.chunks_exact(vocabulary).zip(targets) {
            let largest = largest_score(row)?;
            // Among equal scores, greedy decoding takes the first.
            is_greedy &= row.iter().position(|score| *score == largest) == Some(*target as usize);
        }
        Ok(Likelihood { log: log - cross_entropy::loss(logits, vocabulary, targets), is_greedy })
    }

    /// Checks the targets of [`Sequence::likelihood`].
    pub(super) fn expect_targets(tokens: &[u32], targets: &[u32], vocabulary: usize) -> Result<()> {
        if targets.len() > tokens.len() {
            let found = format!("{} behind {} tokens", targets.len(), tokens.len());
            return Err(Error::Setting { what: "targets", found, expected: "at most as many as are fed" });
        }
        match targets.iter().enumerate().find(|(_, token)| **token as usize >= vocabulary) {
            None => Ok(()),
            Some((position, &token)) => Err(Error::token("targets", token, position, vocabulary)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::model::LanguageModel;

    fn model(family: &str) -> LanguageModel {
        let at = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints").join(family);
        LanguageModel::load_as(at, Some(twofour::DataType::F32)).unwrap()
    }

    #[test]
    fn texts_that_are_written_at_once_are_those_that_are_written_alone() {
        for family in ["llama", "gpt2", "gemma3", "qwen3"] {
            let model = model(family);
            let prompt = model.tokenizer.encode("two of").unwrap();
            for temperature in [0.0, 1.0] {
                let sampling = Sampling { temperature, seed: 7 };
                let texts = SampledTexts { prompt: &prompt, count: 70, length: 24, sampling };
                let mut told = 0;
                let found = model.decoder.sample(&texts, &mut |more| {
                    told += more;
                    Ok(())
                });
                let found = found.unwrap();
                assert_eq!((found.len(), told), (70, 70 * (24 - prompt.len())), "{family}");
                // The first and last ones of both batches.
                for index in [0, 1, 63, 64, 69] {
                    let found = &found[index];
                    let mut alone = prompt.clone();
                    let count = 24 - prompt.len();
                    let push = &mut |token| {
                        alone.push(token);
                        ControlFlow::Continue(())
                    };
                    model.decoder.generate(&prompt, count, texts.sampling(index), push).unwrap();
                    assert_eq!(found, &alone, "{family}, text {index}");
                }
                assert!(temperature == 0.0 || found[0] != found[1], "{family}");
            }
        }
    }

    #[test]
    fn texts_that_cannot_be_written_are_errors_and_the_writing_can_be_ended() {
        let model = model("llama");
        let sampling = Sampling { temperature: 1.0, seed: 0 };
        let good = SampledTexts { prompt: &[1, 20], count: 2, length: 8, sampling };
        let hot = Sampling { temperature: f32::NAN, ..sampling };
        for bad in [
            SampledTexts { prompt: &[], ..good },
            SampledTexts { prompt: &[1, 999], ..good },
            SampledTexts { count: 0, ..good },
            SampledTexts { length: 2, ..good },
            SampledTexts { length: 41, ..good },
            SampledTexts { sampling: hot, ..good },
        ] {
            assert!(model.decoder.sample(&bad, &mut |_| Ok(())).is_err(), "{bad:?}");
        }
        let stopped = model.decoder.sample(&good, &mut |_| Err(twofour::Error::Interrupted.into()));
        assert!(matches!(stopped, Err(Error::Core(twofour::Error::Interrupted))));
    }
}
