//! What happens to a product before it is stored: bias and activation.

/// A pointwise function applied to a product plus bias, in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Activation {
    /// None.
    #[default]
    Identity,
    /// `max(x, 0)`; NaN stays NaN.
    Relu,
    /// The exact GELU, `x/2 · (1 + erf(x/√2))` (Hendrycks and Gimpel, 2016).
    Gelu,
    /// `x / (1 + exp(-x))`, also called swish.
    Silu,
}

impl Activation {
    /// Every activation.
    pub const ALL: [Activation; 4] = [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::Silu];

    /// The name, as in `gelu`.
    pub fn name(self) -> &'static str {
        match self {
            Activation::Identity => "identity",
            Activation::Relu => "relu",
            Activation::Gelu => "gelu",
            Activation::Silu => "silu",
        }
    }

    /// The function's value.
    #[inline]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Activation::Identity => x,
            // Not f32::max, which would turn NaN into 0.
            Activation::Relu => {
                if x < 0.0 {
                    0.0
                } else {
                    x
                }
            }
            Activation::Gelu => 0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2)),
            Activation::Silu => x / (1.0 + (-x).exp()),
        }
    }
}

/// `y = activation(product + bias)`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Epilogue<'a> {
    /// One value per output feature.
    pub bias: Option<&'a [f32]>,
    /// The activation.
    pub activation: Activation,
}

impl Epilogue<'_> {
    /// Makes of the products of consecutive output features, from `first` on, what is to be stored.
    #[inline(always)]
    pub(crate) fn apply(&self, products: &mut [f32], first: usize) {
        if let Some(bias) = self.bias {
            products.iter_mut().zip(&bias[first..]).for_each(|(product, bias)| *product += bias);
        }
        match self.activation {
            Activation::Identity => {}
            Activation::Relu => products.iter_mut().for_each(|v| *v = Activation::Relu.apply(*v)),
            other => products.iter_mut().for_each(|v| *v = other.apply(*v)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn activations_have_their_values() {
        use Activation::*;
        // erf(1/√2) = 0.682689492...
        assert!((Gelu.apply(1.0) - 0.841_344_8).abs() < 1e-6);
        assert!((Silu.apply(1.0) - 0.731_058_6).abs() < 1e-6);
        assert_eq!((Relu.apply(-2.0), Relu.apply(2.0), Identity.apply(-2.0)), (0.0, 2.0, -2.0));
        assert!(Activation::ALL.iter().all(|a| a.apply(f32::NAN).is_nan()));
        assert_eq!(Silu.apply(-200.0), -0.0);
    }
}
