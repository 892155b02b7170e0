//! The kernels in AVX-512.

use std::ops::Range;

use super::{
    super::{
        dense_block::DenseBlock,
        element::KernelElement,
        strips::StripsRef,
        vector::avx512::{Avx512, Bytes},
    },
    dense,
    int8::{self, BytesKernel},
    strips::{self, FloatKernel},
};

/// See [`strips::walk`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ) and VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn sparse_bytes(
    weight: StripsRef<'_, i8>,
    range: Range<usize>,
    x: &[i8],
    stride: usize,
    out: &mut [i32],
) {
    // SAFETY: the CPU has AVX-512, as this function requires; the called one has no other condition.
    unsafe { strips::walk::<BytesKernel<Bytes>, _>(weight, range, x, stride, out) }
}

/// See [`int8::multiply_dense`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ) and VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn dense_bytes(block: DenseBlock<'_, i8>, x: &[i8], stride: usize, out: &mut [i32]) {
    // SAFETY: the CPU has AVX-512, as this function requires; the called one has no other condition.
    unsafe { int8::multiply_dense::<Bytes>(block, x, stride, out) }
}

/// See [`strips::walk`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn sparse<T: KernelElement>(
    weight: StripsRef<'_, T>,
    range: Range<usize>,
    x: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    // SAFETY: the CPU has AVX-512, as this function requires; the called one has no other condition.
    unsafe { strips::walk::<FloatKernel<Avx512, T>, _>(weight, range, x, stride, out) }
}

/// See [`dense::multiply`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) unsafe fn dense<T: KernelElement>(block: DenseBlock<'_, T>, x: &[f32], stride: usize, out: &mut [f32]) {
    // SAFETY: the CPU has AVX-512, as this function requires; the called one has no other condition.
    unsafe { dense::multiply::<Avx512, T>(block, x, stride, out) }
}
