//! What is wrong with a file of questions.

use std::path::PathBuf;

/// A file of questions that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QuestionsError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: std::io::Error,
    },

    /// The file is not in SQuAD's format.
    #[error("{}: {reason}; expected JSON in SQuAD's format: `data`, of `paragraphs`, of a `context` and \
             `qas`", path.display())]
    NotQuestions {
        /// The file.
        path: PathBuf,
        /// What is wrong, with its line.
        reason: String,
    },

    /// A line of a task that is no item of it.
    #[error("{}: line {line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What is wrong, and what is expected.
        reason: String,
    },

    /// A question without an answer, or with one that is not where it is said to be.
    #[error("{}: question `{id}`: {reason}", path.display())]
    Answer {
        /// The file.
        path: PathBuf,
        /// The question.
        id: String,
        /// What is wrong.
        reason: String,
    },

    /// A tokenizer without places in the text, without a mask token, or that frames texts as no encoder does.
    #[error("the model's tokenizer is no encoder's: {reason}")]
    Tokenizer {
        /// What is wrong.
        reason: String,
    },

    /// A model without a head for answers.
    #[error("{}: the model has no head for answers, `qa_outputs.weight` of [2, width] with its bias; fine-tune it on \
             questions first", path.display())]
    NoHead {
        /// The model's directory.
        path: PathBuf,
    },
}
