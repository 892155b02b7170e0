//! A weight in whatever form, and its products.

use std::sync::Arc;

use candle_core::Tensor;
use half::{bf16, f16};
use twofour::{
    kernel::Epilogue,
    layer::{Accumulate, Forward, PackedElement, PackedLinear, SparseLinear},
};
use twofour_transformer::cpu::dense;

use crate::float::{Float, convert, expect_length, with_elements, write_as};
use crate::{Error, Result};

/// A weight `[out, in]` as the products below take it.
#[derive(Debug, Clone)]
pub(crate) enum Weight {
    /// A dense f32 tensor on the CPU.
    Dense(Tensor),
    /// 2:4 and trainable, f32.
    F32(Arc<SparseLinear<f32>>),
    /// 2:4 and trainable, bf16.
    Bf16(Arc<SparseLinear<bf16>>),
    /// 2:4 and trainable, f16.
    F16(Arc<SparseLinear<f16>>),
    /// 2:4 for inference, with the bias.
    Packed(Arc<PackedLinear>),
}

/// A float whose trainable weight is one of [`Weight`]'s kinds.
pub(super) trait Stored: Float + PackedElement {
    fn wrap(layer: Arc<SparseLinear<Self>>) -> Weight;
    fn layer_mut(weight: &mut Weight) -> Option<&mut Arc<SparseLinear<Self>>>;
}

macro_rules! stored {
    ($float:ty, $kind:ident) => {
        impl Stored for $float {
            fn wrap(layer: Arc<SparseLinear<Self>>) -> Weight {
                Weight::$kind(layer)
            }

            fn layer_mut(weight: &mut Weight) -> Option<&mut Arc<SparseLinear<Self>>> {
                match weight {
                    Weight::$kind(layer) => Some(layer),
                    _ => None,
                }
            }
        }
    };
}

stored!(f32, F32);
stored!(bf16, Bf16);
stored!(f16, F16);

/// Runs `$body` with `$layer` bound to the trainable layer of a weight, whatever its type; `$other` for other weights.
macro_rules! for_layer {
    ($weight:expr, $layer:ident => $body:expr, $other:pat => $otherwise:expr) => {
        match $weight {
            $crate::linear::weight::Weight::F32($layer) => $body,
            $crate::linear::weight::Weight::Bf16($layer) => $body,
            $crate::linear::weight::Weight::F16($layer) => $body,
            $other => $otherwise,
        }
    };
}
pub(super) use for_layer;

/// `(tokens, out, in)`.
pub(crate) type Dims = (usize, usize, usize);

impl Weight {
    /// `y = act(x·Wᵀ + bias)`; `x` is `[tokens, in]`, `y` is `[tokens, out]`. Where `T` is not the weight's type, `x`
    /// is converted to it and `y` from it. A packed weight has its own bias.
    pub(crate) fn forward<T: Float>(&self, x: &[T], dims: Dims, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        fn sparse<T: Float, B: Float>(
            layer: &SparseLinear<B>,
            x: &[T],
            (tokens, ..): Dims,
            Epilogue { bias, activation }: Epilogue<'_>,
            y: &mut [T],
        ) -> Result<()> {
            let x = convert::<T, B>(x);
            let forward = Forward { bias, activation, pre_activation: None };
            write_as::<T, B>(y, |y| Ok(layer.forward(&x, tokens, forward, y)?))
        }
        check_lengths("the input", x, dims.0, dims.2)?;
        check_lengths("the output", y, dims.0, dims.1)?;
        match self {
            Weight::Dense(w) => {
                let x = convert::<T, f32>(x);
                write_as::<T, f32>(y, |y| {
                    with_elements("the weight", w, |w| Ok(dense::forward(&x, w, dims, epilogue, y)?))
                })
            }
            Weight::Packed(layer) => Ok(layer.forward_with(x, dims.0, epilogue.activation, y)?),
            Weight::F32(layer) => sparse(layer, x, dims, epilogue, y),
            Weight::Bf16(layer) => sparse(layer, x, dims, epilogue, y),
            Weight::F16(layer) => sparse(layer, x, dims, epilogue, y),
        }
    }

    /// `dx = dy·W`; `dy` is `[tokens, out]`, `dx` is `[tokens, in]`.
    pub(crate) fn input_gradient<T: Float>(&self, dy: &[T], dims: Dims, dx: &mut [T]) -> Result<()> {
        fn sparse<T: Float, B: Float>(
            layer: &SparseLinear<B>,
            dy: &[T],
            (tokens, ..): Dims,
            dx: &mut [T],
        ) -> Result<()> {
            let dy = convert::<T, B>(dy);
            write_as::<T, B>(dx, |dx| Ok(layer.input_gradient(&dy, tokens, dx)?))
        }
        check_lengths("the output gradient", dy, dims.0, dims.1)?;
        check_lengths("the input gradient", dx, dims.0, dims.2)?;
        match self {
            Weight::Dense(w) => {
                let dy = convert::<T, f32>(dy);
                write_as::<T, f32>(dx, |dx| {
                    with_elements("the weight", w, |w| Ok(dense::input_gradient(&dy, w, dims, dx)?))
                })
            }
            Weight::Packed(layer) => match layer.input_gradient(dy, dims.0, dx) {
                Err(twofour::Error::UnsupportedDType { .. }) => Err(Error::WrongForm {
                    found: "compressed to i8",
                    remedy: "gradients pass through dense, sparse and float-compressed layers only",
                }),
                done => Ok(done?),
            },
            Weight::F32(layer) => sparse(layer, dy, dims, dx),
            Weight::Bf16(layer) => sparse(layer, dy, dims, dx),
            Weight::F16(layer) => sparse(layer, dy, dims, dx),
        }
    }

    /// The weight gradient `dW = dyᵀ·x`, of a sparse layer as its settings have it; `dw` is `[out, in]`.
    pub(crate) fn weight_gradient<T: Float>(&self, dy: &[T], x: &[T], dims: Dims, dw: &mut [T]) -> Result<()> {
        fn sparse<T: Float, B: Float>(
            layer: &SparseLinear<B>,
            (dy, x): (&[T], &[T]),
            (tokens, ..): Dims,
            dw: &mut [T],
        ) -> Result<()> {
            let (dy, x) = (convert::<T, B>(dy), convert::<T, B>(x));
            Ok(layer.weight_gradient(&dy, &x, tokens, Accumulate::Overwrite, dw)?)
        }
        check_lengths("the output gradient", dy, dims.0, dims.1)?;
        check_lengths("the input", x, dims.0, dims.2)?;
        check_lengths("the weight gradient", dw, dims.1, dims.2)?;
        match self {
            Weight::Dense(_) | Weight::Packed(_) => {
                let (dy, x) = (convert::<T, f32>(dy), convert::<T, f32>(x));
                write_as::<T, f32>(dw, |dw| Ok(dense::weight_gradient(&dy, &x, dims, Accumulate::Overwrite, dw)?))
            }
            Weight::F32(layer) => sparse(layer, (dy, x), dims, dw),
            Weight::Bf16(layer) => sparse(layer, (dy, x), dims, dw),
            Weight::F16(layer) => sparse(layer, (dy, x), dims, dw),
        }
    }

    /// Bytes that the weight takes in memory: of a packed one its values and metadata.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Weight::Dense(w) => w.elem_count() * w.dtype().size_in_bytes(),
            Weight::Packed(layer) => layer.bytes(),
            Weight::F32(layer) => layer.bytes(),
            Weight::Bf16(layer) => layer.bytes(),
            Weight::F16(layer) => layer.bytes(),
        }
    }
}

fn check_lengths<T>(what: &'static str, slice: &[T], rows: usize, cols: usize) -> Result<()> {
    expect_length(what, slice.len(), rows.checked_mul(cols))
}
