//! The kernels in AVX-512 (F, BW, VL, DQ).

use super::{
    super::decode::avx512::Avx512,
    Kernels,
    kept::{self, Lists},
    tile::{self, Tiles},
};

// SAFETY: the methods need no other instructions than the vector's.
unsafe impl Kernels for Avx512 {
    const LIST_VECTORS: usize = 8;
    const LIST_DEPTH: usize = 64;
    const TILE_OUTS: usize = 8;
    const TILE_VECTORS: usize = 3;
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
/// The CPU has AVX-512 (F, BW, VL, DQ); the rest as [`kept::multiply`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn multiply_lists(lists: &Lists, panel: &[f32], vectors: usize, out: &mut [f32]) {
    // SAFETY: passed on to the caller.
    unsafe { kept::multiply::<Avx512>(lists, panel, vectors, out) }
}

/// See [`tile::multiply`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ); the rest as [`tile::multiply`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn multiply_tiles(tiles: &Tiles, panel: &[f32], stride: usize, vectors: usize, out: &mut [f32]) {
    // SAFETY: passed on to the caller.
    unsafe { tile::multiply::<Avx512, { <Avx512 as Kernels>::TILE_OUTS }>(tiles, panel, stride, vectors, out) }
}
