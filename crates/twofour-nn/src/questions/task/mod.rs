//! Tasks of a decoder, by the likelihood of the answers, as EleutherAI's lm-evaluation-harness scores them.

mod file;
mod prompt;
mod score;
#[cfg(test)]
mod tests;

pub use file::{Expected, TaskFile, TaskItem};
pub use prompt::TaskPrompt;
pub use score::TaskScore;
