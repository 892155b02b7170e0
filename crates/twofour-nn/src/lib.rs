//! Training and running whole models with 2:4 sparsity.
//!
//! Models are written once, with hand-written backward passes, over an
//! [`Engine`](twofour_transformer::engine::Engine): the CPU in f32, or an NVIDIA GPU.
//!
//! | module | contents |
//! |---|---|
//! | [`recipe`] | a training run, as a TOML file has it |
//! | [`settings`] | settings of TOML files, read with every mistake noted |
//! | [`report`] | the metrics of a run, as its folder has them |
//! | [`linear`], [`parts`], [`block`] | what models are made of |
//! | [`model`] | the models, their files, and inference |
//! | [`logistic`] | logistic regression, by which features are judged |
//! | [`questions`] | extractive question answering: files, windows, answers, scores |
//! | [`text`] | text on disk, and its tokens part by part |
//! | [`train`] | the training loop, its methods of sparsity, and its checkpoints |

pub mod block;
mod error;
pub mod linear;
pub mod logistic;
pub mod model;
pub mod parts;
pub mod questions;
pub mod recipe;
pub mod report;
pub mod settings;
pub mod text;
pub mod train;

pub use error::{Error, Result};
pub(crate) use twofour_transformer::{cpu, engine, parameter, random};
