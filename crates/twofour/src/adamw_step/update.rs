//! One parameter's update.

use crate::{Arithmetic, Error, Result, kernel::share, widest::widest};

/// Elements that one task updates. The sum of changes is added up task by task, so it does not depend on the number of
/// threads.
const TASK: usize = 1 << 13;

/// Elements whose changes are summed together.
const BLOCK: usize = 64;

/// The mean of the variances' changes that is `Z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum ChangeMean {
    /// Of magnitudes.
    #[default]
    Arithmetic,
    /// Of magnitudes, by their logarithms; a change of zero counts as the least normal f32.
    Geometric,
}

/// What happens to a parameter's variance in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum VariancePhase {
    /// It follows the gradient, as in AdamW.
    #[default]
    Moving,
    /// It follows the gradient, and the size of its change is returned.
    Watched(ChangeMean),
    /// It stays as it was after the parameter's step of that number. `ε^¾` takes the place of `ε`.
    Frozen {
        /// That step, from 1: the variance is corrected for its start at zero by it.
        at: u64,
    },
}

/// The settings of an [`update`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// The learning rate.
    pub learning_rate: f64,
    /// The decay rate of the mean.
    pub beta1: f64,
    /// The decay rate of the variance.
    pub beta2: f64,
    /// What is added to the root of the variance.
    pub epsilon: f64,
    /// The share of the parameter that a step takes off, times the learning rate.
    pub weight_decay: f64,
    /// The number of this step of the parameter, from 1.
    pub step: u64,
    /// What happens to the variance.
    pub phase: VariancePhase,
}

/// The running moments of a parameter's gradient, of its length.
#[derive(Debug)]
pub struct Moments<'a, T> {
    /// The mean.
    pub mean: &'a mut [T],
    /// The uncentred variance.
    pub variance: &'a mut [T],
    /// The largest variance so far, which then takes the variance's place in the update (AMSGrad); or nothing.
    pub largest: Option<&'a mut [T]>,
}

/// Updates a parameter and its moments in place, in one pass: with the gradient `g` and the step `t`,
///
/// ```text
/// p ← p (1 - λ η)    m ← m + (1 - β₁)(g - m)    v ← β₂ v + (1 - β₂) g²
/// p ← p - η m / (1 - β₁ᵗ) / (√(v / (1 - β₂ᵗ)) + ε)
/// ```
///
/// and, where the variance is frozen, `v` as it is, `t` in its correction the step of freezing, and `ε^¾` instead of
/// `ε`. Computed in f32 and rounded once for each tensor. Returns the sum over elements of `|Δv|`, or of its logarithm,
/// where the variance is watched, and otherwise 0.
///
/// # Errors
/// [`Error::Length`] where a slice has another length than the parameter.
pub fn update<T: Arithmetic>(
    parameter: &mut [T],
    gradient: &[T],
    moments: Moments<'_, T>,
    settings: AdamWStep,
) -> Result<f64> {
    let expect = |what, found| match found == parameter.len() {
        true => Ok(()),
        false => Err(Error::Length { what, expected: parameter.len(), found }),
    };
    expect("the gradient", gradient.len())?;
    expect("the mean", moments.mean.len())?;
    expect("the variance", moments.variance.len())?;
    let factors = Factors::of(settings);
    let mut largest: Vec<Option<&mut [T]>> = match moments.largest {
        None => std::iter::repeat_with(|| None).take(parameter.len().div_ceil(TASK)).collect(),
        Some(largest) => {
            expect("the largest variance", largest.len())?;
            largest.chunks_mut(TASK).map(Some).collect()
        }
    };
    let mut sums = vec![0.0; largest.len()];
    let state = moments.mean.chunks_mut(TASK).zip(moments.variance.chunks_mut(TASK)).zip(largest.iter_mut());
    let tasks = parameter.chunks_mut(TASK).zip(gradient.chunks(TASK)).zip(state).zip(&mut sums);
    share(tasks, || (), |(), (((p, g), ((m, v), largest)), sum)| *sum = task(p, g, m, v, largest.take(), factors));
    Ok(sums.into_iter().sum())
}

/// The numbers of a step, as every element uses them.
#[derive(Debug, Clone, Copy)]
struct Factors {
    /// What is left of the parameter by weight decay.
    kept: f32,
    /// `1 - β₁`.
    new_mean: f32,
    /// `β₂` and `1 - β₂`.
    variance: [f32; 2],
    is_frozen: bool,
    /// One divided by the root of the variance's correction.
    root: f32,
    floor: f32,
    /// The learning rate divided by the mean's correction.
    rate: f32,
    watched: Option<ChangeMean>,
}

impl Factors {
    fn of(settings: AdamWStep) -> Self {
        let AdamWStep { learning_rate, beta1, beta2, epsilon, weight_decay, step, phase } = settings;
        // `powf` has no limit on the exponent, which a number of steps needs.
        let correction = |beta: f64, step: u64| 1.0 - beta.powf(step as f64);
        let (since, floor) = match phase {
            VariancePhase::Frozen { at } => (at, epsilon.powf(0.75)),
            _ => (step, epsilon),
        };
        let watched = match phase {
            VariancePhase::Watched(mean) => Some(mean),
            _ => None,
        };
        Factors {
            kept: (1.0 - learning_rate * weight_decay) as f32,
            new_mean: (1.0 - beta1) as f32,
            variance: [beta2 as f32, (1.0 - beta2) as f32],
            is_frozen: matches!(phase, VariancePhase::Frozen { .. }),
            root: (1.0 / correction(beta2, since).sqrt()) as f32,
            floor: floor as f32,
            rate: (learning_rate / correction(beta1, step)) as f32,
            watched,
        }
    }
}

/// A task's elements; returns the sum of its changes.
fn task<T: Arithmetic>(
    p: &mut [T],
    g: &[T],
    m: &mut [T],
    v: &mut [T],
    mut largest: Option<&mut [T]>,
    factors: Factors,
) -> f64 {
    let mut sum = 0.0;
    for (block, first) in p.chunks_mut(BLOCK).zip((0..).step_by(BLOCK)) {
        let here = first..first + block.len();
        let largest = largest.as_deref_mut().map(|l| &mut l[here.clone()]);
        let (g, m, v) = (&g[here.clone()], &mut m[here.clone()], &mut v[here]);
        sum += widest(
            #[inline(always)]
            || elements(block, g, m, v, largest, factors),
        );
    }
    sum
}

#[inline(always)]
fn elements<T: Arithmetic>(
    p: &mut [T],
    g: &[T],
    m: &mut [T],
    v: &mut [T],
    largest: Option<&mut [T]>,
    factors: Factors,
) -> f64 {
    let mut changes = [0f32; BLOCK];
    let len = p.len();
    for ((v, g), change) in v.iter_mut().zip(g).zip(&mut changes) {
        let (before, g) = (v.to_f32(), g.to_f32());
        let after = before * factors.variance[0] + factors.variance[1] * g * g;
        // Not by the formula, where an infinite gradient would make 0 · ∞ of it.
        if !factors.is_frozen {
            *v = T::from_f32(after);
            *change = (after - before).abs();
        }
    }
    let mut used = [0f32; BLOCK];
    used.iter_mut().zip(v.iter()).for_each(|(used, v)| *used = v.to_f32());
    if let Some(largest) = largest {
        for (used, largest) in used.iter_mut().zip(largest) {
            let before = largest.to_f32();
            // A NaN of either stays.
            *used = if before < *used || used.is_nan() { *used } else { before };
            *largest = T::from_f32(*used);
        }
    }
    for (((p, g), m), used) in p.iter_mut().zip(g).zip(m).zip(&used) {
        let mean = m.to_f32();
        let mean = mean + factors.new_mean * (g.to_f32() - mean);
        *m = T::from_f32(mean);
        let step = factors.rate * mean / (used.sqrt() * factors.root + factors.floor);
        *p = T::from_f32(p.to_f32() * factors.kept - step);
    }
    match factors.watched {
        None => 0.0,
        Some(ChangeMean::Arithmetic) => {
            // Several sums at a time: what lies past the block's end is zero.
            let mut sums = [0f64; 8];
            for changes in changes.as_chunks::<8>().0 {
                sums.iter_mut().zip(changes).for_each(|(sum, change)| *sum += f64::from(*change));
            }
            sums.iter().sum()
        }
        Some(ChangeMean::Geometric) => {
            changes[..len].iter().map(|change| f64::from(change.max(f32::MIN_POSITIVE)).ln()).sum()
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    const SETTINGS: AdamWStep = AdamWStep {
        learning_rate: 1e-2,
        beta1: 0.8,
        beta2: 0.9,
        epsilon: 1e-6,
        weight_decay: 0.1,
        step: 1,
        phase: VariancePhase::Moving,
    };

    /// A parameter and its moments in f64, updated by the textbook's formulas.
    #[derive(Clone)]
    struct Plain {
        p: Vec<f64>,
        m: Vec<f64>,
        v: Vec<f64>,
        largest: Option<Vec<f64>>,
    }

    impl Plain {
        fn step(&mut self, g: &[f64], s: AdamWStep) -> f64 {
            let mut change = 0.0;
            for i in 0..g.len() {
                self.p[i] *= 1.0 - s.learning_rate * s.weight_decay;
                self.m[i] = s.beta1 * self.m[i] + (1.0 - s.beta1) * g[i];
                let before = self.v[i];
                let (since, floor) = match s.phase {
                    VariancePhase::Frozen { at } => (at, s.epsilon.powf(0.75)),
                    _ => {
                        self.v[i] = s.beta2 * before + (1.0 - s.beta2) * g[i] * g[i];
                        (s.step, s.epsilon)
                    }
                };
                change += match s.phase {
                    VariancePhase::Watched(ChangeMean::Arithmetic) => (self.v[i] - before).abs(),
                    VariancePhase::Watched(ChangeMean::Geometric) => (self.v[i] - before).abs().ln(),
                    _ => 0.0,
                };
                let mut v = self.v[i];
                if let Some(largest) = &mut self.largest {
                    largest[i] = largest[i].max(v);
                    v = largest[i];
                }
                let corrected = (v / (1.0 - s.beta2.powi(since as i32))).sqrt();
                let mean = self.m[i] / (1.0 - s.beta1.powi(s.step as i32));
                self.p[i] -= s.learning_rate * mean / (corrected + floor);
            }
            change
        }
    }

    fn gradient<T: Arithmetic>(len: usize, step: usize) -> Vec<T> {
        (0..len).map(|i| T::from_f32(((i * 31 + step * 17) % 23) as f32 / 10.0 - 1.05)).collect()
    }

    fn trains<T: Arithmetic>(len: usize, amsgrad: bool, mean: ChangeMean, precision: f64) {
        let wide = |values: &[T]| values.iter().map(|v| f64::from(v.to_f32())).collect::<Vec<f64>>();
        let mut p: Vec<T> = gradient(len, 99);
        let (mut m, mut v, mut largest) = (vec![T::ZERO; len], vec![T::ZERO; len], vec![T::ZERO; len]);
        for step in 1..=8u64 {
            let g: Vec<T> = gradient(len, step as usize);
            let phase = match step {
                1..=3 => VariancePhase::Watched(mean),
                4 => VariancePhase::Moving,
                _ => VariancePhase::Frozen { at: 4 },
            };
            let settings = AdamWStep { step, phase, ..SETTINGS };
            // From the same state each step, so that roundings do not add up.
            let mut plain = Plain { p: wide(&p), m: wide(&m), v: wide(&v), largest: amsgrad.then(|| wide(&largest)) };
            let expected = plain.step(&wide(&g), settings);
            let moments = Moments { mean: &mut m, variance: &mut v, largest: amsgrad.then_some(&mut largest[..]) };
            let found = update(&mut p, &g, moments, settings).unwrap();
            assert!((found - expected).abs() <= 1e-4 * expected.abs() + 1e-6, "step {step}: {found}, not {expected}");
            let state = [(&p, &plain.p), (&m, &plain.m), (&v, &plain.v)];
            for (found, expected) in state.into_iter().chain(plain.largest.iter().map(|l| (&largest, l))) {
                for (found, expected) in wide(found).iter().zip(expected) {
                    let allowed = precision * expected.abs().max(0.01);
                    assert!((found - expected).abs() <= allowed, "step {step}: {found}, not {expected}");
                }
            }
        }
    }

    #[test]
    fn a_step_is_that_of_the_formulas_in_every_phase() {
        for (len, amsgrad) in [(0, false), (1, true), (BLOCK + 3, false), (BLOCK + 3, true), (2 * TASK + 5, false)] {
            for mean in [ChangeMean::Arithmetic, ChangeMean::Geometric] {
                trains::<f32>(len, amsgrad, mean, 2e-5);
            }
        }
        trains::<bf16>(100, true, ChangeMean::Arithmetic, 2f64.powi(-7));
        trains::<f16>(100, true, ChangeMean::Arithmetic, 2f64.powi(-9));
    }

    #[test]
    fn a_frozen_variance_stays_whatever_the_gradient_is() {
        let (mut p, mut m, mut v) = ([1f32; 2], [0f32; 2], [0.5, 0.25]);
        let phase = VariancePhase::Frozen { at: 3 };
        let moments = Moments { mean: &mut m, variance: &mut v, largest: None };
        let settings = AdamWStep { phase, step: 9, ..SETTINGS };
        assert_eq!(update(&mut p, &[f32::INFINITY, 1.0], moments, settings).unwrap(), 0.0);
        assert_eq!(v, [0.5, 0.25]);
    }

    #[test]
    fn lengths_are_checked() {
        let fails = |g: usize, m: usize, v: usize, l: usize| {
            let (mut m, mut v, mut l) = (vec![0f32; m], vec![0f32; v], vec![0f32; l]);
            let moments = Moments { mean: &mut m, variance: &mut v, largest: Some(&mut l) };
            matches!(update(&mut [0f32; 2], &vec![0f32; g], moments, SETTINGS), Err(Error::Length { expected: 2, .. }))
        };
        assert!(fails(1, 2, 2, 2) && fails(2, 3, 2, 2) && fails(2, 2, 0, 2) && fails(2, 2, 2, 1));
        assert!(!fails(2, 2, 2, 2));
    }
}
