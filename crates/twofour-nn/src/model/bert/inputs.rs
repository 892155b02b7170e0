//! What an encoder reads in a pass.

use super::{BertConfig, EncoderTask};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::{Buffer as _, Engine, Kind},
    model::transformer::expect_below,
};

/// Sequences of one length, one after the other, with their targets.
#[derive(Debug, Clone, Copy)]
pub struct BertSamples<'a> {
    /// Number of sequences.
    pub sequences: usize,
    /// Tokens, `[sequences, positions]`.
    pub tokens: &'a [u32],
    /// The type of each token.
    pub types: &'a [u32],
    /// For masked tokens the position of each in its sequence, `[sequences, targets]`; for answers empty.
    pub places: &'a [u32],
    /// Masked tokens as they were, or the positions of the first and of the last token of the answer: `[sequences,
    /// targets]`.
    pub targets: &'a [u32],
}

impl BertSamples<'_> {
    /// Sequences and their length.
    pub fn shape(&self) -> BatchShape {
        BatchShape { batch: self.sequences, positions: self.tokens.len() / self.sequences.max(1) }
    }
}

/// Sequences in the engine's memory: indices of [`Kind::Index`].
#[derive(Debug)]
pub struct BertBatch<E: Engine> {
    pub(super) tokens: E::Buffer,
    pub(super) types: E::Buffer,
    /// For masked tokens, rows of the hidden states. For answers, elements of the scores, sequence by sequence: the
    /// scores of the beginning, then the scores of the end.
    pub(super) rows: E::Buffer,
    /// For answers, the inverse of `rows`.
    pub(super) back: E::Buffer,
    pub(super) targets: E::Buffer,
}

impl<E: Engine> BertBatch<E> {
    /// Brings samples to the engine's memory.
    ///
    /// # Errors
    /// Samples that do not fit the shape, the task or the vocabulary; not enough memory.
    pub fn new(engine: &E, config: &BertConfig, samples: BertSamples<'_>) -> Result<Self> {
        let lists = lists(config, samples)?;
        let [tokens, types, rows, back, targets] = lists.map(|ids| uploaded(engine, &ids));
        Ok(BertBatch { tokens: tokens?, types: types?, rows: rows?, back: back?, targets: targets? })
    }

    /// Overwrites the samples with others of the same shape.
    ///
    /// # Errors
    /// Those of [`BertBatch::new`]; samples of another shape.
    pub fn write(&mut self, engine: &E, config: &BertConfig, samples: BertSamples<'_>) -> Result<()> {
        let BertBatch { tokens, types, rows, back, targets } = self;
        let buffers = [tokens, types, rows, back, targets];
        let lists = lists(config, samples)?;
        buffers
            .into_iter()
            .zip(lists)
            .filter(|(_, ids)| !ids.is_empty())
            .try_for_each(|(to, ids)| Ok(engine.write_ids(to, &ids)?))
    }

    /// Sequences without targets, as [`Bert::encode`](super::Bert::encode) takes them.
    ///
    /// # Errors
    /// Tokens or types that do not fit the shape or do not exist; not enough memory.
    pub fn of_sequences(
        engine: &E,
        config: &BertConfig,
        (tokens, types): (&[u32], &[u32]),
        shape: BatchShape,
    ) -> Result<Self> {
        check_sequences(config, (tokens, types), shape)?;
        let [rows, back, targets] = [&[0]; 3].map(|ids| uploaded(engine, ids));
        Ok(BertBatch {
            tokens: uploaded(engine, tokens)?,
            types: uploaded(engine, types)?,
            rows: rows?,
            back: back?,
            targets: targets?,
        })
    }

    /// Number of targets.
    pub fn targets(&self) -> usize {
        self.targets.len()
    }
}

fn uploaded<E: Engine>(engine: &E, ids: &[u32]) -> Result<E::Buffer> {
    let mut buffer = engine.zeros(Kind::Index, ids.len().max(1))?;
    if !ids.is_empty() {
        engine.write_ids(&mut buffer, ids)?;
    }
    Ok(buffer)
}

/// The indices of a [`BertBatch`], in its order.
fn lists(config: &BertConfig, samples: BertSamples<'_>) -> Result<[Vec<u32>; 5]> {
    let (shape, BertSamples { sequences, tokens, types, places, targets }) = (samples.shape(), samples);
    check_sequences(config, (tokens, types), shape)?;
    let length = shape.positions;
    let (bound, wanted) = match config.task {
        EncoderTask::MaskedTokens => (config.encoder.vocabulary(), places.len()),
        EncoderTask::Answers => (length, 2 * sequences),
    };
    if targets.len() != wanted || targets.is_empty() || !targets.len().is_multiple_of(sequences) {
        return Err(Error::length("targets", wanted, targets.len()));
    }
    expect_below("targets", targets, bound)?;
    let (rows, back) = match config.task {
        EncoderTask::MaskedTokens => {
            expect_below("places of masked tokens", places, length)?;
            let each = places.len() / sequences;
            let row = |(index, place): (usize, &u32)| (index / each * length) as u32 + place;
            (places.iter().enumerate().map(row).collect(), vec![])
        }
        EncoderTask::Answers => {
            let n = length as u32;
            let begin = |index: u32| (index / (2 * n), index / n % 2, index % n);
            let forth = |index: u32| {
                let (sequence, end, position) = begin(index);
                2 * (sequence * n + position) + end
            };
            let rows: Vec<u32> = (0..2 * tokens.len() as u32).map(forth).collect();
            let mut back = vec![0u32; rows.len()];
            rows.iter().enumerate().for_each(|(index, row)| back[*row as usize] = index as u32);
            (rows, back)
        }
    };
    Ok([tokens.to_vec(), types.to_vec(), rows, back, targets.to_vec()])
}

fn check_sequences(config: &BertConfig, (tokens, types): (&[u32], &[u32]), shape: BatchShape) -> Result<()> {
    for (what, ids) in [("tokens", tokens), ("token types", types)] {
        if ids.len() != shape.tokens() || ids.is_empty() {
            return Err(Error::length(what, shape.tokens().max(1), ids.len()));
        }
    }
    expect_below("inputs", tokens, config.encoder.vocabulary())?;
    expect_below("token types", types, config.encoder.token_types())
}

/// Samples, unpacked from the inputs of a batch.
pub(super) struct Unpacked {
    tokens: Vec<u32>,
    types: Vec<u32>,
    places: Vec<u32>,
}

impl Unpacked {
    /// What is packed for a task: tokens of each sample, then their types or the places of masked ones.
    pub(super) fn of(task: EncoderTask, inputs: &[u32], BatchShape { batch, positions }: BatchShape) -> Result<Self> {
        let each = inputs.len() / batch.max(1);
        if batch == 0 || inputs.len() != batch * each || each <= positions {
            let (what, expected) = ("inputs of an encoder's samples", batch * (positions + 1));
            return Err(Error::length(what, expected, inputs.len()));
        }
        let (mut tokens, mut rest) = (vec![], vec![]);
        for sample in inputs.chunks_exact(each) {
            let (own, more) = sample.split_at(positions);
            tokens.extend_from_slice(own);
            rest.extend_from_slice(more);
        }
        Ok(match task {
            EncoderTask::Answers => Unpacked { tokens, types: rest, places: vec![] },
            EncoderTask::MaskedTokens => Unpacked { types: vec![0; tokens.len()], tokens, places: rest },
        })
    }

    pub(super) fn samples<'a>(&'a self, targets: &'a [u32], shape: BatchShape) -> BertSamples<'a> {
        let Unpacked { tokens, types, places } = self;
        BertSamples { sequences: shape.batch, tokens, types, places, targets }
    }
}
