//! Element-wise activations and their derivatives.

use twofour::kernel::Activation;

use super::nonlinearity;
use crate::operands::Nonlinearity;

/// Writes the activation of `x` to `y`.
pub fn forward(activation: Activation, x: &[f32], y: &mut [f32]) {
    match function(activation) {
        None => y.copy_from_slice(x),
        Some(function) => nonlinearity::forward(function, x, y),
    }
}

/// Multiplies `dy`, the gradient for the activation of `x`, by its derivative.
pub fn backward_in_place(activation: Activation, x: &[f32], dy: &mut [f32]) {
    if let Some(function) = function(activation) {
        nonlinearity::gradient_in_place(function, x, dy);
    }
}

/// The function of an activation; none of the identity.
fn function(activation: Activation) -> Option<Nonlinearity> {
    match activation {
        Activation::Identity => None,
        Activation::Relu => Some(Nonlinearity::Relu),
        Activation::Gelu => Some(Nonlinearity::Gelu),
        Activation::Silu => Some(Nonlinearity::Silu),
    }
}
