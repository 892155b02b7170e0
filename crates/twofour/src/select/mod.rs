//! Turning scores into a mask that obeys a pattern.
//!
//! [`magnitude`] prunes along one axis; [`Sparsity`] names every pattern, whose masks [`crate::criterion::mask`]
//! chooses by any criterion. [`tile`] holds the transposable selectors, whose masks are 2:4 along rows and along
//! columns at once, so that a weight and its transpose can both be multiplied sparse. [`Selector`](crate::Selector)
//! names any of them.

pub(crate) mod band;
pub(crate) mod nm;
mod sparsity;
pub(crate) mod structured;
pub mod tile;
pub(crate) mod unstructured;
pub(crate) mod vectors;

pub use nm::{by_score, magnitude};
pub use sparsity::Sparsity;
pub use tile::{Transposable, transposable};
