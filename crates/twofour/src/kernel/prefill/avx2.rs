//! The kernels in AVX2, FMA and F16C.

use std::ops::Range;

use super::{
    super::{
        element::KernelElement,
        engine::HasAvx2,
        strips::{ROWS, Strip},
        vector::avx2::Avx2,
    },
    GROUP, Kernels, Lines,
    kept_columns::{self, ColumnLists, StripRows},
    kept_rows,
    tile::{self, Tiles},
    walk::{self, Lists},
};

// SAFETY: the methods need no other instructions than the vector's.
unsafe impl Kernels for Avx2 {
    type Has = HasAvx2;

    const LIST_VECTORS: usize = 12;
    const LIST_DEPTH: usize = 64;
    const TILE_OUTS: usize = 6;
    const TILE_VECTORS: usize = 2;
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

    unsafe fn list_columns<T: KernelElement>(
        strip: Strip<'_, T>,
        groups: Range<usize>,
        rows: StripRows,
        lists: &mut ColumnLists,
    ) {
        for (group, first) in groups.zip((0..).step_by(GROUP)) {
            kept_columns::list_group(strip, group, rows, first, lists);
        }
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
/// The CPU has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn list_strip<T: KernelElement>(
    strip: Strip<'_, T>,
    groups: Range<usize>,
    values: &mut [f32],
    positions: &mut [u64; ROWS],
) {
    // SAFETY: this function requires the instructions, and what else the called one does.
    unsafe { kept_rows::list_strip::<Avx2, T>(strip, groups, values, positions) }
}

/// See [`walk::multiply`].
///
/// # Safety
/// The CPU has AVX2, FMA and F16C; the rest as [`walk::multiply`] says.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_lists<L: Lists>(lists: &L, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
    // SAFETY: this function requires the instructions, and what else the called one does.
    unsafe { walk::multiply::<Avx2, L>(lists, panel, vectors, out) }
}

/// See [`tile::multiply`].
///
/// # Safety
/// The CPU has AVX2, FMA and F16C; the rest as [`tile::multiply`] says.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_tiles(tiles: &Tiles, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
    // SAFETY: this function requires the instructions, and what else the called one does.
    unsafe { tile::multiply::<Avx2, { <Avx2 as Kernels>::TILE_OUTS }>(tiles, panel, vectors, out) }
}
