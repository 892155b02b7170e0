//! Questions for models: of a decoder it is asked how likely it finds the answers, of an encoder where in a text they
//! are.
//!
//! | item | |
//! |---|---|
//! | [`TaskFile`] | a decoder's questions, a JSON object a line: choices, or a text to continue |
//! | [`TaskPrompt`], [`TaskScore`] | how they are asked, and the share of right answers |
//! | [`QuestionFile`] | questions, texts and answers in SQuAD's JSON format |
//! | [`Windows`] | a question and as much of its text as a model reads at once |
//! | [`AnswerFinder`] | an encoder with its head, on the CPU or a GPU |
//! | [`score`] | exact match and F1, as SQuAD's evaluation has them |

mod answer;
mod error;
mod file;
pub mod score;
mod task;
#[cfg(test)]
pub(crate) mod tests;
mod windows;

pub use answer::AnswerFinder;
pub use error::QuestionsError;
pub use file::{Answer, Question, QuestionFile};
pub use task::{Expected, TaskFile, TaskItem, TaskPrompt, TaskScore};
pub use windows::{Window, WindowSettings, Windows};
