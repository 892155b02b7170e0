//! Pruning the weights of unmodified candle models while they load.
//!
//! The layers of candle's models are fixed as `candle_nn::Linear`, so they cannot be swapped from outside; but every
//! parameter passes through the model's `VarBuilder`. The model then computes with dense weights that are 2:4: right
//! for evaluating what pruning costs, not faster.

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::{Init, VarBuilder, var_builder::SimpleBackend};
use twofour::{Axis, MatrixRef, Pattern, select};

use super::names::Globs;
use crate::Result;
use crate::float::{for_float, with_elements};

/// A source of parameters that prunes the chosen ones to a pattern, by magnitude along rows.
///
/// Only matrices (two dimensions) of f32, bf16 or f16 are pruned; a chosen parameter of another kind loads as it is.
#[derive(Debug)]
pub struct PruneOnLoad<B> {
    source: B,
    pattern: Pattern,
    include: Globs,
    exclude: Globs,
}

/// A `VarBuilder` over `source` that prunes the parameters whose names match a glob of `include` and none of `exclude`.
///
/// Globs are matched against whole parameter names, such as `encoder.layer.0.attention.query.weight`; `*` matches dots
/// too.
///
/// # Errors
/// [`Error::Glob`](crate::Error::Glob).
pub fn prune_on_load<'a, B: SimpleBackend + 'a>(
    source: B,
    pattern: Pattern,
    include: &[String],
    exclude: &[String],
    dtype: DType,
    device: Device,
) -> Result<VarBuilder<'a>> {
    let backend = PruneOnLoad { source, pattern, include: Globs::new(include)?, exclude: Globs::new(exclude)? };
    Ok(VarBuilder::from_backend(Box::new(backend), dtype, device))
}

impl<B> PruneOnLoad<B> {
    fn prune(&self, name: &str, tensor: Tensor) -> Result<Tensor> {
        let float = matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16);
        if !float || tensor.rank() != 2 || !self.include.matches(name) || self.exclude.matches(name) {
            return Ok(tensor);
        }
        let (rows, cols) = tensor.dims2()?;
        let on_cpu = tensor.to_device(&Device::Cpu)?;
        let kept = for_float!("a weight to prune", tensor.dtype(), T => {
            with_elements::<T, _>("a weight to prune", &on_cpu, |data| {
                let matrix = MatrixRef::new(rows, cols, data)?;
                let kept = select::magnitude(matrix, self.pattern, Axis::Row)?.apply(matrix)?;
                Ok(Tensor::from_vec(kept, (rows, cols), tensor.device())?)
            })
        });
        kept.map_err(|e| e.in_layer(name))
    }
}

impl<B: SimpleBackend> SimpleBackend for PruneOnLoad<B> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        Ok(self.prune(name, self.source.get(shape, name, init, dtype, device)?)?)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        Ok(self.prune(name, self.source.get_unchecked(name, dtype, device)?)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.source.contains_tensor(name)
    }
}
