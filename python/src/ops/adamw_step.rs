//! The optimizer of STEP.

use twofour::adamw_step::{AdamWStep, ChangeMean, Moments, VariancePhase, update};

use super::*;

/// Updates a parameter, its moments and, where it has elements, the largest variance so far, all contiguous and of one
/// type. A variance is frozen at the step `frozen_at` where that is not 0; otherwise the sum of its changes is returned
/// where `watched` is 1 (of their magnitudes) or 2 (of the logarithms of their magnitudes).
pub(super) const OPERATORS: &[Operator] = &[Operator::new(
    "adamw_step_(Tensor(a!) parameter, Tensor gradient, Tensor(b!) mean, Tensor(c!) variance, Tensor(d!) largest, \
     float lr, float beta1, float beta2, \
     float eps, float weight_decay, int step, int frozen_at, int watched) -> float",
    kernel!(cpu),
)];

#[allow(clippy::too_many_arguments)]
fn cpu(
    parameter: Tensor,
    gradient: Tensor,
    mean: Tensor,
    variance: Tensor,
    largest: Tensor,
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    weight_decay: f64,
    step: u64,
    frozen_at: u64,
    watched: i64,
) -> Result<f64> {
    let phase = match (frozen_at, watched) {
        (0, 0) => VariancePhase::Moving,
        (0, 1) => VariancePhase::Watched(ChangeMean::Arithmetic),
        (0, 2) => VariancePhase::Watched(ChangeMean::Geometric),
        (0, other) => return Err(Failure::runtime(format!("there is no mean number {other}"))),
        (at, _) => VariancePhase::Frozen { at },
    };
    let settings = AdamWStep { learning_rate, beta1, beta2, epsilon, weight_decay, step, phase };
    let dtype = parameter.dtype()?;
    let mut tensors = [parameter, mean, variance, largest];
    for_floats!(dtype, "the parameter", on_cpu::<T>(&mut tensors, &gradient, settings))
}

fn on_cpu<T: Float>(tensors: &mut [Tensor; 4], gradient: &Tensor, settings: AdamWStep) -> Result<f64> {
    let values = gradient.elements::<T>("the gradient", T::SCALAR)?;
    let [parameter, mean, variance, largest] = tensors;
    let written = [
        (parameter, "the parameter"),
        (mean, "the mean"),
        (variance, "the variance"),
        (largest, "the largest variance"),
    ];
    let [parameter, mean, variance, largest] = Tensor::written::<T, 4>(written, &[gradient], T::SCALAR)?;
    let moments = Moments { mean, variance, largest: (!largest.is_empty() || parameter.is_empty()).then_some(largest) };
    Ok(on_torch_threads(|| update(parameter, &values, moments, settings))?)
}
