//! Text that cannot be read.

use std::path::PathBuf;

/// Text that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The file system refuses.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: std::io::Error,
    },
    /// Something else than a file of text.
    #[error("{}: {reason}", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// What it is, and what to do.
        reason: String,
    },
    /// Not enough memory for the text.
    #[error("{}: {bytes} bytes of memory cannot be allocated for the text; give a part of it", path.display())]
    Memory {
        /// The file.
        path: PathBuf,
        /// Bytes that were asked for.
        bytes: u64,
    },
    /// A tokenizer that cannot be read, or text that it cannot encode.
    #[error("{}: {reason}", path.display())]
    Tokenizer {
        /// The tokenizer's file.
        path: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// A chat template that cannot be read, fails, or refuses a conversation.
    #[error("{}: the chat template: {reason}", path.display())]
    Template {
        /// The template's file.
        path: PathBuf,
        /// What went wrong.
        reason: String,
    },
    /// A model without a chat template.
    #[error(
        "{}: no chat template, in `chat_template` or beside it in chat_template.jinja; give the model plain text, or \
         put its publisher's template there",
        path.display()
    )]
    NoTemplate {
        /// Where the template would be.
        path: PathBuf,
    },
    /// A tokenizer without a mask token.
    #[error("the model's tokenizer is no encoder's: {reason}")]
    NotAnEncoders {
        /// What is wrong.
        reason: String,
    },
}

impl TextError {
    /// What is wrong, without the path.
    pub fn reason(&self) -> String {
        let text = self.to_string();
        let (TextError::Io { path, .. }
        | TextError::NotText { path, .. }
        | TextError::Memory { path, .. }
        | TextError::Tokenizer { path, .. }) = self
        else {
            return text;
        };
        text.strip_prefix(&format!("{}: ", path.display())).map(str::to_owned).unwrap_or(text)
    }
}
