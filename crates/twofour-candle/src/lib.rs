#![doc = include_str!("../README.md")]

pub mod block;
mod error;
pub mod linear;
pub mod ops;
pub mod optim;

pub use error::{Error, Result, Unmatched};
pub use linear::{
    AnyLinear, CompressedLinear, HasLinears, SparseLinear, SparseSettings, SparsifyConfig, compress_linears, sparsify,
    swap_linear_with_semi_sparse_linear, swap_semi_sparse_linear_with_linear,
};
pub use optim::{AdamW, AdamWConfig};
