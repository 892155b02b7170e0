//! Linear layers that are dense, 2:4 for training, or 2:4 compressed for inference.
//!
//! A model holds [`AnyLinear`] where it would hold `candle_nn::Linear`, and says by what name ([`HasLinears`]). Then
//! the functions of this module turn its layers from one form into another, by name:
//!
//! | function | from | to |
//! |---|---|---|
//! | [`sparsify`], [`swap_linear_with_semi_sparse_linear`] | dense | [`SparseLinear`], sharing the parameters |
//! | [`swap_semi_sparse_linear_with_linear`] | sparse | dense, sharing the parameters, which are pruned |
//! | [`compress_linears`] | sparse, or dense and 2:4 already | [`CompressedLinear`], a copy of half the size |
//!
//! | product | dense | sparse | compressed |
//! |---|---|---|---|
//! | forward | dense | through the packed weight | through the packed weight |
//! | input gradient | dense | through the packed weight | through the packed weight (floats) |
//! | weight gradient | dense | dense, masked or sparse by MVUE, to the master | none |
//!
//! [`SparseActivationLinear`] prunes the layer's input instead of its weight.
//!
//! With the feature `cuda`, dense and sparse layers compute on CUDA tensors, too; a compressed layer computes on the
//! CPU.
//!
//! [`LinearOperand`] is the same layer on slices, for operators that span more than one layer. For models whose layers
//! are fixed as `candle_nn::Linear`, [`prune_on_load`] prunes their weights while they load.

mod compressed;
mod named;
mod names;
mod operand;
mod operator;
mod prune_on_load;
mod sparse;
mod sparse_activation;
mod state;
mod trainable;
mod weight;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module};
use half::{bf16, f16};
use twofour::{Compressed, DataType, MatrixRef};

use crate::Result;

pub use compressed::{CompressedElement, CompressedLinear};
pub use named::{
    HasLinears, SparsifyConfig, compress_linears, linear_names, set_mode, sparsify,
    swap_linear_with_semi_sparse_linear, swap_semi_sparse_linear_with_linear, visit_field,
};
pub use operand::LinearOperand;
pub use prune_on_load::{PruneOnLoad, prune_on_load};
pub use sparse::{Mode, Refresh, SparseLinear, SparseSettings};
pub use sparse_activation::SparseActivationLinear;
pub use state::{load_masks, masks};
pub use twofour::layer::{
    InputActivation, InputGradient, MaskRule, PrunedGradient, SparseActivationSettings, WeightGradient,
};

/// A linear layer, `y = x·Wᵀ + bias`, in one of its forms. `x` is `[.., in]`, `y` is `[.., out]`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use twofour_candle::linear::{AnyLinear, SparseSettings};
/// let parameters = VarMap::new();
/// let vb = VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
/// let dense = AnyLinear::from(candle_nn::linear(128, 256, vb)?);
/// let sparse = dense.sparse(SparseSettings::default())?;
/// let y = sparse.forward(&Tensor::ones((2, 7, 128), DType::F32, &Device::Cpu)?)?;
/// assert_eq!(y.dims(), [2, 7, 256]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub enum AnyLinear {
    /// Dense: any dtype and device that candle computes on.
    Dense(Linear),
    /// 2:4 and trainable.
    Sparse(SparseLinear),
    /// 2:4 and compressed, for inference.
    Compressed(CompressedLinear),
}

impl From<Linear> for AnyLinear {
    fn from(linear: Linear) -> Self {
        AnyLinear::Dense(linear)
    }
}

impl From<SparseLinear> for AnyLinear {
    fn from(linear: SparseLinear) -> Self {
        AnyLinear::Sparse(linear)
    }
}

impl From<CompressedLinear> for AnyLinear {
    fn from(linear: CompressedLinear) -> Self {
        AnyLinear::Compressed(linear)
    }
}

impl AnyLinear {
    /// "dense", "sparse" or "compressed".
    pub fn form(&self) -> &'static str {
        match self {
            AnyLinear::Dense(_) => "dense",
            AnyLinear::Sparse(_) => "sparse",
            AnyLinear::Compressed(_) => "compressed",
        }
    }

    /// Number of outputs and number of inputs.
    ///
    /// # Errors
    /// A dense layer whose weight is not a matrix.
    pub fn dims(&self) -> Result<(usize, usize)> {
        match self {
            AnyLinear::Dense(linear) => Ok(linear.weight().dims2()?),
            AnyLinear::Sparse(linear) => Ok(linear.weight().dims2()?),
            AnyLinear::Compressed(linear) => Ok(linear.dims()),
        }
    }

    /// The weight `[out, in]` as a tensor: of a sparse layer the dense master; `None` of a compressed layer.
    pub fn weight(&self) -> Option<&Tensor> {
        match self {
            AnyLinear::Dense(linear) => Some(linear.weight()),
            AnyLinear::Sparse(linear) => Some(linear.weight()),
            AnyLinear::Compressed(_) => None,
        }
    }

    /// The bias `[out]` as a tensor; `None` where there is none, and of a compressed layer.
    pub fn bias(&self) -> Option<&Tensor> {
        match self {
            AnyLinear::Dense(linear) => linear.bias(),
            AnyLinear::Sparse(linear) => linear.bias(),
            AnyLinear::Compressed(_) => None,
        }
    }

    /// Bytes of the weight as the forward product reads it: dense values, or packed values and metadata.
    pub fn weight_bytes(&self) -> usize {
        match self {
            AnyLinear::Dense(linear) => linear.weight().elem_count() * linear.weight().dtype().size_in_bytes(),
            AnyLinear::Sparse(linear) => linear.packed_bytes(),
            AnyLinear::Compressed(linear) => linear.packed_bytes(),
        }
    }

    /// The layer's products on f32 slices, for one forward pass and its backward pass. For a sparse layer in
    /// [`Mode::Train`] this is a forward pass, which may refresh its mask.
    ///
    /// # Errors
    /// A weight that is not on the CPU; a dense or sparse one that is not f32.
    pub fn operand(&self) -> Result<LinearOperand> {
        if let Some(weight) = self.weight().filter(|w| w.dtype() != DType::F32) {
            return Err(crate::Error::DType {
                what: "the weight of a layer inside another operator",
                found: weight.dtype(),
                expected: "F32".to_owned(),
            });
        }
        match self {
            AnyLinear::Dense(linear) => dense_operand(linear),
            AnyLinear::Sparse(linear) => linear.operand(),
            AnyLinear::Compressed(linear) => Ok(linear.operand()),
        }
    }

    /// `y = x·Wᵀ + bias` for `x` of shape `[.., in]`, with gradients on candle's tape. What [`Module::forward`] does,
    /// with this crate's error.
    ///
    /// # Errors
    /// An input of another dtype than the weight (a compressed layer takes f32, bf16 and f16), of another last
    /// dimension, or on another device.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            AnyLinear::Dense(linear) => {
                let ours = |t: &Tensor| t.device().is_cpu() && t.dtype() == DType::F32;
                if ours(x) && ours(linear.weight()) && linear.bias().is_none_or(ours) {
                    operator::apply(dense_operand(linear)?, x)
                } else {
                    Ok(linear.forward(x)?)
                }
            }
            AnyLinear::Sparse(linear) => linear.apply(x),
            AnyLinear::Compressed(linear) => operator::apply(linear.operand(), x),
        }
    }

    /// A sparse layer over the same parameters; of one that is sparse already, with new settings and a new mask.
    ///
    /// # Errors
    /// A compressed layer, which has no master; what [`SparseLinear::new`] refuses.
    pub fn sparse(&self, settings: SparseSettings) -> Result<AnyLinear> {
        match self.weight() {
            Some(weight) => Ok(AnyLinear::Sparse(SparseLinear::new(weight.clone(), self.bias().cloned(), settings)?)),
            None => Err(compressed_is_final()),
        }
    }

    /// A dense layer that computes what this one does: of a sparse layer with [`AnyLinear::effective_weight`], a copy
    /// that no optimizer knows; the master stays as it is. The bias is shared.
    ///
    /// # Errors
    /// A compressed layer, which has no master.
    pub fn dense(&self) -> Result<AnyLinear> {
        match self {
            AnyLinear::Dense(_) => Ok(self.clone()),
            _ => Ok(AnyLinear::Dense(Linear::new(self.effective_weight()?, self.bias().cloned()))),
        }
    }

    /// A compressed copy for inference on the CPU: of a sparse layer with its present mask, of a dense one if its
    /// weight is 2:4 along rows already. `dtype` is f32 (17/32 of the dense f32 weight's bytes), bf16 or f16 (9/16 of
    /// the dense weight's in the same type), or i8 (a scale for each row; inputs are quantized to 8 bits for each
    /// token).
    ///
    /// # Errors
    /// [`twofour::Error::UnsupportedDType`] for another dtype;
    /// [`twofour::Error::TooManyKept`] for a dense weight that is not 2:4, a layer that is compressed already.
    pub fn compressed(&self, dtype: DataType) -> Result<AnyLinear> {
        let sparse = match self {
            AnyLinear::Compressed(_) => return Err(compressed_is_final()),
            AnyLinear::Sparse(linear) => linear.clone(),
            AnyLinear::Dense(linear) => {
                sparse::check_parameters(linear.weight(), linear.bias())?;
                let weight = linear.weight().to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
                let (rows, cols) = weight.dims2()?;
                crate::float::with_elements::<f32, _>("the weight", &weight, |data| {
                    Compressed::from_dense(MatrixRef::new(rows, cols, data)?)?;
                    Ok(())
                })?;
                SparseLinear::new(linear.weight().clone(), linear.bias().cloned(), SparseSettings::default())?
            }
        };
        let bias = sparse.bias().map(|bias| bias.to_device(&Device::Cpu)).transpose()?;
        let bias = bias.as_ref();
        Ok(AnyLinear::Compressed(match dtype {
            DataType::F32 => CompressedLinear::new(sparse.compressed_weight::<f32>()?, bias)?,
            DataType::BF16 => CompressedLinear::new(sparse.compressed_weight::<bf16>()?, bias)?,
            DataType::F16 => CompressedLinear::new(sparse.compressed_weight::<f16>()?, bias)?,
            DataType::I8 => CompressedLinear::quantized(&sparse.compressed_weight::<f32>()?, bias)?,
            other => {
                let supported = "f32, bf16, f16, i8";
                let operation = "compressing a linear layer";
                return Err(twofour::Error::UnsupportedDType { operation, dtype: other, supported }.into());
            }
        }))
    }

    /// The weight as the forward product sees it, dense: of a sparse layer with its pruned elements zero. Detached.
    ///
    /// # Errors
    /// A compressed layer.
    pub fn effective_weight(&self) -> Result<Tensor> {
        match self {
            AnyLinear::Dense(linear) => Ok(linear.weight().detach()),
            AnyLinear::Sparse(linear) => linear.effective_weight(),
            AnyLinear::Compressed(_) => Err(compressed_is_final()),
        }
    }
}

impl Module for AnyLinear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.apply(x)?)
    }
}

fn dense_operand(linear: &Linear) -> Result<LinearOperand> {
    sparse::check_parameters(linear.weight(), linear.bias())?;
    let (out_features, in_features) = linear.weight().dims2()?;
    // Recorded on the tape, so that a weight that is a view still gets its gradient.
    let weight = linear.weight().contiguous()?;
    Ok(LinearOperand {
        product: weight::Weight::Dense(weight.clone()),
        bias_values: operand::bias_values(linear.bias())?,
        out_features,
        in_features,
        weight: Some(weight),
        bias: linear.bias().cloned(),
    })
}

fn compressed_is_final() -> crate::Error {
    crate::Error::WrongForm {
        found: "compressed, without a dense master",
        remedy: "keep the layer it was made from, or load the dense weights",
    }
}

#[cfg(test)]
mod tests;
