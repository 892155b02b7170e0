//! CUDA kernels for 2:4 sparsity, over raw device pointers and a stream, so that any framework can call them.
//!
//! The crate builds on a machine without CUDA: the driver and the compiler are found at run time. Kernels are compiled from the sources that
//! this crate carries, for the device at hand, and kept on disk.
//!
//! | step | module |
//! |---|---|
//! | which GPU it is | [`architecture`] |
//! | from source to machine code | [`compiler`], [`cache`] |
//! | a device and its loaded kernels | [`device`] |
//! | weights to masks and compressed weights | [`prune`] |
//!
//! Masks and compressed bytes are those of the `twofour` crate, bit for bit.

pub mod architecture;
pub mod cache;
pub mod compiler;
pub mod device;
mod error;
pub mod prune;
pub mod source;

pub use architecture::Architecture;
pub use device::{Device, DevicePtr, Stream};
pub use error::{Error, Result};
