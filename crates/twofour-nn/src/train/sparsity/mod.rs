//! Which layers are 2:4, when, and how they are trained: a recipe's sparsity with the defaults of its method applied.

mod form;
mod names;
mod plan;
mod resolve;
#[cfg(test)]
mod tests;

pub use plan::{Decay, SparseBegin, SparsityPlan};

use crate::Error;

fn conflict(first: &str, second: &str, reason: &'static str) -> Error {
    Error::Conflict { first: first.to_owned(), second: second.to_owned(), reason }
}
