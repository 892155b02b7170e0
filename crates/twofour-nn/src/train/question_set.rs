//! Questions to train on.

use crate::{
    Error, Result,
    model::Tokenizer,
    questions::{QuestionFile, Window, WindowSettings, Windows},
};

/// Windows of questions and texts, all of one length, in a training and a validation part. A text that is longer than a
/// window is in several, which overlap by half; a window without the whole answer has its first token as its target.
///
/// There is no padding: a window whose text is shorter is filled with the texts that follow in the file, which is more
/// to search for the answer in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuestionSet {
    training: Vec<Window>,
    validation: Vec<Window>,
    length: usize,
    bytes: usize,
}

impl QuestionSet {
    /// The windows, of that many tokens, of a file. The last `validation_share` of the texts with questions (rounded
    /// up) is for validation.
    ///
    /// # Errors
    /// A share outside 0 to 0.5, a file with fewer than two texts with questions; those of [`Windows::new`].
    pub fn new(file: &QuestionFile, tokenizer: &Tokenizer, length: usize, validation_share: f64) -> Result<Self> {
        if !(0.0..=0.5).contains(&validation_share) {
            let found = validation_share.to_string();
            let what = "share of the questions for validation";
            return Err(Error::Setting { what, found, expected: "from 0 to 0.5" });
        }
        let windows = Windows::new(file, tokenizer, WindowSettings::of_length(length))?;
        let mut contexts: Vec<usize> = file.questions.iter().map(|question| question.context).collect();
        contexts.dedup();
        let held = (contexts.len() as f64 * validation_share).ceil() as usize;
        let first = contexts.len().checked_sub(held).and_then(|first| contexts.get(first)).copied();
        let first = first.unwrap_or(usize::MAX);
        let bytes =
            file.contexts.iter().chain(file.questions.iter().map(|question| &question.text)).map(String::len).sum();
        let (mut training, mut validation) = (vec![], vec![]);
        for (index, question) in file.questions.iter().enumerate() {
            let part = if question.context < first { &mut training } else { &mut validation };
            part.extend(windows.full(file, index));
        }
        if training.is_empty() || validation.is_empty() {
            let found = format!("{} for training, {} for validation", training.len(), validation.len());
            let what = "windows of questions";
            return Err(Error::Setting { what, found, expected: "some of each; give more texts with questions" });
        }
        Ok(QuestionSet { training, validation, length, bytes })
    }

    /// Tokens of each window.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Bytes of all texts and questions.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The training part.
    pub fn training(&self) -> &[Window] {
        &self.training
    }

    /// The validation part.
    pub fn validation(&self) -> &[Window] {
        &self.validation
    }

    /// A number that tells these windows from others (FNV-1a).
    pub fn fingerprint(&self) -> u64 {
        let windows = self.training.iter().chain(&self.validation);
        let numbers = windows.flat_map(|window| window.tokens.iter().chain(&window.target));
        let lengths = [self.training.len(), self.length].map(|n| n as u32);
        let all = lengths.into_iter().chain(numbers.copied());
        all.fold(0xCBF2_9CE4_8422_2325, |hash: u64, b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01B3))
    }

    /// At most `limit` windows that cover the validation part evenly, the same at every call.
    pub fn validation_samples(&self, limit: usize) -> impl Iterator<Item = &Window> {
        let count = limit.clamp(1, self.validation.len());
        (0..count).map(move |index| &self.validation[index * (self.validation.len() - 1) / (count - 1).max(1)])
    }
}
