#![doc = include_str!("../README.md")]

#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod float;
pub mod linear;
pub mod ops;
pub mod optim;
mod tape;

pub use error::{Error, Result, Unmatched};
pub use linear::{
    AnyLinear, CompressedLinear, HasLinears, SparseActivationLinear, SparseActivationSettings, SparseLinear,
    SparseSettings, SparsifyConfig, compress_linears, sparsify, swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
};
pub use ops::{activate, cross_entropy, layer_norm, rms_norm, rope, softmax};
pub use optim::{AdamW, AdamWConfig};
