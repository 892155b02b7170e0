//! The masks of a model's sparse layers as tensors, for checkpoints.
//!
//! A mask that is refreshed less often than at every forward pass cannot be worked out from the weights, so exact
//! resuming needs it saved. Layer `name` gives `name.mask`, u32 of shape `[out, 2 * ceil(in / 64)]`, the words of the
//! mask with the lower half of each first, and `name.forwards`, i64 of shape `[1]`.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use twofour::Mask;

use super::{AnyLinear, HasLinears, sparse::Saved};
use crate::float::with_elements;
use crate::{Error, Result};

/// The masks and the counts of forward passes of all sparse layers, by name.
///
/// # Errors
/// candle's own.
pub fn masks(model: &mut dyn HasLinears) -> Result<HashMap<String, Tensor>> {
    let mut tensors = HashMap::new();
    model.visit_linears(&mut |name, linear| {
        if let AnyLinear::Sparse(linear) = linear {
            let mask = linear.mask()?;
            let halves = |word: &u64| [*word as u32, (*word >> 32) as u32];
            let words: Vec<u32> =
                (0..mask.rows()).flat_map(|row| mask.row_words(row).iter().flat_map(halves)).collect();
            let shape = (mask.rows(), halves_per_row(mask.cols()));
            tensors.insert(format!("{name}.mask"), Tensor::from_vec(words, shape, &Device::Cpu)?);
            let forwards = Tensor::from_vec(vec![linear.forwards() as i64], 1, &Device::Cpu)?;
            tensors.insert(format!("{name}.forwards"), forwards);
        }
        Ok(())
    })?;
    Ok(tensors)
}

/// Puts back what [`masks`] gave; `tensors` may hold others besides.
///
/// # Errors
/// [`Error::State`] where a sparse layer's mask or count is missing or does not fit, [`Error::InLayer`] where a mask is
/// not 2:4; nothing is changed then.
pub fn load_masks(model: &mut dyn HasLinears, tensors: &HashMap<String, Tensor>) -> Result<()> {
    check_masks(model, tensors)?.put_back(model)
}

/// Saved masks that fit a model.
#[derive(Debug)]
struct SavedMasks(Vec<Saved>);

impl SavedMasks {
    /// Puts them back into the model that they were checked for.
    ///
    /// # Errors
    /// None but those of a model that cannot show its layers.
    fn put_back(self, model: &mut dyn HasLinears) -> Result<()> {
        let mut saved = self.0.into_iter();
        model.visit_linears(&mut |_, linear| {
            if let AnyLinear::Sparse(linear) = linear {
                saved.next().map_or(Ok(()), |saved| linear.put_back(saved))?;
            }
            Ok(())
        })
    }
}

/// What [`load_masks`] puts back, if it may; changes nothing.
///
/// # Errors
/// Those of [`load_masks`].
fn check_masks(model: &mut dyn HasLinears, tensors: &HashMap<String, Tensor>) -> Result<SavedMasks> {
    let mut all = Vec::new();
    model.visit_linears(&mut |name, linear| {
        let AnyLinear::Sparse(linear) = linear else { return Ok(()) };
        let (rows, cols) = linear.weight().dims2()?;
        let find = |key: &str, dtype: DType, shape: &[usize]| {
            let key = format!("{name}.{key}");
            match tensors.get(&key) {
                None => Err(Error::State { reason: format!("there is no `{key}`") }),
                Some(tensor) if tensor.dtype() != dtype || tensor.dims() != shape => {
                    let (found, dims) = (tensor.dtype(), tensor.dims());
                    let reason = format!("`{key}` is {found:?} {dims:?} where the model needs {dtype:?} {shape:?}");
                    Err(Error::State { reason })
                }
                Some(tensor) => Ok(tensor),
            }
        };
        let words = find("mask", DType::U32, &[rows, halves_per_row(cols)])?;
        let forwards = find("forwards", DType::I64, &[1])?.to_vec1::<i64>()?[0];
        let forwards = u64::try_from(forwards)
            .map_err(|_| Error::State { reason: format!("`{name}.forwards` is {forwards}, a negative count") })?;
        let stride = halves_per_row(cols);
        let mask = with_elements::<u32, _>("a saved mask", words, |words| {
            Ok(Mask::from_fn(rows, cols, |row, col| words[row * stride + col / 32] >> (col % 32) & 1 == 1))
        })?;
        all.push(linear.check_saved(mask, forwards).map_err(|e| e.in_layer(name))?);
        Ok(())
    })?;
    Ok(SavedMasks(all))
}

fn halves_per_row(cols: usize) -> usize {
    2 * cols.div_ceil(64)
}
