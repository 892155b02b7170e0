//! 2:4 sparse layers, training and a small GPT for candle.

mod error;
pub mod linear;
pub mod optim;

pub use error::{Error, Result, Unmatched};
