//! Rows of a table, picked by index.

use rayon::prelude::*;
use twofour::layer::Accumulate;

/// `out[t] = table[ids[t]]` for a table of rows of `width` elements. Every index must be that of a row.
pub fn forward(table: &[f32], width: usize, ids: &[u32], out: &mut [f32]) {
    if width == 0 {
        return;
    }
    out.par_chunks_exact_mut(width).zip(ids).with_min_len(16).for_each(|(out, &id)| {
        out.copy_from_slice(&table[id as usize * width..][..width]);
    });
}

/// The gradient of the table: the sums of the rows of `d_out` that read each row, in order of token.
pub fn gradient(d_out: &[f32], width: usize, ids: &[u32], accumulate: Accumulate, d_table: &mut [f32]) {
    if accumulate == Accumulate::Overwrite {
        d_table.fill(0.0);
    }
    if width == 0 {
        return;
    }
    for (d_out, &id) in d_out.chunks_exact(width).zip(ids) {
        let row = &mut d_table[id as usize * width..][..width];
        row.iter_mut().zip(d_out).for_each(|(sum, value)| *sum += value);
    }
}
