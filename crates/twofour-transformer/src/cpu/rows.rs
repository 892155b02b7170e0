//! Cutting a batch of rows into tasks.

use rayon::prelude::*;

/// Elements of one task: small enough to balance, large enough to outweigh the cost of scheduling it, and within L1.
const TASK: usize = 8192;

/// Rows of one task. It depends on the row length alone, so that sums over tasks come out the same on every machine.
pub fn per_task(columns: usize) -> usize {
    (TASK / columns.max(1)).max(1)
}

/// Calls `f(first_row, rows_of_y)` for every task of `y`'s rows, in parallel.
pub fn for_each(y: &mut [f32], columns: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if columns == 0 {
        return;
    }
    let rows = per_task(columns);
    y.par_chunks_mut(rows * columns).enumerate().for_each(|(task, y)| f(task * rows, y));
}

/// Adds to `sums` (of `width` elements) what `f(first_row, rows_of_y, partial)` adds to `partial` in each task, in the
/// order of the tasks.
pub fn for_each_summing(
    y: &mut [f32],
    columns: usize,
    sums: &mut [f32],
    f: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
) {
    if columns == 0 {
        return;
    }
    // A partial sum for each of a bounded number of stretches: a stretch holds many tasks, so its partial is reused.
    let rows = per_task(columns);
    let total = y.len() / columns;
    let stretch = (total.div_ceil(16)).next_multiple_of(rows).max(rows);
    let width = sums.len();
    let partials: Vec<Vec<f32>> = y
        .par_chunks_mut(stretch * columns)
        .enumerate()
        .map(|(index, y)| {
            let mut partial = vec![0f32; width];
            for (task, y) in y.chunks_mut(rows * columns).enumerate() {
                f(index * stretch + task * rows, y, &mut partial);
            }
            partial
        })
        .collect();
    for partial in partials {
        for (sum, value) in sums.iter_mut().zip(partial) {
            *sum += value;
        }
    }
}
