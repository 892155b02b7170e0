//! The operators of `torch.ops.twofour`, each in a file of its own: schema, kernels for CPUs and for GPUs, and the
//! shapes of its results.
//!
//! A further one is a file with a constant `OPERATORS`, and its name in the table below; `use super::*` brings what
//! operators are made of. Those of one kernel, such as with and without a bias, share a file.

use crate::{
    cpu::{
        Float, Memory, bias_of, for_floats, from_tiles, not_a_float, on_pool, on_torch_threads, round_into, to_f32,
        to_tiles, widened,
    },
    cuda::{
        context, half_type, indices, multiply, new_mask, number, packable, sampling, select_into, slice, slice_mut,
        wide,
    },
    packed::{
        Stored, for_stored, from_parts, int4_parts_shapes, int4_shape, int8, new_on_cpu, new_on_gpu, parts_shapes,
        shape, tiles_shape, to_parts,
    },
    torch::{
        Device, Failure, Operator, Result, ScalarType, Tensor, kernel,
        numbers::{self, EstimatorKind, FloatType},
        operands::{expect_packed, expect_packed_int4, rows_and_last, with_last},
        shapes::{Arguments, Shape},
    },
};

/// Declares the files, and collects their operators.
macro_rules! operators {
    ($($file:ident),* $(,)?) => {
        $(mod $file;)*

        /// The files' operators.
        const FILES: &[&[Operator]] = &[$($file::OPERATORS),*];
    };
}

operators! {
    adamw_step,
    bias_gradient,
    block_sparse_linear,
    canonical,
    canonical_int4,
    dequantize_int4,
    estimate,
    gated_gelu,
    input_gradient,
    linear,
    linear_float8,
    linear_i8,
    linear_int4,
    linear_quantized,
    pack,
    pack_sparse,
    pack_together,
    quantize_rows,
    sampled_weight_gradient,
    select,
    soft_threshold_scale,
    unpack,
}

/// All operators.
pub(crate) fn all() -> Vec<Operator> {
    FILES.concat()
}
