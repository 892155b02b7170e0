//! How many items a model gets right.

use serde::Serialize;

use super::{Expected, TaskFile, TaskItem, TaskPrompt, prompt::EncodedItem};
use crate::{
    Error, Result,
    model::{Decoder, Likelihood, Sequence, Tokenizer},
};

/// The share of items that a model gets right.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TaskScore {
    /// The share of items where the choice with the highest log-likelihood is the right one, or where each token of the
    /// target is the most likely one.
    pub accuracy: f64,
    /// The standard error of `accuracy`.
    pub accuracy_stderr: f64,
    /// The share for choices, with each log-likelihood divided by the bytes of its choice; absent for targets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy_norm: Option<f64>,
    /// The standard error of `accuracy_norm`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy_norm_stderr: Option<f64>,
    /// Items.
    pub items: usize,
    /// Items whose context lost its beginning, since it is longer than the window.
    pub truncated: usize,
}

/// What the right answers of items are counted by.
#[derive(Debug, Default)]
struct Count {
    right: usize,
    by_bytes: usize,
    truncated: usize,
}

impl TaskScore {
    /// Asks a model all items of a task. `window` is the most tokens of a context with an answer: of longer contexts
    /// the beginning is left out. `progress(done, of)` is called after each item.
    ///
    /// # Errors
    /// A window beyond the model's context, an answer that does not fit it; those of the prompt and of the model.
    pub fn of(
        (model, tokenizer): (&dyn Decoder, &Tokenizer),
        task: &TaskFile,
        prompt: TaskPrompt<'_>,
        window: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let mut asked = Asked::new(model, window)?;
        let mut count = Count::default();
        for (index, item) in task.items.iter().enumerate() {
            asked.ask(item, prompt.encode(tokenizer, item)?, &mut count)?;
            progress(index + 1, task.items.len());
        }
        let has_choices = task.items.iter().any(|item| matches!(item.expected, Expected::Choice { .. }));
        let items = task.items.len();
        let (accuracy, accuracy_stderr) = share(count.right, items);
        let by_bytes = has_choices.then(|| share(count.by_bytes, items));
        Ok(TaskScore {
            accuracy,
            accuracy_stderr,
            accuracy_norm: by_bytes.map(|(share, _)| share),
            accuracy_norm_stderr: by_bytes.map(|(_, error)| error),
            items,
            truncated: count.truncated,
        })
    }
}

/// A share with its standard error: the sample's standard deviation by the root of its size.
fn share(right: usize, items: usize) -> (f64, f64) {
    let share = right as f64 / items.max(1) as f64;
    (share, (share * (1.0 - share) / items.saturating_sub(1).max(1) as f64).sqrt())
}

/// A model that is asked items.
struct Asked<'a> {
    sequence: Box<dyn Sequence + 'a>,
    /// The tokens in the sequence.
    fed: Vec<u32>,
    window: usize,
}

impl TaskPrompt<'_> {
    /// How likely a model finds each answer to an item: the choices, or the target.
    ///
    /// # Errors
    /// Those of [`TaskScore::of`].
    pub fn likelihoods(
        &self,
        (model, tokenizer): (&dyn Decoder, &Tokenizer),
        item: &TaskItem,
        window: usize,
    ) -> Result<Vec<Likelihood>> {
        let encoded = self.encode(tokenizer, item)?;
        Asked::new(model, window)?.likelihoods(item, encoded, &mut Count::default())
    }
}

impl<'a> Asked<'a> {
    fn new(model: &'a dyn Decoder, window: usize) -> Result<Self> {
        if window < 2 || window > model.config().context() {
            let found = format!("{window} for a context of {}", model.config().context());
            return Err(Error::Setting { what: "window", found, expected: "between 2 and the model's context" });
        }
        Ok(Asked { sequence: model.begin(window)?, fed: vec![], window })
    }

    fn ask(&mut self, item: &TaskItem, encoded: EncodedItem, count: &mut Count) -> Result<()> {
        let found = self.likelihoods(item, encoded, count)?;
        match &item.expected {
            Expected::Target(_) => count.right += usize::from(found.iter().all(|likelihood| likelihood.is_greedy)),
            Expected::Choice { choices, answer } => {
                let logs: Vec<f64> = found.iter().map(|likelihood| likelihood.log).collect();
                count.right += usize::from(best(&logs) == Some(*answer));
                let by_bytes: Vec<f64> = logs.iter().zip(choices).map(|(log, own)| log / own.len() as f64).collect();
                count.by_bytes += usize::from(best(&by_bytes) == Some(*answer));
            }
        }
        Ok(())
    }

    /// The likelihood of each answer after the context.
    fn likelihoods(
        &mut self,
        item: &TaskItem,
        EncodedItem { mut context, answers }: EncodedItem,
        count: &mut Count,
    ) -> Result<Vec<Likelihood>> {
        // The last token of an answer is not read.
        let longest = answers.iter().map(Vec::len).max().unwrap_or(0) - 1;
        let Some(room) = self.window.checked_sub(longest).filter(|room| *room > 0) else {
            let found = format!("{} tokens in line {}", longest + 1, item.line);
            return Err(Error::Setting { what: "an answer", found, expected: "fewer tokens than the window" });
        };
        if context.len() > room {
            context.drain(..context.len() - room);
            count.truncated += 1;
        }
        let last = context.len() - 1;
        // What the item before has in common with this one is in the sequence already.
        let common = context[..last].iter().zip(&self.fed).take_while(|(own, other)| own == other).count();
        self.sequence.truncate(common);
        self.fed.truncate(common);
        if common < last {
            self.sequence.likelihood(&context[common..last], &[])?;
            self.fed.extend_from_slice(&context[common..last]);
        }
        let of_answer = |answer: &Vec<u32>| {
            let tokens = [&context[last..], &answer[..answer.len() - 1]].concat();
            let found = self.sequence.likelihood(&tokens, answer);
            self.sequence.truncate(last);
            found
        };
        answers.iter().map(of_answer).collect()
    }
}

/// The index of the largest value, the first of equal ones.
fn best(values: &[f64]) -> Option<usize> {
    let largest = values.iter().copied().reduce(f64::max)?;
    values.iter().position(|value| *value == largest)
}
