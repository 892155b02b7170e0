//! CUDA kernels for 2:4 sparsity. They take raw device pointers and a stream, so that any framework can call them.
//!
//! The crate builds on a machine without CUDA: it loads the driver and NVRTC at run time. It compiles the kernel sources it carries for the device at
//! hand, and caches the machine code on disk.
//!
//! | task | module |
//! |---|---|
//! | compute capability of a GPU | [`architecture`] |
//! | compiling kernels, and the cache of machine code | [`source`], [`kernels`], [`compiler`], [`cache`] |
//! | a device and its loaded kernels | [`device`] |
//! | pruning a weight: mask, compressed weight and compressed transpose | [`prune`] |
//! | compressing a tensor along one axis | [`compress`] |
//! | GEMM with a compressed weight | [`gemm`] |
//! | element-wise activations and their gradients | [`elementwise`] |
//! | 2:4 estimates as dense matrices | [`estimate`] |
//! | column sums: bias gradients | [`column_sums`] |
//! | quantization to 8 bits | [`quantize`] |
//! | decompressing a packed weight | [`unpack`] |
//! | the scale of a soft threshold | [`soft_threshold`] |
//! | an AdamW step | [`adamw`] |
//! | cuBLASLt and cuSPARSELt | [`libraries`] |
//! | a GEMM by a given engine; choosing the fastest engine | [`engine`], [`dispatch`] |
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
pub mod estimate;
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
