//! Activations apart from a product: where the pre-activation is stored, and in the backward pass.

use rayon::prelude::*;

use crate::{Arithmetic, Error, Result, kernel::Activation};

/// Elements that one task takes.
const TASK: usize = 1 << 14;

/// `y = activation(pre)`, element by element in f32.
///
/// # Errors
/// [`Error::Length`] where the lengths differ.
pub fn activate<T: Arithmetic>(activation: Activation, pre: &[T], y: &mut [T]) -> Result<()> {
    expect_length("the activation", pre.len(), y.len())?;
    y.par_chunks_mut(TASK).zip(pre.par_chunks(TASK)).for_each(|(y, pre)| {
        y.iter_mut().zip(pre).for_each(|(y, pre)| *y = T::from_f32(activation.apply(pre.to_f32())));
    });
    Ok(())
}

/// `dy ← dy · activation'(pre)`, element by element in f32: turns the gradient of a layer's output into that of its
/// pre-activation, which the other gradients are computed from. The derivative of ReLU at 0 is 0.
///
/// # Errors
/// [`Error::Length`] where the lengths differ.
pub fn activation_gradient<T: Arithmetic>(activation: Activation, pre: &[T], dy: &mut [T]) -> Result<()> {
    expect_length("the output gradient", pre.len(), dy.len())?;
    if activation == Activation::Identity {
        return Ok(());
    }
    dy.par_chunks_mut(TASK).zip(pre.par_chunks(TASK)).for_each(|(dy, pre)| {
        dy.iter_mut()
            .zip(pre)
            .for_each(|(dy, pre)| *dy = T::from_f32(dy.to_f32() * derivative(activation, pre.to_f32())));
    });
    Ok(())
}

/// The derivative of an activation.
fn derivative(activation: Activation, x: f32) -> f32 {
    match activation {
        Activation::Identity => 1.0,
        Activation::Relu => {
            if x > 0.0 {
                1.0
            } else {
                0.0
            }
        }
        Activation::Gelu => {
            let cumulative = 0.5 * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2));
            // 1 / √(2π).
            let density = 0.398_942_3 * (-0.5 * x * x).exp();
            // At infinity the density wins over x.
            if density == 0.0 { cumulative } else { cumulative + x * density }
        }
        Activation::Silu => {
            let sigmoid = 1.0 / (1.0 + (-x).exp());
            let slope = sigmoid * (1.0 - sigmoid);
            if slope == 0.0 { sigmoid } else { sigmoid + x * slope }
        }
    }
}

pub(super) fn expect_length(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}

/// `rows * cols`, checked.
pub(super) fn elements(rows: usize, cols: usize) -> Result<usize> {
    rows.checked_mul(cols).ok_or_else(|| Error::TooLarge { shape: vec![rows, cols] })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Activation; 4] = [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::Silu];

    #[test]
    fn derivatives_agree_with_differences() {
        for activation in ALL {
            for i in -60..60 {
                let x = i as f32 * 0.1 + 0.05;
                let h = 1e-2f32;
                let numeric = (activation.apply(x + h) - activation.apply(x - h)) / (2.0 * h);
                let found = derivative(activation, x);
                assert!((numeric - found).abs() < 2e-3, "{activation:?} at {x}: {found}, by differences {numeric}");
            }
        }
    }

    #[test]
    fn infinities_have_their_limits_and_lengths_are_checked() {
        for activation in [Activation::Relu, Activation::Gelu, Activation::Silu] {
            assert_eq!((derivative(activation, f32::INFINITY), derivative(activation, f32::NEG_INFINITY)), (1.0, 0.0));
        }
        let mut dy = [2.0f32, 2.0];
        activation_gradient(Activation::Relu, &[1.0, -1.0], &mut dy).unwrap();
        assert_eq!(dy, [2.0, 0.0]);
        let mut y = [0.0f32; 2];
        activate(Activation::Relu, &[1.0, -1.0], &mut y).unwrap();
        assert_eq!(y, [1.0, 0.0]);
        assert!(activate(Activation::Relu, &[1.0f32], &mut y).is_err());
        assert!(activation_gradient(Activation::Relu, &[1.0f32], &mut dy).is_err());
    }
}
