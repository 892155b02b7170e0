//! The layer over 2:4 activations on candle's tensors.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, Shape, Tensor, WithDType};
use candle_nn::Module;
use twofour::{
    Mask, MatrixRef,
    layer::{self, Accumulate, PackedActivation, SparseActivationSettings},
};

use super::{
    operator::{elements, expect_input, rows, storage_dtype, with_last},
    sparse::check_parameters,
};
use crate::float::{Float, for_float, with_elements};
use crate::tape::{Arguments, CpuArgument, Gradients, TapeOperator, record};
use crate::{Error, Result};

const INPUT: &str = "the input of a linear layer";
const GRADIENT: &str = "the gradient of a linear layer";

/// A trainable linear layer over a pruned input, `y = P(f(x))·Wᵀ + bias`: `f` is the layer's
/// [`InputActivation`](layer::InputActivation), and `P` keeps a 2:4 mask that is chosen for every input, along tokens
/// and along features at once (Haziza et al., "Accelerating Transformer Inference and Training with 2:4 Activation
/// Sparsity", 2025).
///
/// The weight `[out, in]` is dense. Leading dimensions of `x` `[.., in]` count as one, tokens. Forward pass and weight
/// gradient are sparse products, the input gradient is a dense one. Products are those of
/// [`twofour::layer::SparseActivationLinear`], on the CPU for f32, bf16 and f16, and, with the feature `cuda`, of
/// `twofour_cuda::layer::SparseActivationLinear` for CUDA tensors of bf16 and f16. Weight, bias and input are of one
/// dtype.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::Module;
/// use twofour_candle::SparseActivationLinear;
/// let weight = Tensor::ones((8, 16), DType::F32, &Device::Cpu)?;
/// let layer = SparseActivationLinear::new(weight, None, Default::default())?;
/// let y = layer.forward(&Tensor::ones((2, 4, 16), DType::F32, &Device::Cpu)?)?;
/// // Of each tile of 16 at most 8 inputs are kept; of equal ones the greedy rule finds 7.
/// assert_eq!(y.sum_all()?.to_scalar::<f32>()?, 7.0 * 8.0 * 8.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct SparseActivationLinear {
    weight: Tensor,
    bias: Option<Tensor>,
    settings: SparseActivationSettings,
}

impl SparseActivationLinear {
    /// A layer over a weight `[out, in]` and a bias `[out]`, whose storage it shares with other holders of the tensors.
    ///
    /// # Errors
    /// A weight that is neither on the CPU nor, with the feature `cuda`, on a GPU, or not a matrix of f32, bf16 or f16,
    /// on a GPU of bf16 or f16; a bias that does not fit.
    pub fn new(weight: Tensor, bias: Option<Tensor>, settings: SparseActivationSettings) -> Result<Self> {
        check_parameters(&weight, bias.as_ref())?;
        for_float!("the weight", weight.dtype(), T => { let _: Option<T> = None; Ok(()) })?;
        if weight.device().is_cuda() && weight.dtype() == candle_core::DType::F32 {
            let expected = "BF16 or F16, on a GPU,".to_owned();
            return Err(Error::DType { what: "the weight", found: weight.dtype(), expected });
        }
        Ok(SparseActivationLinear { weight, bias, settings })
    }

    /// The weight.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// The settings.
    pub fn settings(&self) -> SparseActivationSettings {
        self.settings
    }

    /// `y = P(f(x))·Wᵀ + bias`, with gradients on candle's tape.
    ///
    /// # Errors
    /// An input of another dtype than the weight, of another last dimension, or on another device; on the CPU an input
    /// with a NaN, with its place. On a GPU the call does not wait, and [`SparseActivationLinear::mask_of`] reports a
    /// NaN.
    pub fn apply(&self, x: &Tensor) -> Result<Tensor> {
        self.expect(x)?;
        #[cfg(feature = "cuda")]
        if self.weight.device().is_cuda() {
            return crate::cuda::sparse_activation::apply(self.settings, x, &self.weight, self.bias.as_ref());
        }
        let (x, weight) = (x.contiguous()?, self.weight.contiguous()?);
        let operator = Operator { layer: layer::SparseActivationLinear::new(self.settings), packed: Mutex::new(None) };
        let bias = self.bias.as_ref().map(Tensor::contiguous).transpose()?;
        record(operator, Arguments { x: &x, weight: &weight, bias: bias.as_ref() })
    }

    /// The mask of `P(f(x))`, `[tokens, in]`. On a GPU the call waits for it.
    ///
    /// # Errors
    /// Those of [`SparseActivationLinear::apply`]; an input with a NaN, with its place.
    pub fn mask_of(&self, x: &Tensor) -> Result<Mask> {
        self.expect(x)?;
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return crate::cuda::sparse_activation::mask_of(self.settings, x);
        }
        let (tokens, layer) = (rows(x.dims()), layer::SparseActivationLinear::new(self.settings));
        for_float!(INPUT, x.dtype(), T => with_elements::<T, _>(INPUT, x, |x| {
            Ok(layer.pack(x, tokens, self.weight.dim(1)?)?.mask().clone())
        }))
    }

    fn expect(&self, x: &Tensor) -> Result<()> {
        if !x.device().same_device(self.weight.device()) {
            return Err(Error::Device { what: INPUT, found: x.device().location() });
        }
        expect_input(x, self.weight.dtype(), self.weight.dim(1)?)
    }
}

impl Module for SparseActivationLinear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.apply(x)?)
    }
}

/// A packed input of any float.
enum Packed {
    F32(PackedActivation<f32>),
    Bf16(PackedActivation<half::bf16>),
    F16(PackedActivation<half::f16>),
}

/// A float whose packed inputs are one of [`Packed`]'s kinds.
trait Packable: Float {
    fn wrap(packed: PackedActivation<Self>) -> Packed;
    fn of(packed: &Packed) -> Option<&PackedActivation<Self>>;
}

macro_rules! packable {
    ($float:ty, $kind:ident) => {
        impl Packable for $float {
            fn wrap(packed: PackedActivation<Self>) -> Packed {
                Packed::$kind(packed)
            }

            fn of(packed: &Packed) -> Option<&PackedActivation<Self>> {
                match packed {
                    Packed::$kind(packed) => Some(packed),
                    _ => None,
                }
            }
        }
    };
}

packable!(f32, F32);
packable!(half::bf16, Bf16);
packable!(half::f16, F16);

struct Operator {
    layer: layer::SparseActivationLinear,
    /// What the forward pass leaves to the backward pass.
    packed: Mutex<Option<Packed>>,
}

impl Operator {
    fn run_as<T: Packable>(
        &self,
        Arguments { x: (x, layout), weight: (weight, weight_layout), bias }: Arguments<CpuArgument<'_>>,
    ) -> Result<(CpuStorage, Shape)> {
        let (out_features, in_features) = weight_layout.shape().dims2()?;
        let tokens = rows(layout.dims());
        let bias: Option<Vec<f32>> = match bias {
            Some((bias, layout)) => {
                Some(elements::<T>(bias, layout)?.iter().map(|v| twofour::Element::to_f32(*v)).collect())
            }
            None => None,
        };
        let weight = MatrixRef::new(out_features, in_features, elements::<T>(weight, weight_layout)?)?;
        let packed = self.layer.pack(elements::<T>(x, layout)?, tokens, in_features)?;
        let mut y = vec![T::zero(); tokens * out_features];
        self.layer.forward(&packed, weight, bias.as_deref(), &mut y)?;
        *self.packed.lock().unwrap_or_else(PoisonError::into_inner) = Some(T::wrap(packed));
        Ok((T::to_cpu_storage_owned(y), with_last(layout.dims(), out_features)))
    }

    fn gradients_as<T: Packable + WithDType>(
        &self,
        Arguments { x, weight, bias }: Arguments<&Tensor>,
        dy: &Tensor,
    ) -> Result<Gradients> {
        let packed = self.packed.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(packed) = packed.as_ref().and_then(T::of) else {
            let message = format!("{}: a backward pass without a forward pass", Self::NAME);
            return Err(candle_core::Error::Msg(message).into());
        };
        let (out_features, in_features) = weight.dims2()?;
        with_elements::<T, _>(GRADIENT, dy, |dy| {
            let mut gradients = [None, None, None];
            if x.track_op() {
                let mut dx = vec![T::zero(); x.elem_count()];
                with_elements::<T, _>(INPUT, x, |x| {
                    with_elements::<T, _>("the weight", weight, |weight| {
                        let weight = MatrixRef::new(out_features, in_features, weight)?;
                        Ok(self.layer.input_gradient(dy, weight, x, packed, &mut dx)?)
                    })
                })?;
                gradients[0] = Some(Tensor::from_vec(dx, x.shape(), x.device())?);
            }
            if weight.track_op() {
                let mut dw = vec![T::zero(); weight.elem_count()];
                self.layer.weight_gradient(dy, packed, Accumulate::Overwrite, &mut dw)?;
                gradients[1] = Some(Tensor::from_vec(dw, weight.shape(), weight.device())?);
            }
            if let Some(bias) = bias.filter(|bias| bias.track_op()) {
                let mut db = vec![0f32; out_features];
                self.layer.bias_gradient(dy, packed.tokens(), Accumulate::Overwrite, &mut db)?;
                gradients[2] = Some(Tensor::from_vec(db, bias.shape(), bias.device())?.to_dtype(bias.dtype())?);
            }
            Ok(gradients)
        })
    }
}

impl TapeOperator for Operator {
    const NAME: &str = "sparse activation linear";

    fn on_cpu(&self, arguments: Arguments<CpuArgument<'_>>) -> Result<(CpuStorage, Shape)> {
        for_float!(INPUT, storage_dtype(arguments.x.0), T => self.run_as::<T>(arguments))
    }

    fn gradients(&self, arguments: Arguments<&Tensor>, dy: &Tensor) -> Result<Gradients> {
        for_float!(GRADIENT, arguments.x.dtype(), T => self.gradients_as::<T>(arguments, dy))
    }
}
