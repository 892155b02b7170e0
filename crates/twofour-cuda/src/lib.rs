//! CUDA kernels for 2:4 sparsity, over raw device pointers and a stream, so that any framework can call them.
//!
//! The crate builds on a machine without CUDA: the driver and the compiler are found at run time. Kernels are compiled from the sources that
//! this crate carries, for the device at hand, and kept on disk.
//!
//! | step | module |
//! |---|---|
//! | which GPU it is | [`architecture`] |
//! | from source to machine code | [`source`], [`kernels`], [`compiler`], [`cache`] |
//! | a device and its loaded kernels | [`device`] |
//! | weights to masks and compressed weights, both ways | [`prune`] |
//! | tensors to compressed ones, one way | [`compress`] |
//! | GEMM with compressed weights | [`gemm`] |
//! | activations and their gradients, element by element | [`elementwise`] |
//! | a bias gradient | [`column_sums`] |
//! | quantization to 8 bits | [`quantize`] |
//! | packed weights to dense ones | [`unpack`] |
//! | the scale of a soft threshold | [`soft_threshold`] |
//! | a step of training's optimizer | [`adamw`] |
//! | NVIDIA's libraries, beside our kernels | [`libraries`] |
//! | one product by one engine; which engine is fastest | [`engine`], [`dispatch`] |
//! | the sparse layer, over length-checked device memory | [`layer`] |
//!
//! Masks and compressed bytes are those of the `twofour` crate, bit for bit.

pub mod adamw;
pub mod architecture;
mod arguments;
pub mod cache;
pub mod column_sums;
pub mod compiler;
pub mod compress;
pub mod device;
pub mod dispatch;
pub mod elementwise;
pub mod engine;
mod error;
pub mod gemm;
mod headers;
pub mod kernels;
pub mod layer;
pub mod libraries;
#[doc(hidden)]
pub mod measure;
mod once_map;
pub mod prune;
pub mod quantize;
pub mod soft_threshold;
pub mod source;
mod tensor_map;
pub mod unpack;

pub use architecture::Architecture;
pub use device::{Device, DevicePtr, Stream};
pub use error::{Error, Result};
pub use twofour::DataType;
