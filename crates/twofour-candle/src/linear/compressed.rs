//! The 2:4 layer for inference.

use std::sync::Arc;

use candle_core::Tensor;
use half::{bf16, f16};
use twofour::kernel::Activation;
use twofour::layer::PackedLinear;
use twofour::{Compressed, DataType, Element};

use super::{
    LinearOperand,
    operand::bias_values,
    weight::{Stored, Weight},
};
use crate::{Error, Result};

/// A 2:4 linear layer for inference, `y = x·Wᵀ + bias`, its weight compressed and packed once.
///
/// The weight and the bias are its own: training the layer it came from does not change it, and it has no weight
/// gradient. The input's gradient passes through it, except in i8, where asking for one is an error. A clone shares the
/// weight.
#[derive(Debug, Clone)]
pub struct CompressedLinear {
    operand: LinearOperand,
    dtype: DataType,
}

impl CompressedLinear {
    /// Takes over a compressed weight and a bias `[out]`.
    ///
    /// # Errors
    /// A bias that does not fit.
    pub fn new<T: CompressedElement>(weight: Compressed<T>, bias: Option<&Tensor>) -> Result<Self> {
        let values = checked_bias(bias, weight.rows())?;
        Ok(Self::from_packed(PackedLinear::new(weight, values, Activation::Identity)?, <T as Element>::DTYPE))
    }

    /// Takes over a weight quantized to i8 with a scale for each row, and a bias `[out]`.
    ///
    /// # Errors
    /// Scales or a bias that do not fit.
    pub fn from_quantized(weight: Compressed<i8>, scales: Vec<f32>, bias: Option<&Tensor>) -> Result<Self> {
        let values = checked_bias(bias, weight.rows())?;
        let layer = PackedLinear::new_i8(weight, scales, values, Activation::Identity)?;
        Ok(Self::from_packed(layer, DataType::I8))
    }

    /// Quantizes a compressed weight: symmetric, one scale for each row.
    pub(super) fn quantized<T: CompressedElement>(weight: &Compressed<T>, bias: Option<&Tensor>) -> Result<Self> {
        let values = checked_bias(bias, weight.rows())?;
        let layer = PackedLinear::quantized(weight, values, Activation::Identity)?;
        Ok(Self::from_packed(layer, DataType::I8))
    }

    fn from_packed(layer: PackedLinear, dtype: DataType) -> Self {
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
    pub fn dtype(&self) -> DataType {
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
pub trait CompressedElement: Stored {}

impl CompressedElement for f32 {}

impl CompressedElement for bf16 {}

impl CompressedElement for f16 {}
