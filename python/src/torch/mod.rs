//! torch's dispatcher and tensors, through libtorch's stable C interface ([`shim`]).
//!
//! A call of an operator goes from torch's dispatcher straight to a Rust function, without Python. [`register`]
//! registers the kernels of operators ([`Operator`]), which are in [`crate::ops`].

mod failure;
pub(crate) mod kernel;
mod list;
pub(crate) mod numbers;
pub(crate) mod operands;
mod operator;
mod register;
mod scalar_type;
pub(crate) mod shapes;
pub(crate) mod shim;
mod tensor;

pub(crate) use failure::{Failure, Result};
pub(crate) use kernel::kernel;
pub(crate) use list::List;
pub(crate) use operator::Operator;
pub(crate) use register::register;
pub(crate) use scalar_type::ScalarType;
pub(crate) use shim::Kernel;
pub(crate) use tensor::{Device, Tensor, torch_threads};
