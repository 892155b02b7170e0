//! Root-mean-square normalization (Zhang and Sennrich, 2019) of rows.

use super::{rows, vector};

#[inline(always)]
fn reciprocal_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (vector::sum(x, |v| v * v) / x.len() as f32 + eps).sqrt()
}

/// Normalizes every row of `x: [rows, n]` into `y`; `gain` has `n` elements.
pub fn forward(x: &[f32], gain: &[f32], eps: f32, y: &mut [f32]) {
    let n = gain.len();
    rows::for_each(y, n, |first, y| {
        vector::widest(|| {
            for (x, y) in x[first * n..].chunks_exact(n).zip(y.chunks_exact_mut(n)) {
                let scale = reciprocal_rms(x, eps);
                for ((y, &x), &g) in y.iter_mut().zip(x).zip(gain) {
                    *y = x * scale * g;
                }
            }
        });
    });
}

/// Adds the gradients for `x` to `dx` and those for the gain to `dgain`.
pub fn backward(x: &[f32], gain: &[f32], eps: f32, dy: &[f32], dx: &mut [f32], dgain: &mut [f32]) {
    let n = gain.len();
    rows::for_each_summing(dx, n, dgain, |first, dx, dgain| {
        // dy * gain for one row: it is needed twice.
        let mut g = vec![0f32; n];
        vector::widest(|| {
            let inputs = x[first * n..].chunks_exact(n).zip(dy[first * n..].chunks_exact(n));
            for ((x, dy), dx) in inputs.zip(dx.chunks_exact_mut(n)) {
                let scale = reciprocal_rms(x, eps);
                for ((g, &dy), &gain) in g.iter_mut().zip(dy).zip(gain) {
                    *g = dy * gain;
                }
                // With h = x * scale: dx = scale * (g - h * mean(g * h)).
                let mean = vector::sum2(&g, x, |g, x| g * x) * scale / n as f32;
                for ((((dx, &x), &dy), &g), dgain) in dx.iter_mut().zip(x).zip(dy).zip(&g).zip(dgain.iter_mut()) {
                    let h = x * scale;
                    *dx += scale * (g - h * mean);
                    *dgain += dy * h;
                }
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_agree_with_the_definition_and_gradients_with_differences() {
        let (n, eps) = (21, 1e-5);
        let wave = |len: usize, seed: f32| (0..len).map(|i| (i as f32 * 0.7 + seed).sin()).collect::<Vec<f32>>();
        let (x, gain, slope) = (wave(3 * n, 0.0), wave(n, 1.0), wave(3 * n, 2.0));
        let of = |x: &[f32], gain: &[f32]| {
            let mut y = vec![f32::NAN; x.len()];
            forward(x, gain, eps, &mut y);
            y
        };
        for (x, y) in x.chunks(n).zip(of(&x, &gain).chunks(n)) {
            let scale = 1.0 / (x.iter().map(|v| v * v).sum::<f32>() / n as f32 + eps).sqrt();
            assert!(x.iter().zip(&gain).zip(y).all(|((x, g), y)| (x * scale * g - y).abs() < 1e-5));
        }
        let (mut dx, mut dgain) = (vec![0f32; 3 * n], vec![0f32; n]);
        backward(&x, &gain, eps, &slope, &mut dx, &mut dgain);
        let along = |y: Vec<f32>| y.iter().zip(&slope).map(|(y, s)| f64::from(y * s)).sum::<f64>();
        let difference = |at: usize, values: &[f32], loss: &dyn Fn(&[f32]) -> f64| {
            let moved = |by: f32| {
                let mut values = values.to_vec();
                values[at] += by;
                loss(&values)
            };
            (moved(1e-2) - moved(-1e-2)) / 2e-2
        };
        for (at, found) in dx.iter().enumerate() {
            let expected = difference(at, &x, &|x| along(of(x, &gain)));
            assert!((f64::from(*found) - expected).abs() < 5e-3, "x {at}: {found} {expected}");
        }
        for (at, found) in dgain.iter().enumerate() {
            let expected = difference(at, &gain, &|gain| along(of(&x, gain)));
            assert!((f64::from(*found) - expected).abs() < 5e-3, "gain {at}: {found} {expected}");
        }
    }
}
