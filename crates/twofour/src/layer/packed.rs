//! The layer for inference.

use half::{bf16, f16};

use super::{
    Activation,
    activation::{elements, expect_length},
};
use crate::{
    Arithmetic, Compressed, DataType, Element, Error, MatrixRef, Result,
    int4::{Granularity, Int4},
    int8::Int8,
    kernel::{
        Epilogue, KernelElement, MIN_PART, SparseWeight, SparseWeightI8, SparseWeightInt4, quantize, share_elements,
    },
};

/// A packed 2:4 weight of a type that the CPU kernels multiply.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum PackedWeight {
    /// 32-bit floats.
    F32(SparseWeight<f32>),
    /// bfloat16.
    Bf16(SparseWeight<bf16>),
    /// 16-bit floats.
    F16(SparseWeight<f16>),
    /// 8-bit integers with a scale for each row; activations are quantized for each token.
    I8(SparseWeightI8),
    /// 4-bit integers with scales; activations are quantized to 8 bits for each token.
    Int4(SparseWeightInt4),
}

/// A float that a [`PackedWeight`] stores.
pub trait PackedElement: KernelElement {
    /// The packed weight of that type.
    fn wrap(weight: SparseWeight<Self>) -> PackedWeight;
    /// The weight, where it is of that type.
    fn unwrap(weight: &PackedWeight) -> Option<&SparseWeight<Self>>;
}

macro_rules! packed_element {
    ($($type:ty: $kind:ident),*) => {$(
        impl PackedElement for $type {
            fn wrap(weight: SparseWeight<Self>) -> PackedWeight {
                PackedWeight::$kind(weight)
            }
            fn unwrap(weight: &PackedWeight) -> Option<&SparseWeight<Self>> {
                match weight {
                    PackedWeight::$kind(weight) => Some(weight),
                    _ => None,
                }
            }
        }
    )*};
}

packed_element!(f32: F32, bf16: Bf16, f16: F16);

/// What `$body` is of a packed weight of any type.
macro_rules! of_any {
    ($weight:expr, $w:ident => $body:expr) => {
        match $weight {
            PackedWeight::F32($w) => $body,
            PackedWeight::Bf16($w) => $body,
            PackedWeight::F16($w) => $body,
            PackedWeight::I8($w) => $body,
            PackedWeight::Int4($w) => $body,
        }
    };
}

/// A 2:4 linear layer for inference, `y = activation(x · Wᵀ + bias)`, packed once. Input gradients pass through it,
/// where the weight is of floats; it has no weight gradient.
#[derive(Debug, Clone)]
pub struct PackedLinear {
    weight: PackedWeight,
    bias: Option<Vec<f32>>,
    activation: Activation,
}

impl PackedLinear {
    /// Packs a compressed weight of floats, `[out_features, in_features]`, with a bias `[out_features]`.
    ///
    /// # Errors
    /// [`Error::Length`] for a bias that does not fit.
    pub fn new<T: PackedElement>(
        weight: Compressed<T>,
        bias: Option<Vec<f32>>,
        activation: Activation,
    ) -> Result<Self> {
        Self::with(T::wrap(SparseWeight::pack(weight)?), bias, activation)
    }

    /// Packs a compressed weight of 8-bit integers with a scale for each row. Activations are quantized for each token.
    ///
    /// # Errors
    /// [`Error::Length`] for scales or a bias that do not fit, [`Error::TooManyInputs`].
    pub fn new_i8(
        weight: Compressed<i8>,
        scales: Vec<f32>,
        bias: Option<Vec<f32>>,
        activation: Activation,
    ) -> Result<Self> {
        Self::with(PackedWeight::I8(SparseWeightI8::with_scales(weight, scales)?), bias, activation)
    }

    /// Quantizes a compressed weight to 8-bit integers, symmetrically and with a scale for each row, and packs it.
    ///
    /// # Errors
    /// [`Error::NotANumber`] and [`Error::Infinite`] with the place; those of [`PackedLinear::new_i8`].
    pub fn quantized<T: Element>(
        weight: &Compressed<T>,
        bias: Option<Vec<f32>>,
        activation: Activation,
    ) -> Result<Self> {
        let (rows, cols) = (weight.rows(), weight.cols());
        let dense: Vec<f32> = weight.to_dense().iter().map(|v| v.to_f32()).collect();
        let (values, scales) = quantize(MatrixRef::new(rows, cols, &dense)?)?;
        // By the weight's own positions, so that a value that becomes zero keeps its place.
        let values = Compressed::from_masked(MatrixRef::new(rows, cols, &values)?, &weight.mask())?;
        Self::new_i8(values, scales, bias, activation)
    }

    /// Packs a weight of 8-bit integers with its scales. One with scales for groups of columns becomes bf16, since the
    /// kernels of 8-bit integers have scales for rows.
    ///
    /// # Errors
    /// Those of [`PackedLinear::new_i8`].
    pub fn new_int8(weight: Int8, bias: Option<Vec<f32>>, activation: Activation) -> Result<Self> {
        if weight.granularity() == Granularity::Row {
            let (weight, scales) = weight.into_parts();
            return Self::new_i8(weight, scales, bias, activation);
        }
        let exact = weight.dequantize();
        let values = exact.values().iter().map(|v| bf16::from_f32(*v)).collect();
        Self::new(Compressed::from_parts(exact.rows(), exact.cols(), values, exact.meta().to_vec())?, bias, activation)
    }

    /// Packs a weight of 4-bit integers, which stays in four bits. Activations are quantized to 8 bits for each token.
    /// [`SparseWeightInt4::linear_floats`] multiplies activations that are not quantized, and [`PackedLinear::new`]
    /// packs the weight that [`Int4::dequantize`] returns.
    ///
    /// # Errors
    /// [`Error::Length`] for a bias that does not fit, [`Error::TooLarge`].
    pub fn new_int4(weight: &Int4, bias: Option<Vec<f32>>, activation: Activation) -> Result<Self> {
        Self::with(PackedWeight::Int4(SparseWeightInt4::of(weight)?), bias, activation)
    }

    fn with(weight: PackedWeight, bias: Option<Vec<f32>>, activation: Activation) -> Result<Self> {
        let layer = Self { weight, bias, activation };
        if let Some(bias) = &layer.bias {
            expect_length("the bias", layer.out_features(), bias.len())?;
        }
        Ok(layer)
    }

    /// `y = activation(x · Wᵀ + bias)`. Where `T` is not the weight's type, `x` is rounded to it (for a weight of
    /// integers quantized to 8 bits for each token) and `y` from it.
    ///
    /// # Errors
    /// [`Error::Length`] where a slice does not fit.
    pub fn forward<T: Arithmetic>(&self, x: &[T], tokens: usize, y: &mut [T]) -> Result<()> {
        self.forward_with(x, tokens, self.activation, y)
    }

    /// The same with another activation than the layer's.
    ///
    /// # Errors
    /// Those of [`PackedLinear::forward`].
    pub fn forward_with<T: Arithmetic>(
        &self,
        x: &[T],
        tokens: usize,
        activation: Activation,
        y: &mut [T],
    ) -> Result<()> {
        expect_length("the input", elements(tokens, self.in_features())?, x.len())?;
        expect_length("the output", elements(tokens, self.out_features())?, y.len())?;
        let epilogue = Epilogue { bias: self.bias.as_deref(), activation };
        of_any!(&self.weight, w => converted(x, y, |x, y| w.linear(x, tokens, epilogue, y)))
    }

    /// `dx = dy · W`, for the gradient `dy` of the pre-activation.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for a weight of integers, [`Error::Length`] where a slice does not fit.
    pub fn input_gradient<T: Arithmetic>(&self, dy: &[T], tokens: usize, dx: &mut [T]) -> Result<()> {
        expect_length("the output gradient", elements(tokens, self.out_features())?, dy.len())?;
        expect_length("the input gradient", elements(tokens, self.in_features())?, dx.len())?;
        match &self.weight {
            PackedWeight::F32(w) => converted(dy, dx, |dy, dx| w.input_gradient(dy, tokens, dx)),
            PackedWeight::Bf16(w) => converted(dy, dx, |dy, dx| w.input_gradient(dy, tokens, dx)),
            PackedWeight::F16(w) => converted(dy, dx, |dy, dx| w.input_gradient(dy, tokens, dx)),
            PackedWeight::I8(_) | PackedWeight::Int4(_) => Err(Error::UnsupportedDType {
                operation: "the input gradient of a packed layer",
                dtype: DataType::I8,
                supported: "f32, bf16, f16",
            }),
        }
    }

    /// Number of output features.
    pub fn out_features(&self) -> usize {
        of_any!(&self.weight, w => w.out_features())
    }

    /// Number of input features.
    pub fn in_features(&self) -> usize {
        of_any!(&self.weight, w => w.in_features())
    }

    /// Bytes of the packed weight: values, metadata and scales.
    pub fn bytes(&self) -> usize {
        of_any!(&self.weight, w => w.bytes())
    }

    /// The type of the stored values; `None` for 4-bit integers.
    pub fn dtype(&self) -> Option<DataType> {
        match &self.weight {
            PackedWeight::F32(_) => Some(DataType::F32),
            PackedWeight::Bf16(_) => Some(DataType::BF16),
            PackedWeight::F16(_) => Some(DataType::F16),
            PackedWeight::I8(_) => Some(DataType::I8),
            PackedWeight::Int4(_) => None,
        }
    }

    /// The packed weight.
    pub fn weight(&self) -> &PackedWeight {
        &self.weight
    }

    /// The bias.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// The activation.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// The weight in canonical form, as a copy, where its values are of type `T`.
    pub fn to_compressed<T: PackedElement>(&self) -> Option<Compressed<T>> {
        T::unwrap(&self.weight).map(SparseWeight::to_compressed)
    }
}

/// Runs `f` on `x` and `y` in type `B`, converting where it is another.
fn converted<T: Arithmetic, B: Arithmetic>(
    x: &[T],
    y: &mut [T],
    f: impl FnOnce(&[B], &mut [B]) -> Result<()>,
) -> Result<()> {
    if T::DTYPE == B::DTYPE {
        return f(bytemuck::cast_slice(x), bytemuck::cast_slice_mut(y));
    }
    let mut input = vec![B::ZERO; x.len()];
    convert(x, &mut input);
    let mut output = vec![B::ZERO; y.len()];
    f(&input, &mut output)?;
    convert(&output, y);
    Ok(())
}

/// Rounds `from` to the type of `to`.
fn convert<A: Element, B: Arithmetic>(from: &[A], to: &mut [B]) {
    let parts = from.chunks(MIN_PART).zip(to.chunks_mut(MIN_PART));
    share_elements(from.len(), parts, |(from, to)| {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = B::from_f32(from.to_f32()));
    });
}
