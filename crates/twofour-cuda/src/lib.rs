//! CUDA kernels for 2:4 sparsity, and the sparse layer that they make up.
//!
//! The crate builds on a machine without CUDA: it loads the driver and NVRTC at run time. It compiles the kernel
//! sources it carries for the device at hand, and caches the machine code on disk.
//!
//! Each module uses those above it:
//!
//! | module | task |
//! |---|---|
//! | [`architecture`] | the compute capability of a GPU |
//! | [`source`], [`compiler`], [`cache`] | compiling kernels, and the cache of machine code |
//! | [`device`] | a device and its loaded kernels |
//! | [`layer`]'s context and memory | a stream with its workspace, plans and loaded kernels; slices of device memory |
//! | [`arguments`] | validation of what calls are given |
//! | [`problem`] | GEMM problems: shapes, data types and memory orders |
//! | [`cublaslt`], [`nccl`] | NVIDIA's libraries: GEMMs with dense weights, sums over several GPUs |
//! | [`raw`] | the kernels, over raw pointers: pruning, compression, GEMM, element-wise passes, AdamW |
//! | [`layer`] | the sparse layer, a safe API over length-checked device memory, owned or borrowed |
//! | [`solve`] | the GPU as a backend of pruning's solvers, and the statistics of inputs that they require |
//! | [`compare`] | comparing GEMM engines by measurement |
//! | [`kernels`] | the list of all kernels' sources |
//!
//! Most programs need [`Device`] and [`layer`]. A framework with pointers of its own calls [`raw`]. A crate with
//! kernels of its own makes a [`source::Source`] of each, and launches them on a
//! [`LayerContext`](layer::LayerContext), which keeps what is loaded: `twofour-transformer` does.
//!
//! Masks and compressed bytes are those of the `twofour` crate, bit for bit.

pub mod architecture;
pub mod arguments;
pub mod cache;
pub mod compare;
mod compile_time;
pub mod compiler;
mod context;
pub mod cublaslt;
mod dense_gemm;
pub mod device;
mod error;
mod freed;
pub mod kernels;
pub mod layer;
mod loader;
mod marks;
mod memory;
pub mod nccl;
mod nvrtc;
mod once_map;
mod plans;
pub mod problem;
pub mod raw;
pub mod solve;
pub mod source;
mod tile_scheduler;

pub use architecture::Architecture;
pub use compile_time::compile_time;
pub use device::{Device, DevicePtr, PooledMemory, Stream};
pub use error::{Error, Result};
pub use loader::add_site_packages;
pub use marks::PhaseMarks;
pub use tile_scheduler::TileScheduler;
pub use twofour::{DataType, kernel::Activation};
