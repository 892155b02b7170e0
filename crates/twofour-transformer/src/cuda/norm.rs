//! Layer and RMS normalization.

use twofour_cuda::{
    DataType, Error, Result,
    arguments::{Memory, at_if, positive, product, side},
    layer::{Accumulate, DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::norm::{NormParameters, Norms};

/// A normalization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormKind {
    /// Layer normalization: `(x - mean) / sqrt(variance + ε) · gain + bias` (Ba, Kiros and Hinton, "Layer
    /// Normalization", 2016).
    Layer,
    /// RMS normalization: `x / sqrt(mean of x² + ε) · gain + bias` (Zhang and Sennrich, "Root Mean Square Layer
    /// Normalization", 2019).
    RootMeanSquare,
}

/// A normalization of the rows of a `[rows, width]` matrix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// The kind.
    pub kind: NormKind,
    /// Rows: tokens.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
    /// ε, added to the variance or to the mean square.
    pub epsilon: f32,
}

/// What [`norm_forward`] normalizes, `[rows, width]`.
#[derive(Debug)]
pub enum NormInput<'a> {
    /// A tensor.
    Tensor(DeviceSlice<'a>),
    /// The sum of two tensors, rounded to their type, which overwrites the second one: a residual addition in front of
    /// a norm.
    Sum(DeviceSlice<'a>, DeviceSliceMut<'a>),
}

/// The tensors of [`norm_forward`].
#[derive(Debug)]
pub struct NormForward<'a> {
    /// The input.
    pub x: NormInput<'a>,
    /// The gain, `[width]`, of f32 or of the activations' type.
    pub gain: DeviceSlice<'a>,
    /// The bias, `[width]`, of the gain's type.
    pub bias: Option<DeviceSlice<'a>>,
    /// The result, `[rows, width]`.
    pub y: DeviceSliceMut<'a>,
    /// The rows' means, f32 `[rows]`; for layer normalization only.
    pub mean: Option<DeviceSliceMut<'a>>,
    /// The reciprocals of the rows' standard deviations, or of the roots of their mean squares, f32 `[rows]`.
    pub rstd: DeviceSliceMut<'a>,
}

/// The tensors of [`norm_backward`].
#[derive(Debug)]
pub struct NormBackward<'a> {
    /// What was normalized, `[rows, width]`: the tensor, or the sum.
    pub x: DeviceSlice<'a>,
    /// The gain of the forward pass.
    pub gain: DeviceSlice<'a>,
    /// The means that the forward pass wrote; for layer normalization only.
    pub mean: Option<DeviceSlice<'a>>,
    /// The reciprocals that the forward pass wrote.
    pub rstd: DeviceSlice<'a>,
    /// The gradient of the result, `[rows, width]`.
    pub dy: DeviceSlice<'a>,
    /// The gradient of `x`, `[rows, width]`.
    pub dx: DeviceSliceMut<'a>,
    /// Whether the gradient of `x` is added to what `dx` holds, such as the gradient that reaches `x` past the
    /// normalization.
    pub accumulate_dx: Accumulate,
    /// The gradient of the gain, f32 `[width]`.
    pub dgain: DeviceSliceMut<'a>,
    /// The gradient of the bias, f32 `[width]`.
    pub dbias: Option<DeviceSliceMut<'a>>,
    /// Whether the gradients of gain and bias are added to what `dgain` and `dbias` hold.
    pub accumulate: Accumulate,
}

impl Norm {
    /// Returns the parameters that both passes have, and the number of elements.
    fn parameters(
        &self,
        context: &LayerContext,
        dtype: DataType,
        gain: DeviceSlice<'_>,
    ) -> Result<(NormParameters, usize)> {
        let gain_type = if gain.dtype() == DataType::F32 { DataType::F32 } else { dtype };
        let parameters = NormParameters {
            gain: gain.at("the gain", context, gain_type, self.width)?,
            rows: side("rows", self.rows)?,
            width: positive("the width of a normalization", self.width)?,
            wide: u32::from(gain_type == DataType::F32),
            epsilon: self.epsilon,
            ..NormParameters::default()
        };
        Ok((parameters, product(self.rows, self.width)?))
    }

    fn centered(&self) -> bool {
        self.kind == NormKind::Layer
    }

    /// Returns an error unless means are there for layer normalization, and only for it.
    fn expect_mean(&self, is_there: bool) -> Result<()> {
        let expected = if self.centered() { self.rows } else { 0 };
        if self.centered() == is_there {
            return Ok(());
        }
        Err(Error::Length { what: "the means (layer normalization only)", expected, found: self.rows - expected })
    }
}

/// Normalizes each row: `y = x̂ · gain + bias`.
///
/// # Errors
/// [`Error::DataType`] for activations of another type than f32, f16 and bf16; those of [`Memory::at`] for a tensor
/// that does not fit; [`Error::Dimension`] for a width of 0; [`Error::Driver`].
pub fn norm_forward(context: &LayerContext, norm: Norm, tensors: NormForward<'_>) -> Result<()> {
    let NormForward { x, gain, bias, y, mean, rstd } = tensors;
    let (x, sum) = match x {
        NormInput::Tensor(x) => (x, None),
        NormInput::Sum(x, sum) => (x, Some(sum)),
    };
    let (dtype, rows) = (x.dtype(), norm.rows);
    let kernels = Norms::of(context, dtype)?;
    let (mut parameters, len) = norm.parameters(context, dtype, gain)?;
    norm.expect_mean(mean.is_some())?;
    parameters.x = x.at("the input", context, dtype, len)?;
    parameters.sum = at_if(sum.as_ref(), "the second addend of the input", context, dtype, len)?;
    parameters.bias = at_if(bias.as_ref(), "the bias", context, gain.dtype(), norm.width)?;
    parameters.y = y.at("the result", context, dtype, len)?;
    parameters.mean = at_if(mean.as_ref(), "the means", context, DataType::F32, rows)?;
    parameters.rstd = rstd.at("the reciprocal deviations", context, DataType::F32, rows)?;
    if rows == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.forward(context.raw(), norm.centered(), &parameters) }
}

/// Computes the gradients of a normalization. Those of gain and bias are sums over the rows in a fixed order.
///
/// # Errors
/// Those of [`norm_forward`], and those of allocating workspace.
pub fn norm_backward(context: &LayerContext, norm: Norm, tensors: NormBackward<'_>) -> Result<()> {
    let NormBackward { x, gain, mean, rstd, dy, dx, accumulate_dx, dgain, dbias, accumulate } = tensors;
    let (dtype, rows, width) = (x.dtype(), norm.rows, norm.width);
    let kernels = Norms::of(context, dtype)?;
    let (mut parameters, len) = norm.parameters(context, dtype, gain)?;
    norm.expect_mean(mean.is_some())?;
    parameters.x = x.at("the input", context, dtype, len)?;
    parameters.mean = at_if(mean.as_ref(), "the means", context, DataType::F32, rows)?;
    parameters.rstd = rstd.at("the reciprocal deviations", context, DataType::F32, rows)?;
    parameters.dy = dy.at("the output gradient", context, dtype, len)?;
    parameters.dx = dx.at("the input gradient", context, dtype, len)?;
    parameters.dgain = dgain.at("the gradient of the gain", context, DataType::F32, width)?;
    parameters.dbias = at_if(dbias.as_ref(), "the gradient of the bias", context, DataType::F32, width)?;
    parameters.adds_dx = u32::from(accumulate_dx == Accumulate::Add);
    parameters.adds_parameters = u32::from(accumulate == Accumulate::Add);
    let mut work = context.work();
    [parameters.partial] = work.parts([kernels.partial_bytes(rows, width)])?;
    if rows > 0 {
        // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
        unsafe { kernels.backward(context.raw(), norm.centered(), &parameters) }?;
    }
    // SAFETY: the slices have been found to be as long as the shape requires, the workspace has room for the partial
    // sums, and the stream is of their device.
    unsafe { kernels.parameters(context.raw(), norm.centered(), parameters) }
}
