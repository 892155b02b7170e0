//! Text on disk, its tokenizer, and its tokens part by part.
//!
//! | item | |
//! |---|---|
//! | [`TextFile`] | a text file whose parts are read when they are needed |
//! | [`Tokenizer`] | from text to tokens and back |
//! | [`Encoding`] | the tokens of a text, in memory that does not grow with it |
//! | [`ChatTemplate`] | a model's conversations as text |

mod chat;
mod encoding;
mod error;
mod file;
mod special;
mod tokenizer;

pub use self::{
    chat::{ChatTemplate, Message},
    encoding::Encoding,
    error::TextError,
    file::TextFile,
    special::SpecialTokens,
    tokenizer::{FileTokenizer, TextDecoder, Tokenizer, VOCABULARY, is_guarded},
};
