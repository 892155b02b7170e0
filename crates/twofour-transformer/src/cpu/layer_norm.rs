//! Layer normalization (Ba, Kiros and Hinton, 2016) of rows.

use rayon::prelude::*;

use super::{rows, vector};

/// Mean and reciprocal standard deviation of a row.
#[inline(always)]
fn row_statistics(x: &[f32], eps: f32) -> (f32, f32) {
    let n = x.len() as f32;
    let mean = vector::sum(x, |v| v) / n;
    let variance = vector::sum(x, |v| (v - mean) * (v - mean)) / n;
    (mean, 1.0 / (variance + eps).sqrt())
}

/// Mean and reciprocal standard deviation of every row of `x: [rows, n]`, as [`forward`] gives them: `[rows]` each.
pub fn statistics(x: &[f32], n: usize, eps: f32, statistics: [&mut [f32]; 2]) {
    if n == 0 {
        return;
    }
    let rows = rows::per_task(n);
    let [mean, rstd] = statistics;
    let tasks = x.par_chunks(rows * n).zip(mean.par_chunks_mut(rows).zip(rstd.par_chunks_mut(rows)));
    tasks.for_each(|(x, (mean, rstd))| {
        vector::widest(|| {
            for (x, (mean, rstd)) in x.chunks_exact(n).zip(mean.iter_mut().zip(rstd.iter_mut())) {
                (*mean, *rstd) = row_statistics(x, eps);
            }
        });
    });
}

/// Normalizes every row of `x: [rows, n]` into `y`; gain and bias have `n` elements. The variance is the biased one.
/// Mean and reciprocal standard deviation of every row go to `statistics`, `[rows]` each.
pub fn forward(x: &[f32], [gain, bias]: [&[f32]; 2], eps: f32, y: &mut [f32], statistics: [&mut [f32]; 2]) {
    let n = gain.len();
    if n == 0 {
        return;
    }
    let rows = rows::per_task(n);
    let [mean, rstd] = statistics;
    let saved = mean.par_chunks_mut(rows).zip(rstd.par_chunks_mut(rows));
    let tasks = x.par_chunks(rows * n).zip(y.par_chunks_mut(rows * n)).zip(saved);
    tasks.for_each(|((x, y), saved)| {
        vector::widest(|| {
            for ((x, y), saved) in
                x.chunks_exact(n).zip(y.chunks_exact_mut(n)).zip(saved.0.iter_mut().zip(saved.1.iter_mut()))
            {
                let (mean, scale) = row_statistics(x, eps);
                (*saved.0, *saved.1) = (mean, scale);
                for (((y, &x), &g), &b) in y.iter_mut().zip(x).zip(gain).zip(bias) {
                    *y = (x - mean) * scale * g + b;
                }
            }
        });
    });
}

/// Adds the gradients for `x` to `dx`, and those for gain and bias, one after the other, to `dgain_dbias: [2, n]`. The
/// statistics are those of [`forward`].
pub fn backward(
    (x, gain, statistics): (&[f32], &[f32], [&[f32]; 2]),
    dy: &[f32],
    dx: &mut [f32],
    dgain_dbias: &mut [f32],
) {
    let n = gain.len();
    rows::for_each_summing(dx, n, dgain_dbias, |first, dx, partial| {
        let (dgain, dbias) = partial.split_at_mut(n);
        vector::widest(|| {
            let inputs = x[first * n..].chunks_exact(n).zip(dy[first * n..].chunks_exact(n));
            let saved = statistics[0][first..].iter().zip(&statistics[1][first..]);
            for (((x, dy), dx), saved) in inputs.zip(dx.chunks_exact_mut(n)).zip(saved) {
                let (&mean, &scale) = saved;
                // With h = (x - mean) * scale and g = dy * gain: dx = scale * (g - mean(g) - h * mean(g * h)).
                let mut g_sum = [0f32; 16];
                let mut gh_sum = [0f32; 16];
                let (x_chunks, _) = x.as_chunks::<16>();
                let (dy_chunks, _) = dy.as_chunks::<16>();
                let (gain_chunks, _) = gain.as_chunks::<16>();
                for ((x, dy), gain) in x_chunks.iter().zip(dy_chunks).zip(gain_chunks) {
                    for l in 0..16 {
                        let g = dy[l] * gain[l];
                        g_sum[l] += g;
                        gh_sum[l] += g * ((x[l] - mean) * scale);
                    }
                }
                let (mut g_mean, mut gh_mean) = (g_sum.iter().sum::<f32>(), gh_sum.iter().sum::<f32>());
                for i in n / 16 * 16..n {
                    let g = dy[i] * gain[i];
                    g_mean += g;
                    gh_mean += g * ((x[i] - mean) * scale);
                }
                g_mean /= n as f32;
                gh_mean /= n as f32;
                let sums = dgain.iter_mut().zip(dbias.iter_mut());
                for ((((dx, &x), &dy), &gain), (dgain, dbias)) in dx.iter_mut().zip(x).zip(dy).zip(gain).zip(sums) {
                    let h = (x - mean) * scale;
                    *dx += scale * (dy * gain - g_mean - h * gh_mean);
                    *dgain += dy * h;
                    *dbias += dy;
                }
            }
        });
    });
}
