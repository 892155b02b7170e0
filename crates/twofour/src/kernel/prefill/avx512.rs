//! The kernels in AVX-512 (F, BW, VL, DQ).

use super::{
    super::{KernelElement, decode::avx512::Avx512},
    Kernels, Lines,
    kept::{self, Kept, Lists},
    tile::{self, Tiles},
};

// SAFETY: the methods need no other instructions than the vector's.
unsafe impl Kernels for Avx512 {
    const LIST_VECTORS: usize = 12;
    const LIST_DEPTH: usize = 40;
    const FETCH_AHEAD: bool = false;
    const TILE_OUTS: usize = 8;
    const TILE_VECTORS: usize = 3;
    const TILE_DEPTH: usize = 256;

    unsafe fn list_strip<T: KernelElement>(lines: &[T], codes: &[u32], stride: u32, lists: &mut [Kept]) {
        // SAFETY: passed on to the caller.
        unsafe { list_strip(lines, codes, stride, lists) }
    }

    unsafe fn multiply_lists(lists: &Lists, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: passed on to the caller.
        unsafe { multiply_lists(lists, panel, vectors, out) }
    }

    unsafe fn multiply_tiles(tiles: &Tiles, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: passed on to the caller.
        unsafe { multiply_tiles(tiles, panel, vectors, out) }
    }
}

/// See [`kept::list_strip`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn list_strip<T: KernelElement>(lines: &[T], codes: &[u32], stride: u32, lists: &mut [Kept]) {
    // SAFETY: passed on to the caller.
    unsafe { kept::list_strip::<Avx512, T>(lines, codes, stride, lists) }
}

/// See [`kept::multiply`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ); the rest as [`kept::multiply`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn multiply_lists(lists: &Lists, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
    // SAFETY: passed on to the caller.
    unsafe { kept::multiply::<Avx512>(lists, panel, vectors, out) }
}

/// See [`tile::multiply`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ); the rest as [`tile::multiply`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn multiply_tiles(tiles: &Tiles, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
    // SAFETY: passed on to the caller.
    unsafe { tile::multiply::<Avx512, { <Avx512 as Kernels>::TILE_OUTS }>(tiles, panel, vectors, out) }
}
