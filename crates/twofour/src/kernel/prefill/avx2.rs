//! The kernels in AVX2, FMA and F16C.

use super::{
    super::decode::avx2::Avx2,
    Kernels,
    kept::{self, Lists},
    tile::{self, Tiles},
};

// SAFETY: the methods need no other instructions than the vector's.
unsafe impl Kernels for Avx2 {
    const LIST_VECTORS: usize = 12;
    const LIST_DEPTH: usize = 64;
    const TILE_OUTS: usize = 6;
    const TILE_VECTORS: usize = 2;
    const TILE_DEPTH: usize = 256;

    unsafe fn multiply_lists(lists: &Lists, panel: &[f32], vectors: usize, out: &mut [f32]) {
        // SAFETY: passed on to the caller.
        unsafe { multiply_lists(lists, panel, vectors, out) }
    }

    unsafe fn multiply_tiles(tiles: &Tiles, panel: &[f32], stride: usize, vectors: usize, out: &mut [f32]) {
        // SAFETY: passed on to the caller.
        unsafe { multiply_tiles(tiles, panel, stride, vectors, out) }
    }
}

/// See [`kept::multiply`].
///
/// # Safety
/// The CPU has AVX2, FMA and F16C; the rest as [`kept::multiply`] says.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_lists(lists: &Lists, panel: &[f32], vectors: usize, out: &mut [f32]) {
    // SAFETY: passed on to the caller.
    unsafe { kept::multiply::<Avx2>(lists, panel, vectors, out) }
}

/// See [`tile::multiply`].
///
/// # Safety
/// The CPU has AVX2, FMA and F16C; the rest as [`tile::multiply`] says.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_tiles(tiles: &Tiles, panel: &[f32], stride: usize, vectors: usize, out: &mut [f32]) {
    // SAFETY: passed on to the caller.
    unsafe { tile::multiply::<Avx2, { <Avx2 as Kernels>::TILE_OUTS }>(tiles, panel, stride, vectors, out) }
}
