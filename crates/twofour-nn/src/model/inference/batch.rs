//! Several sequences that are written at once, so that a step is GEMMs of as many rows.

use rayon::prelude::*;
use twofour::kernel::KernelElement;

use super::{Inference, attention::Seen, cache::Cache, layer::unobserved};
use crate::{
    Result,
    model::{SampledTexts, Sampling},
};

/// Sequences that are written at once: GEMMs of so many rows are near their speed, and caches stay small.
const AT_ONCE: usize = 64;

/// Elements of logits that are computed at once.
const MAX_LOGITS: usize = 1 << 23;

impl<T: KernelElement> Inference<T> {
    pub(super) fn sample_batch(
        &self,
        texts: &SampledTexts<'_>,
        progress: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Vec<Vec<u32>>> {
        texts.validate(self.config.context())?;
        self.expect_tokens(texts.prompt)?;
        let mut found = vec![];
        for first in (0..texts.count).step_by(AT_ONCE) {
            let last = texts.count.min(first + AT_ONCE);
            found.extend(self.together(texts, first..last, progress)?);
        }
        Ok(found)
    }

    /// Some of the texts, at once.
    fn together(
        &self,
        texts: &SampledTexts<'_>,
        which: std::ops::Range<usize>,
        progress: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<Vec<Vec<u32>>> {
        // The prompt is read once.
        let mut session = self.session();
        let mut logits = session.feed(texts.prompt)?.repeat(which.len());
        let mut caches: Vec<Vec<Cache<T>>> =
            session.into_caches().into_iter().map(|cache| vec![cache; which.len()]).collect();
        let samplings: Vec<Sampling> = which.map(|index| texts.sampling(index)).collect();
        let mut written = vec![texts.prompt.to_vec(); samplings.len()];
        for index in 0..texts.length - texts.prompt.len() {
            let chosen: Vec<u32> = logits
                .par_chunks_mut(self.config.vocabulary())
                .zip(&samplings)
                .map(|(row, sampling)| sampling.choose(row, index as u64))
                .collect::<Result<_>>()?;
            written.iter_mut().zip(&chosen).for_each(|(text, token)| text.push(*token));
            progress(chosen.len())?;
            let position = texts.prompt.len() + index;
            if position + 1 < texts.length {
                logits = match self.is_stretched(position + 1) == self.is_stretched(position) {
                    true => self.step(&chosen, position, &mut caches)?,
                    false => self.anew(&written, &mut caches)?,
                };
            }
        }
        Ok(written)
    }

    /// The scores after whole texts, whose keys and values come into the caches.
    fn anew(&self, texts: &[Vec<u32>], caches: &mut [Vec<Cache<T>>]) -> Result<Vec<f32>> {
        let mut logits = vec![];
        for (index, text) in texts.iter().enumerate() {
            let mut session = self.session();
            logits.extend(session.feed(text)?);
            for (caches, own) in caches.iter_mut().zip(session.into_caches()) {
                caches[index] = own;
            }
        }
        Ok(logits)
    }

    /// The scores after one more token of each sequence, all of them at one position.
    fn step(&self, tokens: &[u32], position: usize, caches: &mut [Vec<Cache<T>>]) -> Result<Vec<f32>> {
        let width = self.config.width;
        let mut x = Vec::with_capacity(tokens.len() * width);
        for token in tokens {
            x.extend(self.embed(&[*token], position)?);
        }
        let tables = self.rotations.as_ref().map(|rotations| rotations.tables(position..position + 1, position + 1));
        for (layer, caches) in self.layers.iter().zip(caches) {
            let seen = Seen::Caches { caches, position, rotary: tables.as_ref() };
            layer.forward(&self.config, &mut x, seen, &mut unobserved)?;
        }
        let rows = (MAX_LOGITS / self.config.vocabulary()).max(1);
        let mut logits = Vec::with_capacity(tokens.len() * self.config.vocabulary());
        for x in x.chunks(rows * width) {
            logits.extend(self.head_of(x)?);
        }
        Ok(logits)
    }
}
