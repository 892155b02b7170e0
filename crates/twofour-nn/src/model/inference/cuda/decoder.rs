//! The GPU's model as a [`Decoder`].

use std::sync::{MutexGuard, PoisonError};

use super::{CudaInference, CudaSession};
use crate::{
    Result,
    model::{
        Decoder, EncoderInput, HiddenStates, Likelihood, SampledTexts, Sampling, Sequence, TransformerConfig,
        sampling::largest_score,
    },
};

/// Sequences that are written at once.
const AT_ONCE: usize = 128;

/// Below this temperature the most likely token is taken, as on the CPU.
const GREEDY: f32 = 1e-4;

impl Decoder for CudaInference {
    fn config(&self) -> &TransformerConfig {
        self.config()
    }

    fn weight_bytes(&self) -> usize {
        self.weight_bytes()
    }

    fn begin(&self, capacity: usize) -> Result<Box<dyn Sequence + '_>> {
        let busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Box::new(CudaSequence { session: self.session(1, capacity)?, chosen: None, _busy: busy }))
    }

    fn sample(&self, texts: &SampledTexts<'_>, progress: &mut dyn FnMut(usize) -> Result<()>) -> Result<Vec<Vec<u32>>> {
        texts.validate(self.config().context())?;
        let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = vec![];
        for first in (0..texts.count).step_by(AT_ONCE) {
            let samplings: Vec<Sampling> =
                (first..texts.count.min(first + AT_ONCE)).map(|i| texts.sampling(i)).collect();
            let mut session = self.session(samplings.len(), texts.length)?;
            for sequence in 0..samplings.len() {
                session.prefill(sequence, texts.prompt)?;
            }
            session.choose()?;
            let mut written = vec![texts.prompt.to_vec(); samplings.len()];
            for index in 0..texts.length - texts.prompt.len() {
                let chosen = session.choose_by(&samplings, index as u64)?;
                written.iter_mut().zip(&chosen).for_each(|(text, token)| text.push(*token));
                progress(chosen.len())?;
                if texts.prompt.len() + index + 1 < texts.length {
                    session.decode()?;
                }
            }
            found.extend(written);
        }
        Ok(found)
    }
}

impl HiddenStates for CudaInference {
    fn config(&self) -> &TransformerConfig {
        self.config()
    }

    fn hidden(&self, inputs: &[EncoderInput<'_>]) -> Result<Vec<Vec<f32>>> {
        let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        inputs.iter().map(|input| self.session(1, input.tokens.len())?.last_hidden(input.tokens)).collect()
    }
}

/// The only sequence of a session.
struct CudaSequence<'a> {
    session: CudaSession<'a>,
    /// The token that the device chose last.
    chosen: Option<u32>,
    _busy: MutexGuard<'a, ()>,
}

impl Sequence for CudaSequence<'_> {
    fn remaining(&self) -> usize {
        self.session.remaining(0)
    }

    fn truncate(&mut self, tokens: usize) {
        self.session.truncate(0, tokens);
        self.chosen = None;
    }

    /// The most likely token is chosen on the device; to sample, scores are copied to the host, and the choice is the
    /// CPU's.
    fn next(&mut self, tokens: &[u32], sampling: Sampling, index: u64) -> Result<u32> {
        let session = &mut self.session;
        if sampling.temperature >= GREEDY {
            session.prefill(0, tokens)?;
            return sampling.choose(&mut session.scores(0)?, index);
        }
        if self.chosen.is_some_and(|chosen| tokens == [chosen]) {
            session.decode()?;
        } else {
            session.prefill(0, tokens)?;
            // The device looks for no NaN: what a damaged model computes shows at the first token.
            largest_score(&session.scores(0)?)?;
            session.choose()?;
        }
        let token = session.chosen()?.first().copied().unwrap_or_default();
        self.chosen = Some(token);
        Ok(token)
    }

    fn negative_log_likelihood(&mut self, tokens: &[u32], count: usize) -> Result<f64> {
        self.session.negative_log_likelihood(tokens, count)
    }

    fn likelihood(&mut self, tokens: &[u32], targets: &[u32]) -> Result<Likelihood> {
        self.chosen = None;
        self.session.likelihood(tokens, targets)
    }
}
