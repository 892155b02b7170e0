//! Items of a task, a JSON object a line.

use std::path::Path;

use serde::Deserialize;

use super::super::QuestionsError;
use crate::{Result, text::TextFile};

/// The items of a task. All of them are asked in one way: choices, or a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskFile {
    /// The items, in the file's order: one or more.
    pub items: Vec<TaskItem>,
}

/// An item of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskItem {
    /// Its line in the file, from 1.
    pub line: usize,
    /// What stands before the answer.
    pub context: String,
    /// What is asked.
    pub expected: Expected,
}

/// What an item expects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expected {
    /// The most likely of several continuations is to be the right one.
    Choice {
        /// The continuations: two or more.
        choices: Vec<String>,
        /// The index of the right one.
        answer: usize,
    },
    /// Greedy decoding is to write this.
    Target(String),
}

/// A line. Fields that are not named here are ignored: data sets have names, sources and categories beside.
#[derive(Deserialize)]
struct Line {
    context: Option<String>,
    question: Option<String>,
    choices: Option<Vec<String>>,
    answer: Option<usize>,
    target: Option<String>,
}

impl TaskFile {
    /// A file is not larger.
    const LARGEST: u64 = 1 << 30;

    /// Reads a file of lines as `{"context": …, "question": …, "choices": […], "answer": INDEX}`, with a context, a
    /// question or both, the question on a line of its own after the context, or as `{"context": …, "target": …}`.
    /// Empty lines are left out. `stop` is asked as in [`TextFile::open`].
    ///
    /// ```
    /// use twofour_nn::questions::{Expected, TaskFile};
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("task.jsonl");
    /// std::fs::write(&path, r#"{"context": "Two of every", "target": "four"}"#)?;
    /// let task = TaskFile::read(&path, &|| false)?;
    /// assert_eq!(task.items[0].expected, Expected::Target("four".to_owned()));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`TextFile::text`]; [`QuestionsError::Line`] for a line that is no item, or of another kind than those
    /// before it.
    pub fn read(path: impl AsRef<Path>, stop: &dyn Fn() -> bool) -> Result<Self> {
        let path = path.as_ref();
        let text = TextFile::open(path, stop)?.text(Self::LARGEST, stop)?;
        let mut items: Vec<TaskItem> = vec![];
        for (index, text) in text.lines().enumerate().filter(|(_, text)| !text.trim().is_empty()) {
            let line = index + 1;
            let fault = |reason: String| QuestionsError::Line { path: path.to_owned(), line, reason };
            let item = item(line, text).map_err(fault)?;
            if let Some(first) = items.first()
                && matches!(first.expected, Expected::Target(_)) != matches!(item.expected, Expected::Target(_))
            {
                let first = first.line;
                let reason =
                    format!("line {first} has one of `choices` and `target`, this line the other; make two files");
                return Err(fault(reason).into());
            }
            items.push(item);
        }
        match items.is_empty() {
            false => Ok(TaskFile { items }),
            true => {
                let reason = "there are no lines with text in it".to_owned();
                Err(QuestionsError::Line { path: path.to_owned(), line: 1, reason }.into())
            }
        }
    }

    /// The first `most` items.
    #[must_use]
    pub fn first(mut self, most: usize) -> Self {
        self.items.truncate(most);
        self
    }
}

/// The item of a line, or what is wrong with it.
fn item(line: usize, text: &str) -> Result<TaskItem, String> {
    const EXPECTED: &str = "expected {\"context\": text, \"choices\": [text, text], \"answer\": index} or \
                            {\"context\": text, \"target\": text} on one line";
    let parsed: Result<Line, _> = serde_json::from_str(text);
    let Line { context, question, choices, answer, target } = parsed.map_err(|error| {
        let (found, column) = (error.to_string(), error.column());
        let found = found.split(" at line ").next().unwrap_or_default().to_owned();
        format!("{found} at column {column}; {EXPECTED}")
    })?;
    let context = match (context, question) {
        (Some(context), Some(question)) => format!("{context}\n{question}"),
        (Some(own), None) | (None, Some(own)) => own,
        (None, None) => return Err(format!("neither `context` nor `question`; {EXPECTED}")),
    };
    let expected = match (choices, answer, target) {
        (Some(choices), Some(answer), None) => choice(choices, answer)?,
        (None, None, Some(target)) => match target.trim().is_empty() {
            true => return Err("`target` is empty".to_owned()),
            false => Expected::Target(target),
        },
        (Some(_), None, None) => return Err("`answer` is missing, the index of the right choice from 0".to_owned()),
        (None, Some(_), None) => return Err("`choices` are missing, of which `answer` is one".to_owned()),
        (None, None, None) => return Err(format!("neither `choices` nor `target`; {EXPECTED}")),
        (_, _, Some(_)) => return Err("`target` beside `choices` or `answer`; an item has one of them".to_owned()),
    };
    Ok(TaskItem { line, context, expected })
}

fn choice(choices: Vec<String>, answer: usize) -> Result<Expected, String> {
    if choices.len() < 2 {
        return Err(format!("{} in `choices`, where two or more are required", choices.len()));
    }
    if let Some(index) = choices.iter().position(|choice| choice.trim().is_empty()) {
        return Err(format!("choice {index} is empty"));
    }
    if let Some(index) = (1..choices.len()).find(|index| choices[..*index].contains(&choices[*index])) {
        return Err(format!("choice {index} is the same as one before it"));
    }
    if answer >= choices.len() {
        return Err(format!("`answer` is {answer}, but the {} choices have the indices from 0", choices.len()));
    }
    Ok(Expected::Choice { choices, answer })
}
