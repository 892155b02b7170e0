//! 2:4 linear layers for [burn](https://docs.rs/burn), computed by twofour's CPU kernels.
//!
//! [`SparseLinear`] is a burn `Module` that holds its weight packed. [`AnyLinear`] stands in a model where a layer is
//! dense first and 2:4 later.

mod any;
mod error;
mod linear;
mod weight;

pub use any::AnyLinear;
pub use error::{Error, Result};
pub use linear::SparseLinear;
pub use weight::Float;

/// The code of the page compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/how-to/rust.md")]
struct Page;
