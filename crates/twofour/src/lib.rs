//! 2:4 semi-structured sparsity: patterns, masks, compressed weights, their files, and the CPU kernels that run them.
//!
//! The crate reads in the order in which a weight travels through it:
//!
//! | step | module |
//! |---|---|
//! | a dense weight and its elements | [`matrix`], [`element`] |
//! | the rule and the mask that obeys it | [`pattern`], [`mask`] |
//! | choosing the mask | [`select`] |
//! | what each element is worth | [`criterion`] |
//! | statistics of a layer's inputs | [`calibration`] |
//! | masks over the life of a training run | [`sparsify`] |
//! | pruning that adjusts the kept weights | [`solve`] |
//! | stand-ins for a tensor inside training | [`estimate`] |
//! | is a tensor already 2:4? | [`verify`] |
//! | the canonical compressed form | [`compressed`] |
//! | sparse weights of other patterns: coordinates, compressed rows and columns, blocks | [`store`] |
//! | the same in four or eight bits, with scales | [`int4`], [`int8`], [`quantization`] |
//! | what GPUs want instead | [`layout`] |
//! | what each tensor of a model is for | [`role`] |
//! | on disk | [`mod@file`] |
//! | multiplying with it | [`kernel`] |
//! | a layer that trains or runs with it | [`layer`] |
//! | an optimizer that switches from dense to 2:4 | [`adamw_step`] |
//! | what a measured speedup says | [`speedup`] |
//! | memory that the system refuses | [`memory`] |
//!
//! It needs no machine-learning framework and no GPU.

pub mod adamw_step;
pub mod calibration;
pub mod compressed;
pub mod criterion;
mod data_type;
pub mod element;
mod error;
pub mod estimate;
pub mod file;
mod first_error;
pub mod int4;
pub mod int8;
pub mod kernel;
pub mod layer;
pub mod layout;
mod linear_algebra;
pub mod mask;
pub mod matrix;
pub mod memory;
pub mod pattern;
pub mod quantization;
mod random;
pub mod role;
pub mod select;
mod selector;
pub mod solve;
pub mod sparsify;
pub mod speedup;
pub mod store;
pub mod verify;
pub mod widest;

pub use compressed::Compressed;
pub use data_type::DataType;
pub use element::{Arithmetic, Element, F8E4M3, F8E5M2};
pub use error::{Error, Result};
pub use mask::Mask;
pub use matrix::MatrixRef;
pub use pattern::{Axis, Pattern};
pub use selector::Selector;

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;

/// The code in README.md compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
