//! The least value of a convex function: limited-memory BFGS (Liu and Nocedal, 1989; Algorithm 7.5 of Nocedal and
//! Wright).

use std::collections::VecDeque;

/// Pairs of steps and changes of the gradient that approximate the curvature.
const PAIRS: usize = 10;

/// The share of the decrease that the slope promises which a step must have (Armijo).
const DECREASE: f64 = 1e-4;

/// A step with the change of the gradient over it, and the inverse of their dot product.
struct Pair {
    step: Vec<f64>,
    change: Vec<f64>,
    rho: f64,
}

/// Minimizes `function`, which returns a value and its gradient, from `x`: until the largest derivative is at most
/// `tolerance`, no step decreases the value, or `most` iterations are done. Returns the place and the number of
/// iterations.
pub(super) fn minimize(
    mut x: Vec<f64>,
    most: usize,
    tolerance: f64,
    function: impl Fn(&[f64]) -> (f64, Vec<f64>),
) -> (Vec<f64>, usize) {
    let (mut value, mut gradient) = function(&x);
    let mut pairs: VecDeque<Pair> = VecDeque::with_capacity(PAIRS);
    for iteration in 0..most {
        if gradient.iter().all(|derivative| derivative.abs() <= tolerance) {
            return (x, iteration);
        }
        let mut direction = direction(&gradient, &pairs);
        let mut slope = dot(&direction, &gradient);
        if slope >= 0.0 {
            // Rounding has spoilt the curvature: steepest descent.
            pairs.clear();
            direction = gradient.iter().map(|derivative| -derivative).collect();
            slope = dot(&direction, &gradient);
        }
        let mut length = if pairs.is_empty() { 1.0 / dot(&gradient, &gradient).sqrt().max(1.0) } else { 1.0 };
        let found = loop {
            let to: Vec<f64> = x.iter().zip(&direction).map(|(x, d)| x + length * d).collect();
            let (found, derivatives) = function(&to);
            if found <= value + DECREASE * length * slope {
                break Some((to, found, derivatives));
            }
            length *= 0.5;
            if length < 1e-12 {
                break None;
            }
        };
        let Some((to, found, derivatives)) = found else { return (x, iteration) };
        let step: Vec<f64> = to.iter().zip(&x).map(|(to, from)| to - from).collect();
        let change: Vec<f64> = derivatives.iter().zip(&gradient).map(|(to, from)| to - from).collect();
        let curvature = dot(&step, &change);
        // Of a convex function it is not negative, but for rounding.
        if curvature > 1e-14 * dot(&change, &change) {
            if pairs.len() == PAIRS {
                pairs.pop_front();
            }
            pairs.push_back(Pair { step, change, rho: 1.0 / curvature });
        }
        (x, value, gradient) = (to, found, derivatives);
    }
    (x, most)
}

/// The gradient times the negated approximation of the inverse curvature, by the two-loop recursion.
fn direction(gradient: &[f64], pairs: &VecDeque<Pair>) -> Vec<f64> {
    let mut direction: Vec<f64> = gradient.iter().map(|derivative| -derivative).collect();
    let mut factors = Vec::with_capacity(pairs.len());
    for Pair { step, change, rho } in pairs.iter().rev() {
        let factor = rho * dot(step, &direction);
        add(&mut direction, -factor, change);
        factors.push(factor);
    }
    if let Some(Pair { change, rho, .. }) = pairs.back() {
        let scale = 1.0 / (rho * dot(change, change));
        direction.iter_mut().for_each(|value| *value *= scale);
    }
    for (Pair { step, change, rho }, factor) in pairs.iter().zip(factors.into_iter().rev()) {
        let correction = factor - rho * dot(change, &direction);
        add(&mut direction, correction, step);
    }
    direction
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], factor: f64, other: &[f64]) {
    to.iter_mut().zip(other).for_each(|(to, other)| *to += factor * other);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_minimum_of_a_badly_scaled_quadratic_and_of_a_quartic() {
        let scales: Vec<f64> = (0..40).map(|i| 10f64.powf(f64::from(i) / 13.0)).collect();
        let quadratic = |x: &[f64]| {
            let value = x.iter().zip(&scales).map(|(x, s)| 0.5 * s * (x - 1.0).powi(2)).sum();
            (value, x.iter().zip(&scales).map(|(x, s)| s * (x - 1.0)).collect::<Vec<_>>())
        };
        let (x, iterations) = minimize(vec![0.0; 40], 500, 1e-9, quadratic);
        assert!(iterations < 500 && x.iter().all(|x| (x - 1.0).abs() < 1e-8), "{iterations}: {x:?}");
        let quartic = |x: &[f64]| ((x[0] - 2.0).powi(4), vec![4.0 * (x[0] - 2.0).powi(3)]);
        let (x, _) = minimize(vec![10.0], 500, 1e-9, quartic);
        assert!((x[0] - 2.0).abs() < 1e-2, "{x:?}");
    }

    #[test]
    fn ends_where_it_begins_at_a_minimum() {
        assert_eq!(minimize(vec![3.0], 10, 1e-9, |x| ((x[0] - 3.0).powi(2), vec![2.0 * (x[0] - 3.0)])), (vec![3.0], 0));
    }
}
