//! The layer that trains with a 2:4 activation and a dense weight.

use rayon::prelude::*;

use super::{
    Accumulate, InputActivation, PrunedGradient, SparseActivationSettings,
    activation::{elements, expect_length},
};
use crate::{
    Arithmetic, Compressed, Element, Mask, MatrixRef, Result,
    kernel::{DenseRef, Engine, Epilogue, KernelElement, SparseWeight},
    select,
};

/// A trainable linear layer over a pruned input, `y = P(f(x)) · Wᵀ + bias`: `f` is the layer's [`InputActivation`], and
/// `P` keeps a 2:4 mask that is chosen for every input, along tokens and along features at once.
///
/// The forward product and the weight gradient are sparse, the input gradient is dense. `W` is `[out_features,
/// in_features]` and belongs to the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SparseActivationLinear {
    settings: SparseActivationSettings,
}

/// A pruned input `[tokens, in_features]`, packed along its features and along its tokens: what the forward pass leaves
/// to the backward pass.
#[derive(Debug, Clone)]
pub struct PackedActivation<T: KernelElement> {
    mask: Mask,
    rows: SparseWeight<T>,
    columns: SparseWeight<T>,
}

impl<T: KernelElement> PackedActivation<T> {
    /// The mask, `[tokens, in_features]`.
    pub fn mask(&self) -> &Mask {
        &self.mask
    }

    /// The pruned input, compressed along features, as a copy: `[tokens, in_features]`.
    pub fn packed(&self) -> Compressed<T> {
        self.rows.to_compressed()
    }

    /// Its transpose, compressed along tokens, as a copy: `[in_features, tokens]`.
    pub fn packed_transpose(&self) -> Compressed<T> {
        self.columns.to_compressed()
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.mask.rows()
    }

    /// Number of input features.
    pub fn in_features(&self) -> usize {
        self.mask.cols()
    }
}

impl SparseActivationLinear {
    /// A layer with these settings.
    pub fn new(settings: SparseActivationSettings) -> Self {
        Self { settings }
    }

    /// The settings.
    pub fn settings(&self) -> SparseActivationSettings {
        self.settings
    }

    /// Applies the layer's activation to an input `[tokens, in_features]`, prunes the result and packs it both ways.
    ///
    /// # Errors
    /// [`crate::Error::Length`], [`crate::Error::NotANumber`] with the place of the first NaN.
    pub fn pack<T: KernelElement>(&self, x: &[T], tokens: usize, in_features: usize) -> Result<PackedActivation<T>> {
        expect_length("the input", elements(tokens, in_features)?, x.len())?;
        let squared: Vec<T>;
        let values = match self.settings.activation {
            InputActivation::Identity => x,
            InputActivation::SquaredRelu => {
                squared = x.par_iter().map(|x| T::from_f32(squared_relu(x.to_f32()))).collect();
                &squared
            }
        };
        let matrix = MatrixRef::new(tokens, in_features, values)?;
        let mask = select::transposable(matrix, self.settings.rule)?;
        let transposed = matrix.transposed();
        let transposed = MatrixRef::new(in_features, tokens, &transposed)?;
        Ok(PackedActivation {
            rows: SparseWeight::pack(Compressed::from_masked(matrix, &mask)?)?,
            columns: SparseWeight::pack(Compressed::from_masked(transposed, &mask.transposed())?)?,
            mask,
        })
    }

    /// `y = P(f(x)) · Wᵀ + bias` for a packed input. Products accumulate in f32.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where the weight has other input features, [`crate::Error::Length`] where a slice does
    /// not fit.
    pub fn forward<T: KernelElement>(
        &self,
        x: &PackedActivation<T>,
        weight: MatrixRef<'_, T>,
        bias: Option<&[f32]>,
        y: &mut [T],
    ) -> Result<()> {
        let (tokens, out_features) = (x.tokens(), weight.rows());
        expect_features(x, weight)?;
        expect_length("the output", elements(tokens, out_features)?, y.len())?;
        if let Some(bias) = bias {
            expect_length("the bias", out_features, bias.len())?;
        }
        if y.is_empty() {
            return Ok(());
        }
        // The kernels take the packed operand as a weight: the product is the transpose of y.
        let mut product = vec![T::ZERO; y.len()];
        x.rows.linear(weight.data(), out_features, Epilogue::default(), &mut product)?;
        y.par_chunks_mut(out_features).enumerate().for_each(|(token, y)| {
            for (feature, y) in y.iter_mut().enumerate() {
                let value = product[feature * tokens + token];
                *y = match bias {
                    Some(bias) => T::from_f32(value.to_f32() + bias[feature]),
                    None => value,
                };
            }
        });
        Ok(())
    }

    /// The weight gradient `dw = dyᵀ · P(f(x))`. Products accumulate in f32 and are rounded to `T` before they are
    /// stored or added.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where a slice does not fit.
    pub fn weight_gradient<T: KernelElement, G: Arithmetic>(
        &self,
        dy: &[T],
        x: &PackedActivation<T>,
        accumulate: Accumulate,
        dw: &mut [G],
    ) -> Result<()> {
        let (tokens, in_features) = (x.tokens(), x.in_features());
        if in_features == 0 || tokens == 0 {
            if accumulate == Accumulate::Overwrite {
                dw.fill(G::ZERO);
            }
            return Ok(());
        }
        let out_features = dw.len() / in_features;
        expect_length("the weight gradient", elements(out_features, in_features)?, dw.len())?;
        expect_length("the output gradient", elements(tokens, out_features)?, dy.len())?;
        let transposed = MatrixRef::new(tokens, out_features, dy)?.transposed();
        let mut product = vec![T::ZERO; dw.len()];
        x.columns.linear(&transposed, out_features, Epilogue::default(), &mut product)?;
        dw.par_iter_mut().zip(&product).for_each(|(dw, added)| {
            *dw = match accumulate {
                Accumulate::Overwrite => G::from_f32(added.to_f32()),
                Accumulate::Add => G::from_f32(dw.to_f32() + added.to_f32()),
            };
        });
        Ok(())
    }

    /// The input gradient `dx = (dy · W) ⊙ f'(x)`, masked where the settings say so. `x` is what was packed, before the
    /// layer's activation.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] where the weight has other input features, [`crate::Error::Length`] where a slice does
    /// not fit.
    pub fn input_gradient<T: KernelElement>(
        &self,
        dy: &[T],
        weight: MatrixRef<'_, T>,
        x: &[T],
        packed: &PackedActivation<T>,
        dx: &mut [T],
    ) -> Result<()> {
        let (tokens, in_features) = (packed.tokens(), packed.in_features());
        expect_features(packed, weight)?;
        expect_length("the input", elements(tokens, in_features)?, x.len())?;
        DenseRef::new(weight, Engine::best()?)?.input_gradient(dy, tokens, dx)?;
        if self.settings == (SparseActivationSettings { rule: self.settings.rule, ..Default::default() }) {
            return Ok(());
        }
        dx.par_chunks_mut(in_features.max(1)).enumerate().for_each(|(token, dx)| {
            for (col, (dx, x)) in dx.iter_mut().zip(&x[token * in_features..]).enumerate() {
                if self.settings.input_gradient == PrunedGradient::Masked && !packed.mask.is_kept(token, col) {
                    *dx = T::ZERO;
                } else if self.settings.activation == InputActivation::SquaredRelu {
                    *dx = T::from_f32(dx.to_f32() * squared_relu_slope(x.to_f32()));
                }
            }
        });
        Ok(())
    }

    /// The bias gradient: the sums of the columns of `dy`, in f32.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where a slice does not fit.
    pub fn bias_gradient<T: Element, G: Arithmetic>(
        &self,
        dy: &[T],
        tokens: usize,
        accumulate: Accumulate,
        db: &mut [G],
    ) -> Result<()> {
        super::bias_gradient(dy, tokens, accumulate, db)
    }
}

/// `max(x, 0)²`; NaN stays NaN.
fn squared_relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x * x }
}

/// Its derivative.
fn squared_relu_slope(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { 2.0 * x }
}

fn expect_features<T: KernelElement>(x: &PackedActivation<T>, weight: MatrixRef<'_, T>) -> Result<()> {
    if x.in_features() == weight.cols() {
        return Ok(());
    }
    let (expected, found) = ((weight.rows(), x.in_features()), (weight.rows(), weight.cols()));
    Err(crate::Error::Shape { what: "the weight", expected, found })
}
