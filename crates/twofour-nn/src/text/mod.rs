//! Text on disk, and its tokens part by part.
//!
//! | item | |
//! |---|---|
//! | [`TextFile`] | a text file whose parts are read when they are needed |
//! | [`Encoding`] | the tokens of a text, in memory that does not grow with it |

mod encoding;
mod error;
mod file;

pub use self::{encoding::Encoding, error::TextError, file::TextFile};
