//! A sequence that is being read and written.

use std::fmt;

use twofour::kernel::KernelElement;

use super::{Inference, attention::Seen, cache::Cache, layer::unobserved};
use crate::{
    Error, Result,
    cpu::cross_entropy,
    model::{Likelihood, Sampling, Sequence},
};

/// A sequence in progress: the keys and values of what was fed so far.
///
/// LongRoPE ([`RopeScaling::Long`](crate::model::RopeScaling::Long)) rotates a text that is longer than the original
/// context by other angles than a shorter one. Where a text grows beyond that length, the tokens before are computed
/// anew, so that scores are always those of the whole text read at once, as in transformers' `generate`.
pub struct Session<'a, T: KernelElement> {
    model: &'a Inference<T>,
    caches: Vec<Cache<T>>,
    /// What was fed.
    tokens: Vec<u32>,
    /// Whether keys are rotated as those of long texts are.
    is_stretched: bool,
}

/// Tokens that go through the layers at once: enough for the kernels, and few enough for the scores of attention to
/// stay small.
const MAX_AT_ONCE: usize = 512;

/// Elements of logits that are computed at once where all tokens are scored.
const MAX_LOGITS: usize = 1 << 22;

impl<T: KernelElement> fmt::Debug for Session<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").field("position", &self.position()).field("remaining", &self.remaining()).finish()
    }
}

impl<'a, T: KernelElement> Session<'a, T> {
    pub(super) fn new(model: &'a Inference<T>) -> Self {
        Session { model, caches: vec![Cache::default(); model.config.layers], tokens: vec![], is_stretched: false }
    }

    /// The keys and values of each layer.
    pub(super) fn into_caches(self) -> Vec<Cache<T>> {
        self.caches
    }

    /// How many tokens were fed.
    pub fn position(&self) -> usize {
        self.tokens.len()
    }

    /// How many more fit the context.
    pub fn remaining(&self) -> usize {
        self.model.config.context() - self.position()
    }

    /// Feeds one or more tokens and returns the scores of the token that follows the last, `[vocabulary]`.
    ///
    /// # Errors
    /// [`Error::Setting`] for no tokens or more than [`Session::remaining`], [`Error::Operation`] for one outside the
    /// vocabulary; those of the products.
    pub fn feed(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let (model, width) = (self.model, self.model.config.width);
        let x = self.hidden(tokens)?;
        model.head_of(&x[x.len() - width..])
    }

    /// Feeds tokens and returns the scores of the token that follows each, `[tokens, vocabulary]`.
    ///
    /// # Errors
    /// Those of [`Session::feed`].
    pub fn logits(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let model = self.model;
        model.head_of(&self.hidden(tokens)?)
    }

    /// Feeds tokens and returns the sum of `-log p`, in nats, of each of the last `count` of them given those before
    /// it.
    ///
    /// # Errors
    /// Those of [`Session::feed`]; a `count` that leaves no token in front.
    pub fn negative_log_likelihood(&mut self, tokens: &[u32], count: usize) -> Result<f64> {
        if count >= tokens.len() {
            let found = format!("{count} of {}", tokens.len());
            return Err(Error::Setting { what: "tokens to score", found, expected: "fewer than are fed" });
        }
        let (model, width, vocabulary) = (self.model, self.model.config.width, self.model.config.vocabulary());
        let x = self.hidden(tokens)?;
        let first = tokens.len() - count - 1;
        let at_once = (MAX_LOGITS / vocabulary).max(1);
        let (x, targets) = (&x[first * width..][..count * width], &tokens[first + 1..]);
        let mut sum = 0.0;
        for (x, targets) in x.chunks(at_once * width).zip(targets.chunks(at_once)) {
            sum += cross_entropy::loss(&model.head_of(x)?, vocabulary, targets);
        }
        Ok(sum)
    }

    /// Feeds tokens and returns their last hidden states, behind the last norm, `[tokens, width]`.
    ///
    /// # Errors
    /// Those of [`Session::feed`].
    pub fn last_hidden(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let model = self.model;
        Ok(model.last_norm(&self.hidden(tokens)?).into_owned())
    }

    /// Feeds tokens and returns what the last layer makes of them, `[tokens, width]`.
    fn hidden(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        if tokens.is_empty() || tokens.len() > self.remaining() {
            let found = format!("{} where {} fit", tokens.len(), self.remaining());
            return Err(Error::Setting { what: "number of tokens to feed", found, expected: "from 1 to what fits" });
        }
        self.model.expect_tokens(tokens)?;
        let is_stretched = self.model.is_stretched(self.position() + tokens.len());
        if is_stretched == self.is_stretched {
            return self.fed(tokens);
        }
        self.is_stretched = is_stretched;
        let mut whole = self.tokens.clone();
        self.truncate(0);
        let before = whole.len() * self.model.config.width;
        whole.extend_from_slice(tokens);
        Ok(self.fed(&whole)?.split_off(before))
    }

    /// [`Session::hidden`] behind what is in the cache.
    fn fed(&mut self, tokens: &[u32]) -> Result<Vec<f32>> {
        let Inference { config, layers, rotations, .. } = self.model;
        let total = self.position() + tokens.len();
        let mut all = Vec::with_capacity(tokens.len() * config.width);
        for tokens in tokens.chunks(MAX_AT_ONCE) {
            let position = self.position();
            let mut x = self.model.embed(tokens, position)?;
            let positions = position..position + tokens.len();
            let tables = rotations.as_ref().map(|rotations| rotations.tables(positions, total));
            for (layer, cache) in layers.iter().zip(&mut self.caches) {
                let seen = Seen::Cache { cache, position, rotary: tables.as_ref() };
                layer.forward(config, &mut x, seen, &mut unobserved)?;
            }
            self.tokens.extend_from_slice(tokens);
            all.append(&mut x);
        }
        Ok(all)
    }
}

impl<T: KernelElement> Sequence for Session<'_, T> {
    fn remaining(&self) -> usize {
        self.remaining()
    }

    fn truncate(&mut self, tokens: usize) {
        self.tokens.truncate(tokens);
        self.caches.iter_mut().for_each(|cache| cache.truncate(self.tokens.len()));
    }

    fn next(&mut self, tokens: &[u32], sampling: Sampling, index: u64) -> Result<u32> {
        sampling.choose(&mut self.feed(tokens)?, index)
    }

    fn negative_log_likelihood(&mut self, tokens: &[u32], count: usize) -> Result<f64> {
        self.negative_log_likelihood(tokens, count)
    }

    fn likelihood(&mut self, tokens: &[u32], targets: &[u32]) -> Result<Likelihood> {
        let (model, width, vocabulary) = (self.model, self.model.config.width, self.model.config.vocabulary());
        Likelihood::expect_targets(tokens, targets, vocabulary)?;
        let x = self.hidden(tokens)?;
        let at_once = (MAX_LOGITS / vocabulary).max(1);
        let scored = x[(tokens.len() - targets.len()) * width..].chunks(at_once * width).zip(targets.chunks(at_once));
        let mut found = Likelihood::NONE;
        for (x, targets) in scored {
            found = found.then(&model.head_of(x)?, vocabulary, targets)?;
        }
        Ok(found)
    }
}
