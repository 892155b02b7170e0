//! twofour's kernels as operators of torch's dispatcher, namespace `twofour`.
//!
//! [`register`] defines the operators and registers their kernels through libtorch's stable C interface ([`shim`]); a call then goes from torch's
//! dispatcher straight to a Rust function, without Python.

mod cpu;
mod cuda;
mod failure;
mod int4;
mod numbers;
mod operator;
mod register;
mod scalar_type;
mod shape;
mod shim;
mod tensor;

pub(crate) use cuda::set_tile_scheduler;
pub(crate) use register::register;
pub(crate) use scalar_type::ScalarType;
