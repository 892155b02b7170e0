//! Weights as a file holds them, for an engine that packs them itself.

use half::{bf16, f16};
use twofour::{
    Arithmetic, Compressed, DataType, MatrixRef,
    file::{Reader, ValueFormat},
    int4::{Granularity, Int4},
    kernel::KernelElement,
};

use super::{build::Parts, weight::Weight};
use crate::{
    Result,
    model::file::{self, unsupported},
};

/// The weight of some of a linear layer's output features, in the type to compute in or in integers.
#[derive(Debug)]
pub(crate) enum StoredWeight<T> {
    Dense(Vec<T>),
    Compressed(Compressed<T>),
    /// 8-bit integers with a scale for each row.
    Int8(Compressed<i8>, Vec<f32>),
    /// Dense 8-bit integers with a scale for each row.
    DenseInt8(Vec<i8>, Vec<f32>),
    Int4(Int4),
}

/// Some of a linear layer's output features.
#[derive(Debug)]
pub(crate) struct StoredPart<T> {
    pub(crate) weight: StoredWeight<T>,
    pub(crate) bias: Option<Vec<f32>>,
    pub(crate) outputs: usize,
}

/// Where the parts of a model come from, with linear layers as they are stored.
pub(crate) trait StoredLinears<T: KernelElement>: Parts<T> {
    /// The parts of a linear layer `[outputs, inputs]`, whose output features follow each other; `name` is without
    /// `.weight`.
    fn stored_linear(&self, name: &str, shape: (usize, usize)) -> Result<Vec<StoredPart<T>>>;
}

fn converted<S: Arithmetic, T: Arithmetic>(weight: Compressed<S>) -> Result<Compressed<T>> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let (values, meta) = weight.into_parts();
    let values = values.into_iter().map(|value| T::from_f32(value.to_f32())).collect();
    Ok(Compressed::from_parts(rows, cols, values, meta)?)
}

impl<T: KernelElement> StoredWeight<T> {
    /// A weight `[outputs, inputs]` that a file holds dense: 2:4 where it is.
    pub(crate) fn of_values(values: Vec<T>, (outputs, inputs): (usize, usize)) -> Result<Self> {
        // One row tells a dense weight from a 2:4 one in no time.
        let is_sparse = match values.get(..inputs) {
            Some(row) => Compressed::from_dense(MatrixRef::new(1, inputs, row)?).is_ok(),
            None => false,
        };
        let sparse = match is_sparse {
            true => Compressed::from_dense(MatrixRef::new(outputs, inputs, &values)?).ok(),
            false => None,
        };
        Ok(sparse.map_or(StoredWeight::Dense(values), StoredWeight::Compressed))
    }

    /// A weight `[outputs, inputs]` that the file holds compressed. Integers with scales for groups that GPUs have no
    /// kernels for are dequantized.
    pub(crate) fn compressed(reader: &Reader, name: &str, (outputs, inputs): (usize, usize)) -> Result<Self> {
        let weight = match file::compressed_format(reader, name, [outputs, inputs])? {
            ValueFormat::Plain(DataType::F32) => converted(reader.compressed::<f32>(name)?)?,
            ValueFormat::Plain(DataType::BF16) => converted(reader.compressed::<bf16>(name)?)?,
            ValueFormat::Plain(DataType::F16) => converted(reader.compressed::<f16>(name)?)?,
            ValueFormat::ScaledI8 => {
                let (weight, scales) = reader.int8(name)?.into_parts();
                return Ok(StoredWeight::Int8(weight, scales));
            }
            ValueFormat::GroupedI8(_) => converted(reader.int8(name)?.dequantize())?,
            ValueFormat::Int4(Granularity::Group64) => converted(reader.int4(name)?.dequantize())?,
            ValueFormat::Int4(_) => return Ok(StoredWeight::Int4(reader.int4(name)?)),
            other => return Err(unsupported(reader, name, other)),
        };
        Ok(StoredWeight::Compressed(weight))
    }

    /// The weight as dense values.
    fn into_dense(self) -> Vec<T> {
        let narrowed = |weight: Compressed<f32>| weight.to_dense().into_iter().map(T::from_f32).collect();
        match self {
            StoredWeight::Dense(values) => values,
            StoredWeight::Compressed(weight) => weight.to_dense(),
            StoredWeight::Int8(weight, scales) => {
                let cols = weight.cols().max(1);
                let dense = weight.to_dense();
                let rows = dense.chunks(cols).zip(scales);
                rows.flat_map(|(row, scale)| row.iter().map(move |v| T::from_f32(f32::from(*v) * scale))).collect()
            }
            StoredWeight::DenseInt8(values, scales) => {
                file::dequantized((values, scales)).into_iter().map(T::from_f32).collect()
            }
            StoredWeight::Int4(weight) => narrowed(weight.dequantize()),
        }
    }
}

impl<T: KernelElement> TryFrom<Weight<T>> for StoredWeight<T> {
    type Error = crate::Error;

    fn try_from(weight: Weight<T>) -> Result<Self> {
        Ok(match weight {
            Weight::Dense(values) => StoredWeight::Dense(values),
            Weight::Sparse(weight) => StoredWeight::Compressed(weight),
            Weight::DenseInt8 { values, scales } => StoredWeight::DenseInt8(values, scales),
            Weight::F32(weight) => StoredWeight::Compressed(converted(weight)?),
            Weight::Bf16(weight) => StoredWeight::Compressed(converted(weight)?),
            Weight::F16(weight) => StoredWeight::Compressed(converted(weight)?),
            Weight::Int8(weight) if weight.granularity() == Granularity::Row => {
                let (weight, scales) = weight.into_parts();
                StoredWeight::Int8(weight, scales)
            }
            Weight::Int8(weight) => StoredWeight::Compressed(converted(weight.dequantize())?),
            Weight::Int4(weight) => StoredWeight::Int4(weight),
        })
    }
}

/// One weight of the rows of several, `[outputs, inputs]`: in their form where they have one form, otherwise dense.
pub(crate) fn concatenated<T: KernelElement>(
    parts: Vec<StoredWeight<T>>,
    (outputs, inputs): (usize, usize),
) -> Result<StoredWeight<T>> {
    if parts.len() == 1 {
        return Ok(parts.into_iter().next().unwrap_or(StoredWeight::Dense(vec![])));
    }
    fn joined<E: twofour::Element>(weights: Vec<Compressed<E>>, shape: (usize, usize)) -> Result<Compressed<E>> {
        let (mut values, mut meta) = (vec![], vec![]);
        for weight in weights {
            let (more_values, more_meta) = weight.into_parts();
            values.extend(more_values);
            meta.extend(more_meta);
        }
        Ok(Compressed::from_parts(shape.0, shape.1, values, meta)?)
    }
    let shape = (outputs, inputs);
    let granularity = match parts.first() {
        Some(StoredWeight::Int4(weight)) => Some(weight.granularity()),
        _ => None,
    };
    if parts.iter().all(|part| matches!(part, StoredWeight::Compressed(_))) {
        let weights = parts.into_iter().filter_map(|part| match part {
            StoredWeight::Compressed(weight) => Some(weight),
            _ => None,
        });
        return Ok(StoredWeight::Compressed(joined(weights.collect(), shape)?));
    }
    if parts.iter().all(|part| matches!(part, StoredWeight::Int8(..))) {
        let (mut weights, mut all) = (vec![], vec![]);
        for part in parts {
            if let StoredWeight::Int8(weight, scales) = part {
                weights.push(weight);
                all.extend(scales);
            }
        }
        return Ok(StoredWeight::Int8(joined(weights, shape)?, all));
    }
    let is_alike =
        |part: &StoredWeight<T>| matches!(part, StoredWeight::Int4(w) if Some(w.granularity()) == granularity);
    if let (Some(granularity), true) = (granularity, parts.iter().all(is_alike)) {
        let (mut weights, mut all) = (vec![], vec![]);
        for part in parts {
            if let StoredWeight::Int4(weight) = part {
                all.extend_from_slice(weight.scales());
                weights.push(weight.weight().clone());
            }
        }
        return Ok(StoredWeight::Int4(Int4::from_parts(joined(weights, shape)?, all, granularity)?));
    }
    Ok(StoredWeight::Dense(parts.into_iter().flat_map(StoredWeight::into_dense).collect()))
}
