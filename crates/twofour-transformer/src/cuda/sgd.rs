//! Stochastic gradient descent with momentum.

use twofour_cuda::{
    DataType, Error, Result,
    arguments::{MAX_DIMENSION, Memory, at_if, expect_dimension, expect_multiple, product},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext, SparseLinear},
};

use super::PrunedDecay;
use crate::cuda::raw::sgd::{Sgd, SgdParameters};

/// The hyperparameters of [`sgd`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdSettings {
    /// Learning rate.
    pub learning_rate: f64,
    /// The share of the momentum that a step keeps.
    pub momentum: f64,
    /// Weight decay of all elements, added to the gradient.
    pub weight_decay: f64,
}

/// The tensors of [`sgd`], for a parameter `[rows, cols]`.
#[derive(Debug)]
pub struct SgdTensors<'a> {
    /// The dense master weight, f32.
    pub weight: DeviceSliceMut<'a>,
    /// A copy of the weight in f16 or bf16 that is written in the same pass.
    pub copy: Option<DeviceSliceMut<'a>>,
    /// The gradient, f32.
    pub gradient: DeviceSlice<'a>,
    /// The momentum, f32; initially zeros.
    pub momentum: DeviceSliceMut<'a>,
    /// An f32 `[1]` that gradients are multiplied by first.
    pub gradient_scale: Option<DeviceSlice<'a>>,
    /// A u32 `[1]`: where it is not 0, nothing is written.
    pub skip: Option<DeviceSlice<'a>>,
}

/// Updates a parameter `[rows, cols]` and its momentum in place, bit for bit as on a CPU: `g ← g · gradient_scale +
/// weight_decay · w` (plus pruned decay), `m ← momentum · m + g`, `w ← w - learning_rate · m`. The learning rate is an
/// argument, which a captured graph repeats.
///
/// # Errors
/// [`Error::DataType`] for a copy that is not of f16 or bf16; those of [`Memory::at`] for a tensor that does not fit;
/// [`Error::Multiple`] where there is pruned decay and rows or columns are not multiples of 4; [`Error::TooLarge`];
/// [`Error::Driver`].
pub fn sgd(
    context: &LayerContext,
    (rows, cols): (usize, usize),
    tensors: SgdTensors<'_>,
    pruned_decay: Option<(&SparseLinear, PrunedDecay)>,
    settings: SgdSettings,
) -> Result<()> {
    let len = product(rows, cols)?;
    expect_dimension("elements of the parameter, counted from 0,", len + 1, MAX_DIMENSION)?;
    let SgdSettings { learning_rate, momentum, weight_decay } = settings;
    let mut tiles = 0;
    let (mut pruned, mut left) = (0.0, 1.0);
    if let Some((layer, decay)) = pruned_decay {
        let (what, expected) = ("the sparse layer of the masked decay", (layer.out_features(), layer.in_features()));
        if expected != (rows, cols) {
            return Err(Error::Length { what, expected: len, found: expected.0 * expected.1 });
        }
        if layer.context().ordinal() != context.ordinal() {
            let (expected, found) = (context.ordinal(), layer.context().ordinal());
            return Err(Error::OtherDevice { what, expected, found });
        }
        expect_multiple("rows of the parameter", rows, 4)?;
        expect_multiple("columns of the parameter", cols, 4)?;
        tiles = layer.mask_tiles();
        match decay {
            PrunedDecay::Gradient { strength } => pruned = strength,
            PrunedDecay::Weight { strength } => left = (1.0 - learning_rate * strength) as f32,
        }
    }
    let SgdTensors { weight, copy, gradient, momentum: moment, gradient_scale, skip } = tensors;
    let copy_type = copy.as_ref().map(DeviceSliceMut::dtype);
    if let Some(dtype) = copy_type.filter(|dtype| !matches!(dtype, DataType::F16 | DataType::BF16)) {
        let operation = "the copy of a weight in a step of gradient descent";
        return Err(Error::DataType { operation, dtype, supported: "f16, bf16" });
    }
    let f32 = DataType::F32;
    let parameters = SgdParameters {
        weight: weight.at("the weight", context, f32, len)?,
        gradient: gradient.at("the gradient", context, f32, len)?,
        momentum: moment.at("the momentum", context, f32, len)?,
        tiles,
        gradient_scale: at_if(gradient_scale.as_ref(), "the scale of the gradient", context, f32, 1)?,
        copy: at_if(copy.as_ref(), "the copy of the weight", context, copy_type.unwrap_or(f32), len)?,
        skip: at_if(skip.as_ref(), "the flag of skipped steps", context, DataType::I32, 1)?,
        count: len as u64,
        cols: cols as u32,
        copy_is_bf16: u32::from(copy_type == Some(DataType::BF16)),
        weight_decay: weight_decay as f32,
        pruned_decay: pruned,
        pruned_left: left,
        momentum_rate: momentum as f32,
        learning_rate: learning_rate as f32,
    };
    let kernel = Sgd::of(context)?;
    // SAFETY: the slices have been found to be as long as the shape requires, the mask is borrowed, and the stream is
    // of their device.
    unsafe { kernel.run(context.raw(), &parameters) }
}
