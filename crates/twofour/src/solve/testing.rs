//! What tests of solvers share.

use crate::{MatrixRef, calibration::Hessian};

/// Numbers of a linear congruential generator, from -1 to 1.
pub(crate) fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The Hessian of features that neighbours share and that differ in size.
pub(super) fn correlated(features: usize, tokens: usize) -> Hessian {
    let noise = random((features + 3) * tokens, 77);
    let mut batch = Vec::with_capacity(features * tokens);
    for token in noise.chunks(features + 3) {
        batch.extend((0..features).map(|j| (token[j] + token[j + 1] + 0.5 * token[j + 3]) * (1.0 + (j % 5) as f32)));
    }
    let mut hessian = Hessian::new(features).unwrap();
    hessian.add(&batch).unwrap();
    hessian
}

/// `‖(W - Ŵ)·X‖²`.
pub(super) fn error_of(hessian: &Hessian, dense: &[f32], weight: &[f32]) -> f64 {
    let difference: Vec<f32> = dense.iter().zip(weight).map(|(a, b)| a - b).collect();
    let rows = dense.len() / hessian.features();
    hessian.squared_outputs(MatrixRef::new(rows, hessian.features(), &difference).unwrap()).unwrap()
}
