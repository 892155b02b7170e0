//! Perplexity of a text on any engine.

use super::Gpt;
use crate::{
    Error, Result,
    block::BatchShape,
    engine::{Engine, Kind},
    model::{Perplexity, Windows},
};

/// Tokens of a forward pass.
const TOKENS: usize = 1 << 14;

/// Logits of a forward pass.
const LOGITS: usize = 1 << 28;

impl<E: Engine> Gpt<E> {
    /// The perplexity of a text, window by window, as [`Inference::perplexity`](crate::model::Inference::perplexity)
    /// defines it; `progress(done, total)` is told the tokens that are scored. Several windows go through the model
    /// together. Where windows overlap, the tokens that an earlier one has scored are passed again without the others,
    /// and their sum is subtracted: what a position computes depends on those before it alone.
    ///
    /// # Errors
    /// Those of [`Windows::validate`] and of [`Gpt::loss`]; a text of fewer than two tokens.
    pub fn perplexity(
        &mut self,
        engine: &E,
        tokens: &[u32],
        windows: Windows,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Perplexity> {
        windows.validate(self.config().context())?;
        let tokens = windows.text(tokens);
        if tokens.len() < 2 {
            let found = tokens.len().to_string();
            return Err(Error::Setting { what: "tokens of the text", found, expected: "two or more" });
        }
        let most = (TOKENS / windows.window).min(LOGITS / self.config().vocabulary() / windows.window).max(1);
        let all: Vec<_> = windows.of(tokens.len()).filter(|(_, count)| *count > 0).collect();
        let mut loss = engine.zeros(Kind::Wide, 1)?;
        let (mut sum, mut scored) = (0.0, 0);
        // The first window scores more tokens than the others, and the last may be shorter.
        for alike in all.chunk_by(|a, b| (a.0.len(), a.1) == (b.0.len(), b.1)) {
            for batch in alike.chunks(most) {
                let mut add = |skipped: usize, sign: f64| -> Result<()> {
                    let mut shape = BatchShape { batch: 0, positions: 0 };
                    let (mut inputs, mut targets) = (vec![], vec![]);
                    for (range, count) in batch {
                        let read = windows.tokens(tokens, range.clone());
                        let end = if skipped == 0 { read.len() } else { read.len() - count };
                        inputs.extend_from_slice(&read[..end - 1]);
                        targets.extend_from_slice(&read[1..end]);
                        shape = BatchShape { batch: batch.len(), positions: end - 1 };
                    }
                    if shape.positions > 0 {
                        engine.clear(&mut loss)?;
                        self.loss(engine, (&inputs, &targets), shape, &mut loss)?;
                        sum += sign * engine.read(&loss)?.iter().map(|&sum| f64::from(sum)).sum::<f64>();
                    }
                    Ok(())
                };
                let (range, count) = &batch[0];
                let skipped = windows.length(range) - 1 - count;
                add(0, 1.0)?;
                if skipped > 0 {
                    add(skipped, -1.0)?;
                }
                scored += count * batch.len();
                progress(batch.last().map_or(0, |(range, _)| range.end), tokens.len());
            }
        }
        Perplexity::of(sum, scored)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{engine::cpu::CpuEngine, model::SavedModel};

    #[test]
    fn the_perplexity_is_that_of_inference() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/llama");
        let saved = SavedModel::open(directory).unwrap();
        let inference = saved.checkpoint().unwrap().inference::<f32>().unwrap();
        let tokens: Vec<u32> = (0..3000).map(|i: u32| (i * i * 31 + i * 7) % 80).collect();
        let mut model = saved.model(&CpuEngine, saved.config().context()).unwrap();
        for (count, window, stride, begin) in [
            (3000, 40, 40, None),
            (3000, 40, 40, Some(1)),
            (3000, 40, 13, None),
            (300, 40, 13, Some(1)),
            (95, 32, 31, None),
            (40, 40, 1, None),
            (7, 40, 40, None),
            (2, 2, 1, None),
            (2, 2, 1, Some(3)),
            (41, 40, 40, None),
        ] {
            let windows = Windows { window, stride, begin };
            let mut told = 0;
            let found = model.perplexity(&CpuEngine, &tokens[..count], windows, |done, _| told = done).unwrap();
            let expected = inference.perplexity(&tokens[..count], windows, |_, _| {}).unwrap();
            assert_eq!(found.tokens, expected.tokens, "{count} {windows:?}");
            let ratio = found.perplexity / expected.perplexity;
            assert!((ratio - 1.0).abs() < 1e-4, "{count} {windows:?}: {ratio}");
            assert!(told >= count - 1, "{told}");
        }
        assert!(
            model
                .perplexity(&CpuEngine, &tokens[..1], Windows { window: 4, stride: 4, begin: None }, |_, _| {})
                .is_err()
        );
        assert!(
            model.perplexity(&CpuEngine, &tokens, Windows { window: 41, stride: 4, begin: None }, |_, _| {}).is_err()
        );
    }
}
