//! Questions and texts as an encoder reads them.

use std::ops::Range;

use super::{Question, QuestionFile, QuestionsError};
use crate::{Error, Result, model::Tokenizer};

/// How texts are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowSettings {
    /// Tokens of a window: the question, the text, and what frames them.
    pub length: usize,
    /// The most tokens of a question; the rest of a longer one is left out.
    pub question: usize,
}

/// A question with a part of its text: `[CLS] question [SEP] text [SEP]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Window {
    /// The index of the question.
    pub question: usize,
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The type of each token: 0 up to the question's end, then 1.
    pub types: Vec<u32>,
    /// The tokens that are of the question's own text.
    pub text: Range<usize>,
    /// The bytes of the text that each of those stands for.
    pub bytes: Vec<Range<usize>>,
    /// The first and the last token of the question's first answer; 0 and 0 where the window does not hold all of it.
    pub target: [u32; 2],
}

/// The tokens of all texts and questions of a file.
#[derive(Debug)]
pub struct Windows {
    settings: WindowSettings,
    before: Vec<u32>,
    after: Vec<u32>,
    contexts: Vec<(Vec<u32>, Vec<Range<usize>>)>,
    questions: Vec<Vec<u32>>,
}

impl WindowSettings {
    /// Windows of that many tokens, of which at most a third, and at most 64, are of the question (64 is BERT's bound
    /// for SQuAD).
    pub fn of_length(length: usize) -> Self {
        WindowSettings { length, question: (length / 3).min(64) }
    }
}

impl Windows {
    /// Encodes a file's texts and questions.
    ///
    /// # Errors
    /// A tokenizer without a token before and a token after each text; windows too short for a question and some text.
    pub fn new(file: &QuestionFile, tokenizer: &Tokenizer, settings: WindowSettings) -> Result<Self> {
        let [before, after] = tokenizer.framing()?;
        let fault = |reason: String| QuestionsError::Tokenizer { reason };
        if before.is_empty() || after.is_empty() {
            return Err(fault("it adds no token before and after a text".to_owned()).into());
        }
        let framing = before.len() + 2 * after.len();
        if settings.question == 0 || settings.length < framing + settings.question + 4 {
            let WindowSettings { length, question } = settings;
            let found = format!("{length}, of which {question} for a question");
            let expected = "long enough for a question, the tokens between, and four tokens of text";
            return Err(Error::Setting { what: "window", found, expected });
        }
        let contexts = file.contexts.iter().map(|context| tokenizer.encode_with_places(context));
        let question = |question: &Question| {
            let (mut tokens, _) = tokenizer.encode_with_places(&question.text)?;
            tokens.truncate(settings.question);
            Ok(tokens)
        };
        let questions = file.questions.iter().map(question).collect::<Result<_>>()?;
        Ok(Windows { settings, before, after, contexts: contexts.collect::<Result<_>>()?, questions })
    }

    /// The windows of one question, whose texts overlap by half. The last one ends with the text.
    pub fn of(&self, file: &QuestionFile, question: usize) -> Vec<Window> {
        let context = file.questions[question].context;
        let (room, count) = (self.room(question), self.contexts[context].0.len());
        let last = count.saturating_sub(room);
        let step = room.div_ceil(2);
        let starts = (0..last).step_by(step).chain([last]);
        starts.map(|start| self.window(file, question, start..count.min(start + room), &[])).collect()
    }

    /// [`Windows::of`], each of the full length: a text that ends before is followed by the texts after it in the file,
    /// and by itself at the end.
    pub fn full(&self, file: &QuestionFile, question: usize) -> Vec<Window> {
        let mut windows = self.of(file, question);
        for window in &mut windows {
            let missing = self.settings.length - window.tokens.len();
            if missing == 0 {
                continue;
            }
            let context = file.questions[question].context;
            let next = self.contexts.iter().cycle().skip(context + 1).take(self.contexts.len());
            let more: Vec<u32> = next.flat_map(|(tokens, _)| tokens).copied().cycle().take(missing).collect();
            let start = self.contexts[context].0.len() - window.bytes.len();
            *window = self.window(file, question, start..start + window.bytes.len(), &more);
        }
        windows.retain(|window| window.tokens.len() == self.settings.length);
        windows
    }

    /// Tokens of text that fit beside a question.
    fn room(&self, question: usize) -> usize {
        self.settings.length - self.before.len() - 2 * self.after.len() - self.questions[question].len()
    }

    fn window(&self, file: &QuestionFile, question: usize, part: Range<usize>, more: &[u32]) -> Window {
        let (asked, own) = (&self.questions[question], &file.questions[question]);
        let (context, places) = &self.contexts[own.context];
        let head = [self.before.as_slice(), asked, &self.after].concat();
        let first = head.len();
        let tokens = [head.as_slice(), &context[part.clone()], more, &self.after].concat();
        let types = (0..tokens.len()).map(|at| u32::from(at >= first)).collect();
        let bytes = places[part].to_vec();
        let target =
            own.answers.first().and_then(|answer| ends(&bytes, answer.begin..answer.begin + answer.text.len()));
        let target = target.map_or([0, 0], |ends| ends.map(|at| (first + at) as u32));
        Window { question, tokens, types, text: first..first + bytes.len(), bytes, target }
    }
}

/// The first and the last token that have some of an answer's bytes, where all of these are in tokens.
fn ends(bytes: &[Range<usize>], answer: Range<usize>) -> Option<[usize; 2]> {
    let first = bytes.iter().position(|token| token.end > answer.start)?;
    let last = bytes.iter().rposition(|token| token.start < answer.end)?;
    // A text that begins after the answer, or ends before it.
    let holds = bytes[first].start <= answer.start && bytes[last].end >= answer.end && first <= last;
    holds.then_some([first, last])
}
