//! Kernels for tensors in the host's memory.

mod adamw_step;
mod estimate;
mod float8;
mod gated_gelu;
mod gradient;
mod int4;
mod linear;
mod pack;
mod quantized;
mod select;
mod threads;

use half::{bf16, f16};
use twofour::{Compressed, kernel::SparseWeightRef};

pub(super) use threads::note_forks;
use threads::on_torch_threads;

use super::{
    failure::{Failure, Result},
    operator::kernel,
    register::Definition,
    scalar_type::ScalarType,
    tensor::{Tensor, torch_threads},
};
use crate::pool;

/// The operators. A packed weight is `[strips, elements]` of the weight's dtype: the kernels' layout, which is opaque and differs between
/// devices and versions; `canonical` gives the portable one.
pub(super) const OPERATORS: &[Definition] = &[
    ("linear(Tensor x, Tensor packed, int out_features) -> Tensor", kernel!(linear::linear)),
    (
        "linear_bias(Tensor x, Tensor packed, Tensor bias, int out_features, int activation) -> Tensor",
        kernel!(linear::linear_bias),
    ),
    ("input_gradient(Tensor dy, Tensor packed, int in_features) -> Tensor", kernel!(linear::input_gradient)),
    (
        "pack(Tensor weight, int rule, float scale, bool transpose, bool check, int dtype=-1) -> (Tensor packed, Tensor packed_t, Tensor mask)",
        kernel!(pack::pack),
    ),
    (
        "pack_masked(Tensor weight, Tensor mask, bool transpose) -> (Tensor packed, Tensor packed_t)",
        kernel!(pack::pack_masked),
    ),
    ("pack_sparse(Tensor weight) -> Tensor", kernel!(pack::pack_sparse)),
    ("unpack(Tensor packed, int rows, int cols) -> Tensor", kernel!(pack::unpack)),
    ("canonical(Tensor packed, int rows, int cols) -> (Tensor values, Tensor meta)", kernel!(pack::canonical)),
    ("from_canonical(Tensor values, Tensor meta, int cols) -> Tensor", kernel!(pack::from_canonical)),
    ("select(Tensor dense, int rule) -> Tensor", kernel!(select::select)),
    ("soft_threshold_scale(Tensor dense) -> Tensor", kernel!(estimate::soft_threshold_scale)),
    ("estimate(Tensor dense, int estimator, float scale, Tensor seed) -> Tensor", kernel!(estimate::estimate)),
    (
        "sampled_weight_gradient(Tensor dy, Tensor x, int estimator, Tensor seed) -> Tensor",
        kernel!(gradient::sampled_weight_gradient),
    ),
    ("bias_gradient(Tensor dy) -> Tensor", kernel!(gradient::bias_gradient)),
    (
        "linear_float8(Tensor x, Tensor packed, Tensor scales, Tensor token_scales, Tensor bias, int out_features, int dtype) -> Tensor",
        kernel!(float8::linear_float8),
    ),
    ("quantize_rows(Tensor dense) -> (Tensor values, Tensor scales)", kernel!(quantized::quantize_rows)),
    ("linear_i8(Tensor x, Tensor packed, int out_features) -> Tensor", kernel!(quantized::linear_i8)),
    (
        "linear_quantized(Tensor x, Tensor packed, Tensor scales, int out_features) -> Tensor",
        kernel!(quantized::linear_quantized),
    ),
    (
        "linear_quantized_bias(Tensor x, Tensor packed, Tensor scales, Tensor bias, int out_features, int activation) -> Tensor",
        kernel!(quantized::linear_quantized_bias),
    ),
    (
        "quantize_int4(Tensor weight, int group_size) -> (Tensor values, Tensor meta, Tensor scales)",
        kernel!(int4::quantize),
    ),
    ("pack_int4(Tensor values, Tensor meta, Tensor scales, int cols, int group_size) -> Tensor", kernel!(int4::pack)),
    (
        "canonical_int4(Tensor packed, int rows, int cols, int group_size) -> (Tensor values, Tensor meta, Tensor scales)",
        kernel!(int4::canonical),
    ),
    ("linear_int4(Tensor x, Tensor packed, int out_features, int group_size) -> Tensor", kernel!(int4::linear)),
    (
        "linear_int4_bias(Tensor x, Tensor packed, Tensor bias, int out_features, int group_size, int activation) -> Tensor",
        kernel!(int4::linear_bias),
    ),
    ("gated_gelu(Tensor input) -> Tensor", kernel!(gated_gelu::gated_gelu)),
    ("gated_gelu_gradient(Tensor input, Tensor dy) -> Tensor", kernel!(gated_gelu::gradient)),
    (
        "adamw_step_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) mean, Tensor(c!) variance, Tensor(d!) largest, float lr, float beta1, float beta2, \
         float eps, float weight_decay, int step, int frozen_at, int watched) -> float",
        kernel!(adamw_step::step),
    ),
];

/// Runs passes over a weight on a pool of as many threads as torch computes with.
fn on_pool<R: Send>(f: impl FnOnce() -> R + Send) -> Result<R> {
    pool::on_pool(torch_threads(), f).map_err(|e| Failure::runtime(format!("no threads: {e}")))
}

/// Calls a generic function with the Rust type of a tensor's floats.
macro_rules! for_floats {
    ($dtype:expr, $what:expr, $function:ident::<$T:ident>($($argument:expr),*)) => {
        match $dtype {
            $crate::torch::ScalarType::F32 => $function::<f32>($($argument),*),
            $crate::torch::ScalarType::Bf16 => $function::<half::bf16>($($argument),*),
            $crate::torch::ScalarType::F16 => $function::<half::f16>($($argument),*),
            other => Err($crate::torch::cpu::not_a_float($what, other)),
        }
    };
}
use for_floats;

/// Calls a generic function with the Rust type of a tensor's elements, which a packed weight may hold.
macro_rules! for_stored {
    ($dtype:expr, $what:expr, $function:ident::<$T:ident>($($argument:expr),*)) => {
        match $dtype {
            $crate::torch::ScalarType::I8 => $function::<i8>($($argument),*),
            $crate::torch::ScalarType::E4m3 => $function::<twofour::F8E4M3>($($argument),*),
            $crate::torch::ScalarType::E5m2 => $function::<twofour::F8E5M2>($($argument),*),
            dtype => $crate::torch::cpu::for_floats!(dtype, $what, $function::<$T>($($argument),*)),
        }
    };
}
use for_stored;

/// The elements of a packed weight.
trait Stored: twofour::Element {
    /// torch's name for the type.
    const STORED: ScalarType;

    /// The packed form of a weight.
    fn pack(weight: &Compressed<Self>) -> Result<Tensor>;

    /// The canonical form of a packed weight.
    fn unpack(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<Self>>;
}

impl<T: Float> Stored for T {
    const STORED: ScalarType = T::SCALAR;

    fn pack(weight: &Compressed<T>) -> Result<Tensor> {
        pack::packed_of(weight)
    }

    fn unpack(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<T>> {
        let memory = linear::Memory::of(packed.bytes("the packed weight")?);
        Ok(SparseWeightRef::<T>::new(rows, cols, &memory)?.to_compressed())
    }
}

impl Stored for i8 {
    const STORED: ScalarType = ScalarType::I8;

    fn pack(weight: &Compressed<i8>) -> Result<Tensor> {
        quantized::packed_of(weight)
    }

    fn unpack(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<i8>> {
        quantized::compressed(packed, rows, cols)
    }
}

/// A float of torch that kernels multiply.
trait Float: twofour::layer::PackedElement {
    /// torch's name for it.
    const SCALAR: ScalarType;
}
impl Float for f32 {
    const SCALAR: ScalarType = ScalarType::F32;
}
impl Float for bf16 {
    const SCALAR: ScalarType = ScalarType::Bf16;
}
impl Float for f16 {
    const SCALAR: ScalarType = ScalarType::F16;
}

fn not_a_float(what: &str, found: ScalarType) -> Failure {
    Failure::not_implemented(format!("{what} has dtype {}; float32, bfloat16 or float16 is required", found.name()))
}
