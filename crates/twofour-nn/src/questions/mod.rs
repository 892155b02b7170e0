//! Extractive question answering: questions whose answers are stretches of a text.
//!
//! | item | |
//! |---|---|
//! | [`QuestionFile`] | questions, texts and answers in SQuAD's JSON format |
//! | [`Windows`] | a question and as much of its text as a model reads at once |
//! | [`AnswerFinder`] | an encoder with its head, on the CPU |
//! | [`score`] | exact match and F1, as SQuAD's evaluation has them |

mod answer;
mod error;
mod file;
pub mod score;
#[cfg(test)]
pub(crate) mod tests;
mod windows;

pub use answer::AnswerFinder;
pub use error::QuestionsError;
pub use file::{Answer, Question, QuestionFile};
pub use windows::{Window, WindowSettings, Windows};
