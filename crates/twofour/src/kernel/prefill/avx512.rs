//! The kernels in AVX-512 (F, BW, VL, DQ).

use std::{arch::x86_64::*, ops::Range};

use super::{
    super::{
        element::KernelElement,
        engine::HasAvx512,
        strips::{ROWS, Strip},
        vector::avx512::Avx512,
    },
    GROUP, Kernels, Lines,
    kept_columns::{ColumnLists, StripRows},
    kept_rows,
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

    unsafe fn list_columns<T: KernelElement>(
        strip: Strip<'_, T>,
        groups: Range<usize>,
        rows: StripRows,
        lists: &mut ColumnLists,
    ) {
        // SAFETY: the CPU has the instructions, as `Kernels` requires.
        unsafe { list_columns(strip, groups, rows, lists) }
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

/// See [`Kernels::list_columns`]. The rows that keep a column are a mask of sixteen bits, by which values and offsets are compressed.
///
/// # Safety
/// The CPU has AVX-512 (F, BW, VL, DQ).
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,popcnt")]
unsafe fn list_columns<T: KernelElement>(
    strip: Strip<'_, T>,
    groups: Range<usize>,
    rows: StripRows,
    lists: &mut ColumnLists,
) {
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let shifts = _mm512_add_epi32(lanes, lanes);
    let stride = _mm512_set1_epi32(rows.stride as i32);
    let offsets = _mm512_add_epi32(_mm512_set1_epi32(rows.offset as i32), _mm512_mullo_epi32(lanes, stride));
    let three = _mm512_set1_epi32(3);
    let inside = ((1u32 << rows.height) - 1) as __mmask16;
    for (group, first_out) in groups.zip((0..).step_by(GROUP)) {
        let (line, codes) = strip.line(group);
        assert!(line.len() == 2 * ROWS && codes.len() == 2);
        // SAFETY: this function requires the instructions; a line has first and second values of `ROWS` rows (asserted).
        let (first, second) = unsafe { T::line_avx512(line.as_ptr()) };
        let positions_of =
            |code: u32| _mm512_and_epi32(_mm512_srlv_epi32(_mm512_set1_epi32(code as i32), shifts), three);
        let positions = [positions_of(codes[0]), positions_of(codes[1])];
        // Padding behind the last column multiplies nothing.
        for position in 0..GROUP.min(lists.outs() - first_out) {
            let column = _mm512_set1_epi32(position as i32);
            let of_first = _mm512_mask_cmpeq_epi32_mask(inside, positions[0], column);
            let of_second = _mm512_mask_cmpeq_epi32_mask(inside, positions[1], column);
            let kept = of_first | of_second;
            let column_values = _mm512_maskz_compress_ps(kept, _mm512_mask_mov_ps(first, of_second, second));
            let column_offsets = _mm512_maskz_compress_epi32(kept, offsets);
            let (values, offsets, length) = lists.rest(first_out + position);
            let (values, offsets) = (&mut values[..ROWS], &mut offsets[..ROWS]);
            // SAFETY: this function requires the instructions; both slices have `ROWS` elements.
            unsafe {
                _mm512_storeu_ps(values.as_mut_ptr(), column_values);
                _mm512_storeu_si512(offsets.as_mut_ptr().cast(), column_offsets);
            }
            *length += kept.count_ones() as usize;
        }
    }
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
