//! The kernels in AVX-512 (F, BW, VL, DQ).

use std::ops::Range;

use super::{
    super::{
        element::KernelElement,
        engine::HasAvx512,
        strips::{ROWS, Strip},
        vector::avx512::Avx512,
    },
    Kernels, Lines, kept_rows,
    tile::{self, Tiles},
    walk::{self, Lists},
};

// SAFETY: the methods need no other instructions than the vector's.
unsafe impl Kernels for Avx512 {
    type Has = HasAvx512;

    const LIST_VECTORS: usize = 12;
    const LIST_DEPTH: usize = 48;
    const TILE_OUTS: usize = 8;
    const TILE_VECTORS: usize = 3;
    const TILE_DEPTH: usize = 256;

    unsafe fn list_strip<T: KernelElement>(
        strip: Strip<'_, T>,
        groups: Range<usize>,
        values: &mut [f32],
        positions: &mut [u64; ROWS],
    ) {
        // SAFETY: the CPU has the instructions and the rest is as `Kernels` requires of this method, which are the function's conditions.
        unsafe { list_strip(strip, groups, values, positions) }
    }

    unsafe fn multiply_lists<L: Lists>(lists: &L, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: the CPU has the instructions and the rest is as `Kernels` requires of this method, which are the function's conditions.
        unsafe { multiply_lists(lists, panel, vectors, out) }
    }

    unsafe fn multiply_tiles(tiles: &Tiles, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: the CPU has the instructions and the rest is as `Kernels` requires of this method, which are the function's conditions.
        unsafe { multiply_tiles(tiles, panel, vectors, out) }
    }
}

/// See [`kept_rows::list_strip`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn list_strip<T: KernelElement>(
    strip: Strip<'_, T>,
    groups: Range<usize>,
    values: &mut [f32],
    positions: &mut [u64; ROWS],
) {
    // SAFETY: this function requires the instructions, and what else the called one does.
    unsafe { kept_rows::list_strip::<Avx512, T>(strip, groups, values, positions) }
}

/// See [`walk::multiply`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ); the rest as [`walk::multiply`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn multiply_lists<L: Lists>(lists: &L, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
    // SAFETY: this function requires the instructions, and what else the called one does.
    unsafe { walk::multiply::<Avx512, L>(lists, panel, vectors, out) }
}

/// See [`tile::multiply`].
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ); the rest as [`tile::multiply`] says.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn multiply_tiles(tiles: &Tiles, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
    // SAFETY: this function requires the instructions, and what else the called one does.
    unsafe { tile::multiply::<Avx512, { <Avx512 as Kernels>::TILE_OUTS }>(tiles, panel, vectors, out) }
}
