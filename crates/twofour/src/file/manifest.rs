//! What a file's metadata says about its compressed weights.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use serde_json::json;

use super::{
    StoredDType, TensorInfo, ValueFormat,
    unique::{Unique, quoted},
};
use crate::{DataType, Error, Pattern, Result, compressed, int4::Granularity};

/// The metadata name under which the manifest is stored.
pub const MANIFEST_KEY: &str = "twofour";

/// The newest version of the format. Every version up to it is read; a file is written in the oldest version that has
/// all that it holds, so that older readers read what they can.
pub const FORMAT_VERSION: u64 = 2;

/// A part of a compressed weight, stored as a tensor of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The kept values, `[rows, 2 * groups]`, in the weight's dtype; 4-bit integers as U8 `[rows, groups]`.
    Values,
    /// The metadata words, U32 `[rows, ceil(groups / 8)]`.
    Meta,
    /// For I8, optional: one F32 scale a row, `[rows]`. For 4-bit integers and groups of I8: F16 `[rows,
    /// scales_per_row]`.
    Scales,
}

impl Part {
    /// The name under which the part of that weight is stored.
    pub fn key(self, weight: &str) -> String {
        let suffix = match self {
            Part::Values => "values",
            Part::Meta => "meta",
            Part::Scales => "scales",
        };
        format!("{weight}.{suffix}")
    }
}

/// A compressed weight in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompressedInfo {
    /// The weight's name, that of the dense tensor it stands for.
    pub name: String,
    /// How its kept values are stored.
    pub format: ValueFormat,
    /// Rows of the dense weight.
    pub rows: usize,
    /// Columns of the dense weight.
    pub cols: usize,
    /// The pattern; 2:4 in this version of the format.
    pub pattern: Pattern,
}

impl CompressedInfo {
    /// Describes a weight of that shape, without scales.
    ///
    /// # Errors
    /// [`Error::TooLarge`] where the shape is not addressable, [`Error::EmptyWeight`] where it has no elements: such a
    /// tensor is stored dense; [`Error::UnsupportedDType`] for a data type that weights do not have.
    pub fn new(name: impl Into<String>, dtype: DataType, rows: usize, cols: usize) -> Result<Self> {
        if !dtype.is_of_weights() {
            return Err(dtype.not_of_weights("storing a compressed weight"));
        }
        Self::with_format(name.into(), ValueFormat::Plain(dtype), rows, cols)
    }

    /// Describes a weight of 4-bit integers of that shape.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::EmptyWeight`], as [`CompressedInfo::new`].
    pub fn int4(name: impl Into<String>, granularity: Granularity, rows: usize, cols: usize) -> Result<Self> {
        Self::with_format(name.into(), ValueFormat::Int4(granularity), rows, cols)
    }

    /// Describes a weight of 8-bit integers of that shape, with scales.
    ///
    /// # Errors
    /// [`Error::TooLarge`] and [`Error::EmptyWeight`], as [`CompressedInfo::new`].
    pub fn int8(name: impl Into<String>, granularity: Granularity, rows: usize, cols: usize) -> Result<Self> {
        let format = match granularity {
            Granularity::Row => ValueFormat::ScaledI8,
            groups => ValueFormat::GroupedI8(groups),
        };
        Self::with_format(name.into(), format, rows, cols)
    }

    fn with_format(name: String, format: ValueFormat, rows: usize, cols: usize) -> Result<Self> {
        if rows == 0 || cols == 0 {
            return Err(Error::EmptyWeight { rows, cols });
        }
        compressed::lengths(rows, cols)?;
        let info = Self { name, format, rows, cols, pattern: Pattern::TWO_FOUR };
        let bytes = info.parts().iter().try_fold(0usize, |sum, (_, dtype, shape)| sum.checked_add(dtype.bytes(shape)?));
        bytes.map(|_| info).ok_or(Error::TooLarge { shape: vec![rows, cols] })
    }

    /// The same weight with a scale for each row.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] unless it is I8.
    pub fn with_scales(self) -> Result<Self> {
        match self.format {
            ValueFormat::Plain(DataType::I8) | ValueFormat::ScaledI8 => {
                Ok(Self { format: ValueFormat::ScaledI8, ..self })
            }
            other => {
                let operation = "storing scales with a compressed weight";
                Err(Error::UnsupportedDType { operation, dtype: other.dense(), supported: "i8" }.in_tensor(self.name))
            }
        }
    }

    /// Name, dtype and shape of each part that the file holds.
    pub fn parts(&self) -> Vec<(Part, StoredDType, Vec<usize>)> {
        let groups = compressed::groups_per_row(self.cols);
        let values = match self.format {
            ValueFormat::Int4(_) => groups,
            _ => 2 * groups,
        };
        let mut parts = vec![
            (Part::Values, self.format.stored(), vec![self.rows, values]),
            (Part::Meta, StoredDType::U32, vec![self.rows, compressed::meta_words_per_row(self.cols)]),
        ];
        match self.format {
            ValueFormat::Plain(_) => {}
            ValueFormat::ScaledI8 => parts.push((Part::Scales, StoredDType::F32, vec![self.rows])),
            ValueFormat::Int4(granularity) | ValueFormat::GroupedI8(granularity) => {
                let shape = vec![self.rows, granularity.scales_per_row(self.cols)];
                parts.push((Part::Scales, StoredDType::F16, shape));
            }
        }
        parts
    }

    /// Bytes of values and metadata (and scales) together.
    pub fn bytes(&self) -> usize {
        // Checked by `with_format`, but for a scale a row of I8 that is added later, which is less than the dense
        // weight.
        self.parts().iter().filter_map(|(_, dtype, shape)| dtype.bytes(shape)).sum()
    }

    /// Bytes that the dense weight takes, of [`ValueFormat::dense`]. Saturates: a shape that is addressable compressed
    /// may not be so dense.
    pub fn dense_bytes(&self) -> usize {
        self.rows.saturating_mul(self.cols).saturating_mul(self.format.dense().bytes())
    }
}

#[derive(serde::Deserialize)]
struct RawManifest {
    weights: Unique<RawWeight>,
}

#[derive(serde::Deserialize)]
struct RawWeight {
    shape: (u64, u64),
    dtype: String,
    pattern: String,
    group_size: Option<u64>,
}

/// The manifest's text for these weights.
pub(super) fn to_json<'a>(weights: impl IntoIterator<Item = &'a CompressedInfo>) -> String {
    let mut version = 1;
    let weights: serde_json::Map<_, _> = weights
        .into_iter()
        .map(|w| {
            version = version.max(w.format.since());
            let mut entry =
                json!({ "shape": [w.rows, w.cols], "dtype": w.format.name(), "pattern": w.pattern.to_string() });
            if let Some(columns) = w.format.group_size() {
                entry["group_size"] = columns.into();
            }
            (w.name.clone(), entry)
        })
        .collect();
    json!({ "version": version, "weights": weights }).to_string()
}

/// Reads a file's manifest and holds it against the tensors, by name, that the model's files have; in order of name.
///
/// # Errors
/// [`Error::FormatVersion`] where a newer twofour wrote it, [`Error::Format`] where it contradicts itself or the
/// tensors.
pub(super) fn parse(
    path: &Path,
    metadata: &BTreeMap<String, String>,
    tensors: &HashMap<&str, &TensorInfo>,
) -> Result<Vec<CompressedInfo>> {
    let Some(text) = metadata.get(MANIFEST_KEY) else { return Ok(Vec::new()) };
    let fault = |reason: String| Error::Format { path: path.to_owned(), reason };
    let manifest: serde_json::Value =
        serde_json::from_str(text).map_err(|e| fault(format!("metadata `{MANIFEST_KEY}`: {e}")))?;
    // The version first: a newer manifest may look different in every other respect.
    let version = match manifest.get("version").and_then(serde_json::Value::as_u64) {
        Some(version @ 1..=FORMAT_VERSION) => version,
        Some(found) if found > FORMAT_VERSION => {
            return Err(Error::FormatVersion { path: path.to_owned(), found, newest: FORMAT_VERSION });
        }
        _ => return Err(fault(format!("metadata `{MANIFEST_KEY}`: `version` is not a positive whole number"))),
    };
    let manifest: RawManifest =
        serde_json::from_str(text).map_err(|e| fault(format!("metadata `{MANIFEST_KEY}`: {e}")))?;
    let mut weights = Vec::with_capacity(manifest.weights.0.len());
    for (name, raw) in manifest.weights.0 {
        let weight = check(&name, &raw, version, tensors)
            .map_err(|reason| fault(format!("compressed weight {}: {reason}", quoted(&name))))?;
        weights.push(weight);
    }
    weights.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(weights)
}

fn check(
    name: &str,
    raw: &RawWeight,
    version: u64,
    tensors: &HashMap<&str, &TensorInfo>,
) -> Result<CompressedInfo, String> {
    let format = ValueFormat::named(&raw.dtype, raw.group_size, version)?;
    match raw.pattern.parse::<Pattern>() {
        Ok(Pattern::TWO_FOUR) => {}
        Ok(other) => return Err(format!("pattern {other}; version {version} of the format has 2:4 only")),
        Err(_) => return Err(format!("pattern {} is not one", quoted(&raw.pattern))),
    }
    let dim = |dim: u64| usize::try_from(dim).map_err(|_| format!("shape {:?} is not addressable", raw.shape));
    let mut weight = CompressedInfo::with_format(name.to_owned(), format, dim(raw.shape.0)?, dim(raw.shape.1)?)
        .map_err(|e| e.to_string())?;
    // A tensor of that name that is anything else is an ordinary tensor: the input's own, in its own convention.
    let scales = tensors.get(Part::Scales.key(name).as_str());
    if format == ValueFormat::Plain(DataType::I8)
        && scales.is_some_and(|t| t.dtype == StoredDType::F32 && t.shape == [weight.rows])
    {
        weight.format = ValueFormat::ScaledI8;
    }
    for (part, dtype, shape) in weight.parts() {
        let key = part.key(name);
        let Some(tensor) = tensors.get(key.as_str()) else {
            return Err(format!(
                "its tensor {} is missing; a file of a sharded model is read through its index",
                quoted(&key)
            ));
        };
        if (tensor.dtype, &tensor.shape) != (dtype, &shape) {
            return Err(format!(
                "its tensor {} should be {dtype} {shape:?} and is {} {:?}",
                quoted(&key),
                tensor.dtype,
                tensor.shape
            ));
        }
    }
    if tensors.contains_key(name) {
        return Err("the file holds a dense tensor of the same name too".to_owned());
    }
    Ok(weight)
}
