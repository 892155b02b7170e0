//! The 2:4 layer for inference.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use candle_core::Tensor;
use half::{bf16, f16};
use twofour::Compressed;
use twofour::kernel::Activation;
use twofour::layer::PackedLinear;

use super::{
    LinearOperand,
    operand::bias_values,
    weight::{Stored, Weight},
};
use crate::{Error, Result};

/// What the values of a compressed layer are stored as, and computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CompressedDType {
    /// 32-bit floats: 17/32 of the dense f32 weight.
    F32,
    /// bfloat16: 9/16 of the dense bf16 weight.
    Bf16,
    /// 16-bit floats: 9/16 of the dense f16 weight.
    F16,
    /// 8-bit integers with one scale a row; inputs are quantized to 8 bits for each token.
    I8,
}

impl fmt::Display for CompressedDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CompressedDType::F32 => "f32",
            CompressedDType::Bf16 => "bf16",
            CompressedDType::F16 => "f16",
            CompressedDType::I8 => "i8",
        })
    }
}

impl FromStr for CompressedDType {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "f32" => Ok(CompressedDType::F32),
            "bf16" => Ok(CompressedDType::Bf16),
            "f16" => Ok(CompressedDType::F16),
            "i8" => Ok(CompressedDType::I8),
            _ => Err(Error::Setting {
                what: "dtype of compressed layers",
                found: text.to_owned(),
                expected: "f32, bf16, f16 or i8",
            }),
        }
    }
}

/// A 2:4 linear layer for inference, `y = x·Wᵀ + bias`, its weight compressed and packed once.
///
/// The weight and the bias are its own: training the layer it came from does not change it, and it has no weight
/// gradient. The input's gradient passes through it, except in i8, where asking for one is an error. A clone shares the
/// weight.
#[derive(Debug, Clone)]
pub struct CompressedLinear {
    operand: LinearOperand,
    dtype: CompressedDType,
}

impl CompressedLinear {
    /// Takes over a compressed weight and a bias `[out]`.
    ///
    /// # Errors
    /// A bias that does not fit.
    pub fn new<T: CompressedElement>(weight: Compressed<T>, bias: Option<&Tensor>) -> Result<Self> {
        let values = checked_bias(bias, weight.rows())?;
        Ok(Self::from_packed(PackedLinear::new(weight, values, Activation::Identity)?, T::STORED))
    }

    /// Takes over a weight quantized to i8 with a scale for each row, and a bias `[out]`.
    ///
    /// # Errors
    /// Scales or a bias that do not fit.
    pub fn from_quantized(weight: Compressed<i8>, scales: Vec<f32>, bias: Option<&Tensor>) -> Result<Self> {
        let values = checked_bias(bias, weight.rows())?;
        let layer = PackedLinear::new_i8(weight, scales, values, Activation::Identity)?;
        Ok(Self::from_packed(layer, CompressedDType::I8))
    }

    /// Quantizes a compressed weight: symmetric, one scale for each row.
    pub(super) fn quantized<T: CompressedElement>(weight: &Compressed<T>, bias: Option<&Tensor>) -> Result<Self> {
        let values = checked_bias(bias, weight.rows())?;
        let layer = PackedLinear::quantized(weight, values, Activation::Identity)?;
        Ok(Self::from_packed(layer, CompressedDType::I8))
    }

    fn from_packed(layer: PackedLinear, dtype: CompressedDType) -> Self {
        let (out_features, in_features) = (layer.out_features(), layer.in_features());
        let product = Weight::Packed(Arc::new(layer));
        // The packed layer adds its bias itself.
        let operand = LinearOperand { product, bias_values: None, out_features, in_features, weight: None, bias: None };
        CompressedLinear { operand, dtype }
    }

    fn layer(&self) -> Option<&PackedLinear> {
        match &self.operand.product {
            Weight::Packed(layer) => Some(layer),
            _ => None,
        }
    }

    /// Number of outputs and number of inputs.
    pub fn dims(&self) -> (usize, usize) {
        (self.operand.out_features, self.operand.in_features)
    }

    /// What the weight's values are stored as.
    pub fn dtype(&self) -> CompressedDType {
        self.dtype
    }

    /// Bytes of the packed weight: values and metadata.
    pub fn packed_bytes(&self) -> usize {
        self.operand.product.bytes()
    }

    /// The bias values.
    pub fn bias(&self) -> Option<&[f32]> {
        self.layer().and_then(PackedLinear::bias)
    }

    /// The compressed weight, made anew, where its values are stored as `T`.
    pub fn to_compressed<T: CompressedElement>(&self) -> Option<Compressed<T>> {
        self.layer().and_then(PackedLinear::to_compressed)
    }

    pub(super) fn operand(&self) -> LinearOperand {
        self.operand.clone()
    }
}

/// The bias as f32 values, if it is `[out_features]`.
fn checked_bias(bias: Option<&Tensor>, out_features: usize) -> Result<Option<Vec<f32>>> {
    if let Some(bias) = bias.filter(|b| b.dims() != [out_features]) {
        let expected = format!("[{out_features}]");
        return Err(Error::Shape { what: "the bias", found: bias.dims().to_vec(), expected });
    }
    Ok(bias_values(bias)?.map(|values| values.to_vec()))
}

/// A float that a [`CompressedLinear`] stores: f32, bf16 or f16.
#[allow(private_bounds)]
pub trait CompressedElement: Stored {
    /// Its name among the stored dtypes.
    const STORED: CompressedDType;
}

impl CompressedElement for f32 {
    const STORED: CompressedDType = CompressedDType::F32;
}

impl CompressedElement for bf16 {
    const STORED: CompressedDType = CompressedDType::Bf16;
}

impl CompressedElement for f16 {
    const STORED: CompressedDType = CompressedDType::F16;
}
