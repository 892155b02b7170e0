//! Text with masked tokens.

use super::corpus::Corpus;
use crate::{
    Error, Result,
    model::BertConfig,
    random::Stream,
    text::{SpecialTokens, Tokenizer},
};

/// A text whose samples are stretches, framed as the model reads texts, of which 15 % of the tokens are to be predicted
/// (Devlin et al., "BERT", 2019): 80 % of those are replaced by the token for what is masked, 10 % by a random one, and
/// 10 % stay. What is chosen depends on the seed and the sample's number alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskedText {
    text: Corpus,
    special: SpecialTokens,
    vocabulary: u32,
}

/// A stretch with masked tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskedSample {
    /// The tokens, framed.
    pub tokens: Vec<u32>,
    /// Positions of the tokens to predict, ascending.
    pub places: Vec<u32>,
    /// The tokens to predict, in the order of `places`.
    pub targets: Vec<u32>,
}

impl MaskedText {
    /// The tokens of a text, as its tokenizer encodes it whole; `validation_share` of them, at the end, is for
    /// validation.
    ///
    /// # Errors
    /// Those of [`Tokenizer::special`], [`Corpus::of_tokens`] and [`MaskedText::new`].
    pub fn of_tokens(tokens: &[u32], tokenizer: &Tokenizer, validation_share: f64, vocabulary: usize) -> Result<Self> {
        let special = tokenizer.special()?;
        let corpus = Corpus::of_tokens(special.inner(tokens).to_vec(), validation_share)?;
        Self::new(corpus, special, vocabulary)
    }

    /// A text with the tokens of a model of that vocabulary.
    ///
    /// # Errors
    /// Tokens outside the vocabulary.
    pub fn new(text: Corpus, special: SpecialTokens, vocabulary: usize) -> Result<Self> {
        let all = text.training().iter().chain(text.validation()).chain(special.framing.iter().flatten());
        let outside = |(_, token): &(usize, u32)| *token as usize >= vocabulary;
        let found = all.copied().chain([special.mask]).enumerate().find(outside);
        match found {
            None => Ok(MaskedText { text, special, vocabulary: vocabulary as u32 }),
            Some((position, token)) => Err(Error::token("the text", token, position, vocabulary)),
        }
    }

    /// Checks that both parts of the text can hold a sample.
    ///
    /// # Errors
    /// Sequences in which no text fits, and those of [`Corpus::expect_sequences_of`].
    pub fn expect_sequences_of(&self, positions: usize) -> Result<()> {
        let frame = self.special.framing.iter().map(Vec::len).sum::<usize>();
        match positions.checked_sub(frame).filter(|inner| *inner > positions / 2) {
            Some(inner) => self.text.expect_sequences_of(inner),
            None => {
                let (what, found) = ("tokens of a sequence", positions.to_string());
                Err(Error::Setting { what, found, expected: "more than twice those that frame a text" })
            }
        }
    }

    /// The text.
    pub fn text(&self) -> &Corpus {
        &self.text
    }

    /// A number that tells this text from others.
    pub fn fingerprint(&self) -> u64 {
        self.text.fingerprint()
    }

    /// A sample of the training part at a random place.
    pub fn training_sample(&self, positions: usize, seed: u64, number: u64) -> MaskedSample {
        let inner = self.inner(positions);
        let places = (self.text.training().len() - inner) as u64;
        let start = Stream::new(seed, "batches").below(number, places) as usize;
        self.masked(&self.text.training()[start..start + inner], positions, seed, number)
    }

    /// At most `limit` samples that cover the validation part evenly, the same at every call.
    pub fn validation_samples(&self, positions: usize, limit: usize) -> Vec<MaskedSample> {
        let inner = self.inner(positions);
        let text = self.text.validation();
        let last = text.len() - inner;
        let count = limit.clamp(1, self.text.validation_sequences(inner).max(1));
        let sample = |index: usize| {
            let start = index * last / (count - 1).max(1);
            self.masked(&text[start..start + inner], positions, 0, index as u64)
        };
        (0..count).map(sample).collect()
    }

    fn inner(&self, positions: usize) -> usize {
        positions - self.special.framing.iter().map(Vec::len).sum::<usize>()
    }

    /// Frames a stretch and masks some of it.
    fn masked(&self, stretch: &[u32], positions: usize, seed: u64, number: u64) -> MaskedSample {
        let [before, after] = &self.special.framing;
        let mut tokens = [before, stretch, after].concat();
        let count = ((positions as f64 * BertConfig::MASKED_SHARE).round() as usize).clamp(1, stretch.len());
        // The first places of a random permutation (Fisher and Yates).
        let stream = Stream::new(seed ^ Stream::new(number, "masked").bits(0), "masked");
        let mut order: Vec<u32> = (0..stretch.len() as u32).collect();
        for at in 0..count {
            let other = at + stream.below(at as u64, (order.len() - at) as u64) as usize;
            order.swap(at, other);
        }
        let mut places: Vec<u32> = order[..count].iter().map(|place| place + before.len() as u32).collect();
        places.sort_unstable();
        let targets = places.iter().map(|place| tokens[*place as usize]).collect();
        let choices = Stream::new(seed ^ Stream::new(number, "replaced").bits(0), "replaced");
        for (index, place) in places.iter().enumerate() {
            let index = 2 * index as u64;
            match choices.uniform(index) {
                share if share < 0.8 => tokens[*place as usize] = self.special.mask,
                share if share < 0.9 => {
                    tokens[*place as usize] = choices.below(index + 1, self.vocabulary.into()) as u32;
                }
                _ => {}
            }
        }
        MaskedSample { tokens, places, targets }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text() -> MaskedText {
        let corpus = Corpus::of_tokens((0..5000).map(|i| 10 + i % 80).collect(), 0.1).unwrap();
        MaskedText::new(corpus, SpecialTokens { framing: [vec![1], vec![2]], mask: 3 }, 90).unwrap()
    }

    #[test]
    fn fifteen_percent_are_masked_by_the_rule_and_repeat() {
        let (text, mut counts) = (text(), [0usize; 3]);
        for number in 0..400 {
            let sample = text.training_sample(64, 5, number);
            assert_eq!(sample, text.training_sample(64, 5, number));
            assert_eq!((sample.tokens.len(), sample.places.len(), sample.targets.len()), (64, 10, 10));
            assert!((sample.tokens[0], sample.tokens[63]) == (1, 2) && sample.places.is_sorted_by(|a, b| a < b));
            assert!(sample.places.iter().all(|place| (1..63).contains(place)));
            for (place, target) in sample.places.iter().zip(&sample.targets) {
                let token = sample.tokens[*place as usize];
                counts[if token == 3 { 0 } else { 1 + usize::from(token == *target) }] += 1;
            }
            // All other tokens follow each other as the text has them.
            let others =
                (1..62usize).filter(|at| ![*at, at + 1].iter().any(|at| sample.places.contains(&(*at as u32))));
            assert!(others.into_iter().all(|at| (sample.tokens[at] - 10 + 1) % 80 == sample.tokens[at + 1] - 10));
        }
        // Of 4000: 3200, 400 of which one in 90 is the token itself, 400.
        assert!((3100..3300).contains(&counts[0]) && counts[1..].iter().all(|n| (330..470).contains(n)), "{counts:?}");
        assert_ne!(text.training_sample(64, 5, 0), text.training_sample(64, 6, 0));
    }

    #[test]
    fn validation_repeats_and_too_short_sequences_are_refused() {
        let text = text();
        let all = text.validation_samples(32, 100);
        assert!(all == text.validation_samples(32, 100) && all.len() > 10 && all.iter().all(|s| s.tokens.len() == 32));
        assert_eq!(text.validation_samples(32, 3).len(), 3);
        text.expect_sequences_of(32).unwrap();
        assert!(text.expect_sequences_of(4).is_err() && text.expect_sequences_of(600).is_err());
        let corpus = Corpus::of_tokens(vec![90; 100], 0.1).unwrap();
        assert!(MaskedText::new(corpus, SpecialTokens { framing: [vec![], vec![]], mask: 3 }, 90).is_err());
    }
}
