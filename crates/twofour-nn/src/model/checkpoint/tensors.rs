//! Reading the parts of a model from a checkpoint's tensors.

use half::{bf16, f16};
use twofour::{
    Arithmetic,
    file::{Reader, StoredDType, StoredElement, TensorView},
    kernel::KernelElement,
};

use super::CheckpointError;
use crate::{
    Error, Result,
    model::{
        families::layout::{BiasRow, Layout, StoredLinear},
        file,
        inference::{linear::LinearPart, parts::Parts, passes::narrowed, weight::Weight},
    },
};

/// The values of a weight or a bias that replace the stored ones, by name and in the stored shape; none to leave it.
pub type Replace<'a> = &'a dyn Fn(&str) -> Option<Vec<f32>>;

/// A checkpoint's tensors, whose shapes were checked.
#[derive(Clone, Copy)]
pub(crate) struct StoredParts<'a> {
    reader: &'a Reader,
    layout: &'a Layout,
    tied: bool,
    replace: Option<Replace<'a>>,
    /// Whether floats are packed for the dense kernel even where they are 2:4.
    dense: bool,
}

impl<'a> StoredParts<'a> {
    pub(crate) fn new(reader: &'a Reader, layout: &'a Layout, tied: bool) -> Self {
        StoredParts { reader, layout, tied, replace: None, dense: false }
    }

    /// Returns these parts with the weights that `replace` returns in place of the stored ones.
    pub(crate) fn replacing(self, replace: Option<Replace<'a>>) -> Self {
        StoredParts { replace, ..self }
    }

    /// Returns these parts with every linear layer dense: compressed weights are decompressed.
    pub(crate) fn dense(self) -> Self {
        StoredParts { dense: true, ..self }
    }

    /// A tensor that is stored as floats, as `T`.
    fn floats<T: Arithmetic + StoredElement>(&self, name: &str) -> Result<Vec<T>> {
        let view = self.reader.tensor(name)?;
        fn converted<S: Arithmetic + StoredElement, T: Arithmetic>(view: &TensorView<'_>) -> Result<Vec<T>> {
            Ok(view.elements::<S>()?.iter().map(|value| T::from_f32(value.to_f32())).collect())
        }
        if let Some(integers) = file::dense_int8(self.reader, name)? {
            let floats = file::dequantized(integers);
            return Ok(floats.into_iter().map(T::from_f32).collect());
        }
        match view.info.dtype {
            same if same == T::STORED => Ok(view.to_vec::<T>()?),
            StoredDType::F32 => converted::<f32, T>(&view),
            StoredDType::BF16 => converted::<bf16, T>(&view),
            StoredDType::F16 => converted::<f16, T>(&view),
            other => {
                let (path, name, found) = (self.reader.path().to_owned(), name.to_owned(), format!("{other:?}"));
                Err(CheckpointError::DType { path, name, found }.into())
            }
        }
    }

    /// Whether there is a linear layer of that name.
    pub(crate) fn has_linear(&self, ours: &str) -> bool {
        self.layout.linears.contains_key(ours)
    }

    /// How a linear layer is stored.
    pub(crate) fn stored(&self, ours: &str) -> Option<&'a StoredLinear> {
        self.layout.linears.get(ours)
    }

    /// The names of the weights that make up a linear layer.
    pub(crate) fn weights_of(&self, ours: &str) -> Vec<String> {
        let parts = self.layout.linears.get(ours).map(|linear| linear.parts.as_slice()).unwrap_or_default();
        parts.iter().map(|(name, _)| format!("{name}.weight")).collect()
    }

    /// The values of a parameter, by the name that the model has for it; a linear layer's parts one after the other.
    pub(crate) fn values(&self, ours: &str) -> Result<Vec<f32>> {
        let of = |ending: &str| ours.strip_suffix(ending).and_then(|name| self.layout.linears.get(name));
        if let Some(linear) = of(".weight") {
            let parts = linear.parts.iter().map(|(name, outputs)| {
                let (name, stored) = (format!("{name}.weight"), linear.stored_shape(*outputs));
                let values = match self.replace.and_then(|replace| replace(&name)) {
                    Some(values) if values.len() == stored[0] * stored[1] => values,
                    Some(values) => {
                        let (what, expected) = ("a replaced weight", stored[0] * stored[1]);
                        return Err(Error::length(what, expected, values.len()).in_layer(name));
                    }
                    None if file::is_compressed(self.reader, &name) => file::values(self.reader, &name, &stored)?,
                    None => self.floats(&name)?,
                };
                let values = if linear.is_transposed { transposed(&values, stored) } else { values };
                Ok(self.layout.ordered(name.trim_end_matches(".weight"), values, linear.inputs))
            });
            return Ok(parts.collect::<Result<Vec<_>>>()?.concat());
        }
        if let Some(linear) = of(".bias").filter(|linear| linear.has_bias) {
            let parts = linear.parts.iter().map(|(name, outputs)| self.bias(name, *outputs));
            return Ok(parts.collect::<Result<Vec<_>>>()?.concat());
        }
        self.tensor(ours)
    }

    /// The values of a linear layer's weight, by the names and in the shapes that its parts are stored in.
    pub(crate) fn split(&self, ours: &str, values: &[f32]) -> Vec<(String, Vec<f32>)> {
        let Some(linear) = self.layout.linears.get(ours) else { return vec![] };
        let mut rest = values;
        let split = |(name, outputs): &(String, usize)| {
            let (part, others) = rest.split_at((outputs * linear.inputs).min(rest.len()));
            rest = others;
            let part = self.layout.as_stored(name, part, linear.inputs);
            let part = if linear.is_transposed { transposed(&part, [*outputs, linear.inputs]) } else { part };
            (format!("{name}.weight"), part)
        };
        linear.parts.iter().map(split).collect()
    }

    /// A tensor outside of linear layers, by the name that the model has for it.
    fn tensor(&self, ours: &str) -> Result<Vec<f32>> {
        if let Some((len, value)) = self.layout.constants.get(ours) {
            return Ok(vec![*value; *len]);
        }
        let stored = self.layout.tensors.get(ours).ok_or_else(|| absent(ours))?;
        let mut values = self.floats(&stored.name)?;
        values.drain(..stored.skipped.min(values.len()));
        if (stored.added, stored.factor) != (0.0, 1.0) {
            values.iter_mut().for_each(|value| *value = (*value + stored.added) * stored.factor);
        }
        Ok(values)
    }

    /// What a tensor has in front of the model's values.
    pub(super) fn skipped(&self, ours: &str) -> Result<Vec<f32>> {
        let stored = self.layout.tensors.get(ours).filter(|stored| stored.skipped > 0);
        let Some(stored) = stored else { return Ok(vec![]) };
        let mut values = self.floats(&stored.name)?;
        values.truncate(stored.skipped);
        Ok(values)
    }

    /// Whether a linear layer's outputs are stored in the model's order.
    pub(crate) fn is_in_order(&self, ours: &str) -> bool {
        let parts = self.layout.linears.get(ours).map(|linear| linear.parts.as_slice()).unwrap_or_default();
        !parts.iter().any(|(name, _)| self.layout.orders.contains_key(name))
    }

    fn name_of(&self, ours: &str) -> Result<&str> {
        self.layout.tensors.get(ours).map(|tensor| tensor.name.as_str()).ok_or_else(|| absent(ours))
    }

    fn bias(&self, name: &str, outputs: usize) -> Result<Vec<f32>> {
        let bias = format!("{name}.bias");
        let stored = match self.replace.and_then(|replace| replace(&bias)) {
            Some(values) if values.len() == outputs => values,
            Some(values) => {
                let (what, found) = ("a replaced bias", values.len());
                return Err(Error::length(what, outputs, found).in_layer(name));
            }
            None => match self.layout.bias_rows.get(name) {
                Some(BiasRow { tensor, row, .. }) => {
                    let all = self.floats::<f32>(tensor)?;
                    all.chunks_exact(outputs.max(1)).nth(*row).map(<[f32]>::to_vec).ok_or_else(|| absent(&bias))?
                }
                None => self.floats::<f32>(&bias)?,
            },
        };
        Ok(self.layout.ordered(name, stored, 1))
    }

    fn part<T: KernelElement + StoredElement>(
        &self,
        linear: &StoredLinear,
        (name, outputs): &(String, usize),
        stays_dense: bool,
    ) -> Result<LinearPart<T>> {
        let (weight, shape) = (format!("{name}.weight"), (*outputs, linear.inputs));
        let bias = linear.has_bias.then(|| self.bias(name, *outputs)).transpose()?;
        let replaced = self.replace.and_then(|replace| replace(&weight));
        let is_compressed = file::is_compressed(self.reader, &weight) && replaced.is_none();
        let is_as_stored = !linear.is_transposed && !self.layout.orders.contains_key(name);
        if is_compressed && is_as_stored && !stays_dense {
            return LinearPart::compressed(self.reader, &weight, shape, bias);
        }
        // Stored across, the scales are those of input features.
        if replaced.is_none()
            && is_as_stored
            && let Some((values, scales)) = file::dense_int8(self.reader, &weight)?
        {
            return Ok(LinearPart::of(Weight::DenseInt8 { values, scales }, shape, bias));
        }
        let stored = linear.stored_shape(*outputs);
        let values: Vec<T> = match replaced {
            Some(values) => {
                let (expected, found) = (outputs * linear.inputs, values.len());
                if found != expected {
                    return Err(Error::length("a replaced weight", expected, found).in_layer(name));
                }
                narrowed(&values)
            }
            None if is_compressed => narrowed(&file::values(self.reader, &weight, &stored)?),
            None => self.floats(&weight)?,
        };
        let values = if linear.is_transposed { transposed(&values, stored) } else { values };
        let values = self.layout.ordered(name, values, linear.inputs);
        if stays_dense {
            return Ok(LinearPart::of(Weight::Dense(values), shape, bias));
        }
        LinearPart::dense(values, shape, bias)
    }
}

impl<T: KernelElement + StoredElement> Parts<T> for StoredParts<'_> {
    fn vector(&self, name: &str, _: usize) -> Result<Vec<f32>> {
        self.tensor(name)
    }

    fn table(&self, name: &str, shape: [usize; 2]) -> Result<Vec<T>> {
        let skipped = self.layout.tensors.get(name).map_or(0, |stored| stored.skipped);
        let name = self.name_of(name)?;
        match file::is_compressed(self.reader, name) {
            true => Ok(file::values(self.reader, name, &shape)?.into_iter().map(T::from_f32).collect()),
            false => self.floats(name).map(|mut values| values.split_off(skipped.min(values.len()))),
        }
    }

    fn embedding(&self, shape: [usize; 2]) -> Result<Weight<T>> {
        match file::dense_int8(self.reader, self.name_of("embedding.weight")?)? {
            Some((values, scales)) => Ok(Weight::DenseInt8 { values, scales }),
            None => self.table("embedding.weight", shape).map(Weight::Dense),
        }
    }

    fn linear_parts(&self, name: &str, _: (usize, usize)) -> Result<Vec<LinearPart<T>>> {
        let linear = self.layout.linears.get(name).ok_or_else(|| absent(name))?;
        // The embedding reads the head's values where it is the same tensor.
        let stays_dense = self.dense || self.tied && name == "head";
        linear.parts.iter().map(|part| self.part(linear, part, stays_dense)).collect()
    }
}

fn absent(name: &str) -> Error {
    Error::Setting {
        what: "a part of the model",
        found: format!("no `{name}`"),
        expected: "in the checkpoint's layout",
    }
}

/// The transpose of a `[rows, cols]` matrix.
pub(super) fn transposed<T: Copy>(values: &[T], [_, cols]: [usize; 2]) -> Vec<T> {
    (0..cols).flat_map(|col| values.iter().skip(col).step_by(cols.max(1)).copied()).collect()
}
