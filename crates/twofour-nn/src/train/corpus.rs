//! The text that a model is trained on.

use super::{Batch, TrainingData};
use crate::{Error, Result, block::BatchShape, engine::Engine, model::Gpt, random::Stream};

/// A text as tokens, cut into a training part and, at its end, a validation part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Corpus {
    training: Vec<u32>,
    validation: Vec<u32>,
}

impl Corpus {
    /// A text whose bytes are its tokens. The last `validation_share` of it (rounded down) is for validation.
    ///
    /// # Errors
    /// [`Error::Setting`] for a share outside 0 to 0.5.
    pub fn new(text: Vec<u8>, validation_share: f64) -> Result<Self> {
        Self::of_tokens(text.into_iter().map(u32::from).collect(), validation_share)
    }

    /// A text of tokens. The last `validation_share` of it (rounded down) is for validation.
    ///
    /// # Errors
    /// [`Error::Setting`] for a share outside 0 to 0.5.
    pub fn of_tokens(mut text: Vec<u32>, validation_share: f64) -> Result<Self> {
        if !(0.0..=0.5).contains(&validation_share) {
            let found = validation_share.to_string();
            return Err(Error::Setting { what: "share of the text for validation", found, expected: "from 0 to 0.5" });
        }
        let validation = text.split_off(text.len() - (text.len() as f64 * validation_share) as usize);
        Ok(Corpus { training: text, validation })
    }

    /// The training part.
    pub fn training(&self) -> &[u32] {
        &self.training
    }

    /// The validation part.
    pub fn validation(&self) -> &[u32] {
        &self.validation
    }

    /// The most sequences of `context` tokens, none overlapping another, that the validation part gives.
    ///
    /// ```
    /// let corpus = twofour_nn::train::Corpus::new(vec![b'a'; 100], 0.5)?;
    /// assert_eq!(corpus.validation_sequences(16), 3);
    /// # Ok::<(), twofour_nn::Error>(())
    /// ```
    pub fn validation_sequences(&self, context: usize) -> usize {
        self.validation.len().saturating_sub(1) / context.max(1)
    }

    /// Checks that both parts can hold a sequence.
    ///
    /// # Errors
    /// [`Error::Setting`] with the part that cannot.
    pub fn expect_sequences_of(&self, context: usize) -> Result<()> {
        for (what, part) in
            [("tokens of training text", &self.training), ("tokens of validation text", &self.validation)]
        {
            if part.len() <= context {
                let found = format!("{} for a context of {context}", part.len());
                return Err(Error::Setting { what, found, expected: "longer than the context; give more text" });
            }
        }
        Ok(())
    }

    /// A number that tells this text from others (FNV-1a over both parts and their lengths).
    pub fn fingerprint(&self) -> u64 {
        let lengths = [self.training.len(), self.validation.len()].map(|n| (n as u64).to_le_bytes());
        let lengths = lengths.as_flattened().iter().map(|&byte| u32::from(byte));
        let all = lengths.chain(self.training.iter().copied()).chain(self.validation.iter().copied());
        all.fold(0xCBF2_9CE4_8422_2325, |hash: u64, b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01B3))
    }
}

/// A sample is a stretch of the text, at a random place in the training part; its targets are the stretch that begins
/// one token later.
impl TrainingData for Corpus {
    type Model<E: Engine> = Gpt<E>;

    fn prepare<E: Engine>(&self, _: &E, model: &mut Gpt<E>) -> Result<()> {
        self.expect_sequences_of(model.config().context())
    }

    fn batch(&self, BatchShape { batch, positions }: BatchShape, seed: u64, step: u64) -> Batch {
        let stream = Stream::new(seed, "batches");
        let places = (self.training.len() - positions) as u64;
        let start = |sequence: usize| stream.below(step.wrapping_mul(batch as u64) + sequence as u64, places) as usize;
        stretches(&self.training, (0..batch).map(start), positions)
    }

    fn validation_batches(
        &self,
        BatchShape { batch, positions }: BatchShape,
        limit: usize,
    ) -> impl Iterator<Item = Batch> {
        // The last start, from which a stretch and the token after it just fit.
        let last = self.validation.len() - 1 - positions;
        let count = limit.clamp(1, self.validation_sequences(positions).max(1));
        // At least a context apart, so that no token is predicted twice.
        let starts: Vec<usize> = (0..count).map(|i| i * last / (count - 1).max(1)).collect();
        let batches: Vec<Vec<usize>> = starts.chunks(batch).map(<[usize]>::to_vec).collect();
        batches.into_iter().map(move |starts| stretches(&self.validation, starts.into_iter(), positions))
    }

    fn fingerprint(&self) -> u64 {
        Corpus::fingerprint(self)
    }
}

/// The stretches of `context` tokens that begin at `starts`, and those that begin one later.
fn stretches(text: &[u32], starts: impl Iterator<Item = usize>, context: usize) -> Batch {
    let (mut samples, mut inputs, mut targets) = (0, vec![], vec![]);
    for start in starts {
        samples += 1;
        let stretch = &text[start..=start + context];
        inputs.extend_from_slice(&stretch[..context]);
        targets.extend_from_slice(&stretch[1..]);
    }
    Batch { samples, inputs, targets }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: BatchShape = BatchShape { batch: 3, positions: 16 };

    fn corpus(len: usize) -> Corpus {
        Corpus::new((0..len).map(|i| (i % 251) as u8).collect(), 0.1).unwrap()
    }

    #[test]
    fn targets_are_the_inputs_one_later_and_batches_follow_seed_and_step() {
        let corpus = corpus(5000);
        assert_eq!((corpus.training().len(), corpus.validation().len()), (4500, 500));
        let batch = corpus.batch(SHAPE, 1, 7);
        assert_eq!((batch.inputs.len(), batch.targets.len()), (48, 48));
        for (inputs, targets) in batch.inputs.chunks(16).zip(batch.targets.chunks(16)) {
            assert_eq!(inputs[1..], targets[..15]);
        }
        assert_eq!(corpus.batch(SHAPE, 1, 7), batch);
        assert_ne!(corpus.batch(SHAPE, 1, 8), batch);
        assert_ne!(corpus.batch(SHAPE, 2, 7), batch);
    }

    #[test]
    fn validation_stays_inside_its_part_and_repeats() {
        for (len, context, limit, expected) in
            [(5000, 16, 5, 5), (5000, 16, 1000, 31), (400, 39, 9, 1), (400, 20, 1, 1)]
        {
            let corpus = corpus(len);
            let all =
                || corpus.validation_batches(BatchShape { batch: 4, positions: context }, limit).collect::<Vec<_>>();
            let found: usize = all().iter().map(|batch| batch.inputs.len()).sum();
            assert_eq!(found, expected * context, "{len} {context} {limit}");
            assert_eq!(all(), all());
        }
    }

    #[test]
    fn too_little_text_is_an_error() {
        assert!(corpus(100).expect_sequences_of(10).is_err(), "ten bytes of validation for a context of ten");
        corpus(110).expect_sequences_of(10).unwrap();
        assert!(Corpus::new(vec![], 0.1).unwrap().expect_sequences_of(1).is_err());
        assert!(Corpus::new(vec![], 0.9).is_err());
    }
}
