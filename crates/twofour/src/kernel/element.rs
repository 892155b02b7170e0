//! The float elements that kernels multiply with.

use half::{bf16, f16};

use super::strips::Order;
#[cfg(target_arch = "x86_64")]
use super::vector::Load;
use crate::Arithmetic;

/// f32, bf16 or f16: what weights and activations of a float kernel are made of. Products accumulate in f32.
#[cfg(target_arch = "x86_64")]
pub trait KernelElement: Arithmetic + Load + Order {}

/// f32, bf16 or f16: what weights and activations of a float kernel are made of. Products accumulate in f32.
#[cfg(not(target_arch = "x86_64"))]
pub trait KernelElement: Arithmetic + Order {}

impl KernelElement for f32 {}
impl KernelElement for bf16 {}
impl KernelElement for f16 {}
