//! 2:4 sparse layers, training and a small GPT for candle.

pub mod block;
mod error;
pub mod gpt;
pub mod linear;
pub mod ops;
pub mod optim;
mod random;
pub mod train;

pub use error::{Error, Result, Unmatched};
