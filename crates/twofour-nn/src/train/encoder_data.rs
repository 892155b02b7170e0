//! What an encoder is trained on.

use std::sync::Arc;

use super::{Batch, MaskedSample, MaskedText, QuestionSet, TrainingData, passes::drawn};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::Engine,
    model::{Bert, BertConfig, EncoderTask, expect_below},
    questions::Window,
};

/// The samples of an encoder, by its [task](crate::model::EncoderTask).
///
/// | samples | inputs of one | targets of one |
/// |---|---|---|
/// | questions | tokens of a window, then their types | first and last token of the answer |
/// | masked text | tokens of a stretch, then the positions of those that are masked | the tokens that are masked |
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EncoderData {
    /// Questions whose answers are in a text. Every pass over the training part takes each window once, in an order of
    /// its own.
    Questions(Arc<QuestionSet>),
    /// Text with masked tokens. A sample is a stretch at a random place.
    MaskedText(MaskedText),
}

impl TrainingData for EncoderData {
    type Model<E: Engine> = Bert<E>;

    fn prepare<E: Engine>(&self, _: &E, model: &mut Bert<E>) -> Result<()> {
        let BertConfig { ref encoder, task, positions } = *model.config();
        match (task, self) {
            (EncoderTask::Answers, EncoderData::Questions(set)) => {
                if set.length() != positions {
                    let (what, found) = ("tokens of the windows of questions", set.length().to_string());
                    return Err(Error::Setting { what, found, expected: "the length that the model is trained on" });
                }
                set.training().iter().chain(set.validation()).try_for_each(|window| {
                    expect_below("tokens of questions", &window.tokens, encoder.vocabulary())?;
                    expect_below("token types", &window.types, encoder.token_types())
                })
            }
            (EncoderTask::MaskedTokens, EncoderData::MaskedText(text)) => text.expect_sequences_of(positions),
            (task, _) => Err(Error::Setting {
                what: "the data",
                found: format!("of another task than {task:?}"),
                expected: "questions for answers, or text for masked tokens",
            }),
        }
    }

    fn batch(&self, BatchShape { batch, positions }: BatchShape, seed: u64, step: u64) -> Batch {
        match self {
            EncoderData::Questions(set) => {
                let numbers: Vec<u32> = (0..set.training().len() as u32).collect();
                let drawn = drawn(&numbers, batch, seed, step).into_iter();
                of_windows(drawn.map(|number| &set.training()[number as usize]))
            }
            EncoderData::MaskedText(text) => {
                let first = step.wrapping_mul(batch as u64);
                let numbers = (0..batch as u64).map(|sample| first.wrapping_add(sample));
                of_stretches(numbers.map(|number| text.training_sample(positions, seed, number)))
            }
        }
    }

    fn validation_batches(
        &self,
        BatchShape { batch, positions }: BatchShape,
        limit: usize,
    ) -> impl Iterator<Item = Batch> {
        let batches: Vec<Batch> = match self {
            EncoderData::Questions(set) => {
                let windows: Vec<&Window> = set.validation_samples(limit).collect();
                windows.chunks(batch.max(1)).map(|windows| of_windows(windows.iter().copied())).collect()
            }
            EncoderData::MaskedText(text) => {
                let stretches = text.validation_samples(positions, limit);
                stretches.chunks(batch.max(1)).map(|stretches| of_stretches(stretches.iter().cloned())).collect()
            }
        };
        batches.into_iter()
    }

    fn fingerprint(&self) -> u64 {
        match self {
            EncoderData::Questions(set) => set.fingerprint(),
            EncoderData::MaskedText(text) => text.fingerprint(),
        }
    }
}

fn of_windows<'a>(windows: impl Iterator<Item = &'a Window>) -> Batch {
    let mut batch = Batch { samples: 0, inputs: vec![], targets: vec![] };
    for window in windows {
        batch.samples += 1;
        batch.inputs.extend(window.tokens.iter().chain(&window.types));
        batch.targets.extend(window.target);
    }
    batch
}

fn of_stretches(stretches: impl Iterator<Item = MaskedSample>) -> Batch {
    let mut batch = Batch { samples: 0, inputs: vec![], targets: vec![] };
    for MaskedSample { tokens, places, targets } in stretches {
        batch.samples += 1;
        batch.inputs.extend(tokens.into_iter().chain(places));
        batch.targets.extend(targets);
    }
    batch
}
