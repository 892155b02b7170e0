//! Turning scores into a mask that obeys a pattern.
//!
//! [`magnitude`] prunes along one axis. [`tile`] holds the transposable selectors, whose masks are 2:4 along rows and
//! along columns at once, so that a weight and its transpose can both be multiplied sparse.

pub(crate) mod band;
pub(crate) mod nm;
pub mod tile;

pub use nm::{by_score, magnitude};
pub use tile::{Transposable, transposable};
