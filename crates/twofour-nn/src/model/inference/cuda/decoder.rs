//! The GPU's model as a [`Decoder`].

use std::{ops::ControlFlow, sync::PoisonError};

use super::{CudaInference, CudaSession};
use crate::{
    Error, Result,
    model::{Decoder, Perplexity, Sampling, TransformerConfig, Windows, sampling::largest_score},
};

/// Below this temperature the most likely token is taken, as on the CPU.
const GREEDY: f32 = 1e-4;

impl Decoder for CudaInference {
    fn config(&self) -> &TransformerConfig {
        self.config()
    }

    fn weight_bytes(&self) -> usize {
        self.weight_bytes()
    }

    /// The most likely token is chosen on the device; to sample, scores are copied to the host, and the choice is the CPU's.
    fn generate(
        &self,
        prompt: &[u32],
        count: usize,
        sampling: Sampling,
        f: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<()> {
        sampling.validate()?;
        if prompt.is_empty() {
            return Err(Error::Setting {
                what: "the prompt",
                found: "empty".to_owned(),
                expected: "one token or more",
            });
        }
        let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let context = self.config.context();
        let mut text = prompt.to_vec();
        let mut unread = text.len().saturating_sub(context);
        let capacity = (text.len() - unread).saturating_add(count).min(context);
        let mut session = self.session(1, capacity)?;
        // Whether the only unread token is the one that the device chose.
        let mut is_chosen = false;
        for index in 0..count {
            if session.remaining(0) < text.len() - unread {
                session.reset();
                unread = text.len() - (context / 2).max(1);
                is_chosen = false;
            }
            let token = match sampling.temperature < GREEDY {
                true => greedy(&mut session, &text[unread..], is_chosen)?,
                false => {
                    session.prefill(0, &text[unread..])?;
                    sampling.choose(&mut session.scores(0)?, index as u64)?
                }
            };
            is_chosen = true;
            unread = text.len();
            text.push(token);
            if f(token).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn perplexity(
        &self,
        tokens: &[u32],
        windows: Windows,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Perplexity> {
        windows.validate(self.config.context())?;
        if tokens.len() < 2 {
            let found = tokens.len().to_string();
            return Err(Error::Setting { what: "tokens of the text", found, expected: "two or more" });
        }
        let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let mut session = self.session(1, windows.window)?;
        let (mut sum, mut scored) = (0.0, 0);
        for (range, count) in windows.of(tokens.len()).filter(|(_, count)| *count > 0) {
            session.reset();
            sum += session.negative_log_likelihood(&tokens[range.clone()], count)?;
            scored += count;
            progress(range.end, tokens.len());
        }
        Perplexity::of(sum, scored)
    }
}

/// The most likely token after `unread`.
fn greedy(session: &mut CudaSession<'_>, unread: &[u32], is_chosen: bool) -> Result<u32> {
    if is_chosen {
        session.decode()?;
    } else {
        session.prefill(0, unread)?;
        // The device looks for no NaN: what a damaged model computes shows at the first token.
        largest_score(&session.scores(0)?)?;
        session.choose()?;
    }
    Ok(session.chosen()?.first().copied().unwrap_or_default())
}
