//! The operators of `torch.ops.twofour`, each in a file of its own: schema, kernels for CPUs and for GPUs, and the shapes of its results.
//!
//! A further one is a file with a constant `OPERATORS`, and its name in the table below. Operators of one kernel, such as those with and without a
//! bias, share a file.

use crate::torch::Operator;

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
    canonical,
    canonical_int4,
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
