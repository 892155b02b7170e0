//! Finding answers.

use std::path::Path;

use twofour::DataType;
#[cfg(feature = "cuda")]
use twofour_cuda::Device;

use super::{QuestionFile, QuestionsError, Window, WindowSettings, Windows};
#[cfg(feature = "cuda")]
use crate::model::CudaEncoder;
use crate::{
    Result,
    model::{EncoderCheckpoint, EncoderInput, HiddenStates, Tokenizer},
};

/// An encoder with the head that scores each token as the first and as the last one of an answer, on the CPU or on a
/// GPU.
#[derive(Debug)]
pub struct AnswerFinder {
    encoder: Box<dyn HiddenStates>,
    tokenizer: Tokenizer,
    /// `[2, width]`.
    weight: Vec<f32>,
    bias: [f32; 2],
}

/// The most tokens of an answer, as in BERT's evaluation on SQuAD.
const LONGEST: usize = 30;

/// Windows that go through the model together.
const AT_ONCE: usize = 16;

impl AnswerFinder {
    /// Reads an encoder's directory with a head for answers, to compute on the CPU in `dtype`: f32, bf16 or f16.
    ///
    /// # Errors
    /// [`QuestionsError::NoHead`]; another type; those of [`EncoderCheckpoint::open`], of reading and packing.
    pub fn load(directory: impl AsRef<Path>, dtype: DataType) -> Result<Self> {
        Self::loaded(directory.as_ref(), |checkpoint| checkpoint.hidden_states(dtype))
    }

    /// [`AnswerFinder::load`], onto an NVIDIA GPU.
    ///
    /// # Errors
    /// Those of [`AnswerFinder::load`] and of [`CudaEncoder::of_checkpoint`].
    #[cfg(feature = "cuda")]
    pub fn load_on(device: &Device, directory: impl AsRef<Path>, dtype: DataType) -> Result<Self> {
        let encoder = |checkpoint: &EncoderCheckpoint| CudaEncoder::of_checkpoint(device, checkpoint, dtype);
        Self::loaded(directory.as_ref(), |checkpoint| Ok(Box::new(encoder(checkpoint)?)))
    }

    fn loaded(
        directory: &Path,
        encoder: impl FnOnce(&EncoderCheckpoint) -> Result<Box<dyn HiddenStates>>,
    ) -> Result<Self> {
        let checkpoint = EncoderCheckpoint::open(directory)?;
        let Some((weight, bias)) = checkpoint.answer_head()? else {
            return Err(QuestionsError::NoHead { path: directory.to_owned() }.into());
        };
        let (encoder, tokenizer) = (encoder(&checkpoint)?, checkpoint.tokenizer()?);
        Ok(AnswerFinder { encoder, tokenizer, weight, bias })
    }

    /// The answer to each question of a file: the stretch of at most 30 tokens with the highest sum of scores, over all
    /// windows of the question's text. `length` is the most tokens of a window. `progress(done, of)` is called as
    /// questions are answered.
    ///
    /// # Errors
    /// Those of [`Windows::new`] and of the model.
    pub fn answers(
        &self,
        file: &QuestionFile,
        length: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Vec<String>> {
        let windows = Windows::new(file, &self.tokenizer, WindowSettings::of_length(length))?;
        let mut all = (0..file.questions.len()).flat_map(|question| windows.of(file, question));
        let mut best: Vec<Option<(f32, std::ops::Range<usize>)>> = vec![None; file.questions.len()];
        loop {
            let windows: Vec<Window> = all.by_ref().take(AT_ONCE).collect();
            if windows.is_empty() {
                break;
            }
            let inputs: Vec<_> =
                windows.iter().map(|w| EncoderInput { tokens: &w.tokens, types: Some(&w.types) }).collect();
            for (window, hidden) in windows.iter().zip(self.encoder.hidden(&inputs)?) {
                let found = self.best(window, &hidden);
                let best = &mut best[window.question];
                if let Some((score, bytes)) = found
                    && best.as_ref().is_none_or(|(other, _)| score > *other)
                {
                    *best = Some((score, bytes));
                }
                progress(window.question + 1, file.questions.len());
            }
        }
        let text = |(question, bytes): (usize, Option<(f32, std::ops::Range<usize>)>)| {
            let context = &file.contexts[file.questions[question].context];
            bytes.map_or(String::new(), |(_, bytes)| context[bytes].to_owned())
        };
        Ok(best.into_iter().enumerate().map(text).collect())
    }

    /// The best stretch of a window's text, with its score.
    fn best(&self, window: &Window, hidden: &[f32]) -> Option<(f32, std::ops::Range<usize>)> {
        let width = self.encoder.config().width;
        let [begin, end] = [0, 1].map(|which| {
            let weight = &self.weight[which * width..][..width];
            let score = |row: &[f32]| row.iter().zip(weight).map(|(x, w)| x * w).sum::<f32>() + self.bias[which];
            let rows = hidden.chunks_exact(width).skip(window.text.start).take(window.text.len());
            rows.map(score).collect::<Vec<f32>>()
        });
        let pairs = (0..begin.len()).flat_map(|first| {
            let last = (first + LONGEST).min(end.len());
            (first..last).map(move |last| (first, last))
        });
        let scored = pairs.map(|(first, last)| (begin[first] + end[last], first, last));
        // Of equal scores the earlier stretch.
        let best = scored.reduce(|best, other| if other.0 > best.0 { other } else { best })?;
        let (score, first, last) = best;
        Some((score, window.bytes[first].start..window.bytes[last].end))
    }
}
