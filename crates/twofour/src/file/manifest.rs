//! What a file's metadata says about its compressed weights.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use serde_json::json;

use super::{
    StoredDType, TensorInfo,
    unique::{Unique, quoted},
};
use crate::{DataType, Error, Pattern, Result, compressed};

/// The metadata name under which the manifest is stored.
pub const MANIFEST_KEY: &str = "twofour";

/// The version of the format that is written, and the newest that is read.
pub const FORMAT_VERSION: u64 = 1;

/// A part of a compressed weight, stored as a tensor of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The kept values, `[rows, 2 * groups]`, in the weight's dtype.
    Values,
    /// The metadata words, U32 `[rows, ceil(groups / 8)]`.
    Meta,
    /// Optional, for I8: one F32 scale a row, `[rows]`.
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
    /// The dtype of its elements.
    pub dtype: DataType,
    /// Rows of the dense weight.
    pub rows: usize,
    /// Columns of the dense weight.
    pub cols: usize,
    /// The pattern; 2:4 in this version of the format.
    pub pattern: Pattern,
    /// Whether the file holds a scale for each row (I8 only).
    pub scaled: bool,
}

impl CompressedInfo {
    /// Describes a weight of that shape, without scales.
    ///
    /// # Errors
    /// [`Error::TooLarge`] where the shape is not addressable, [`Error::EmptyWeight`] where it has no elements: such a
    /// tensor is stored dense; [`Error::UnsupportedDType`] for a data type that weights do not have.
    pub fn new(name: impl Into<String>, dtype: DataType, rows: usize, cols: usize) -> Result<Self> {
        if rows == 0 || cols == 0 {
            return Err(Error::EmptyWeight { rows, cols });
        }
        if !dtype.is_of_weights() {
            return Err(dtype.not_of_weights("storing a compressed weight"));
        }
        let (values, meta) = compressed::lengths(rows, cols)?;
        let addressable = values.checked_mul(dtype.bytes()).and_then(|v| v.checked_add(meta.checked_mul(4)?));
        if addressable.is_none() {
            return Err(Error::TooLarge { shape: vec![rows, cols] });
        }
        Ok(Self { name: name.into(), dtype, rows, cols, pattern: Pattern::TWO_FOUR, scaled: false })
    }

    /// The same weight with a scale for each row.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] unless it is I8.
    pub fn with_scales(self) -> Result<Self> {
        if self.dtype != DataType::I8 {
            let operation = "storing scales with a compressed weight";
            return Err(Error::UnsupportedDType { operation, dtype: self.dtype, supported: "i8" }.in_tensor(self.name));
        }
        Ok(Self { scaled: true, ..self })
    }

    /// Name, dtype and shape of each part that the file holds.
    pub fn parts(&self) -> Vec<(Part, StoredDType, Vec<usize>)> {
        let groups = compressed::groups_per_row(self.cols);
        let mut parts = vec![
            (Part::Values, self.dtype.into(), vec![self.rows, 2 * groups]),
            (Part::Meta, StoredDType::U32, vec![self.rows, compressed::meta_words_per_row(self.cols)]),
        ];
        if self.scaled {
            parts.push((Part::Scales, StoredDType::F32, vec![self.rows]));
        }
        parts
    }

    /// Bytes of values and metadata (and scales) together.
    pub fn bytes(&self) -> usize {
        // Checked by `new`; a scale a row is less than the values.
        self.parts().iter().filter_map(|(_, dtype, shape)| dtype.bytes(shape)).sum()
    }

    /// Bytes that the dense weight takes.
    pub fn dense_bytes(&self) -> usize {
        self.rows.saturating_mul(self.cols).saturating_mul(self.dtype.bytes())
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
}

/// The manifest's text for these weights.
pub(super) fn to_json<'a>(weights: impl IntoIterator<Item = &'a CompressedInfo>) -> String {
    let weights: serde_json::Map<_, _> = weights
        .into_iter()
        .map(|w| {
            let entry = json!({ "shape": [w.rows, w.cols], "dtype": StoredDType::from(w.dtype).name(), "pattern": w.pattern.to_string() });
            (w.name.clone(), entry)
        })
        .collect();
    json!({ "version": FORMAT_VERSION, "weights": weights }).to_string()
}

/// Reads a file's manifest and holds it against the tensors, by name, that the model's files have; in order of name.
///
/// # Errors
/// [`Error::FormatVersion`] where a newer twofour wrote it, [`Error::Format`] where it contradicts itself or the tensors.
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
    match manifest.get("version").and_then(serde_json::Value::as_u64) {
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
        let weight = check(&name, &raw, tensors)
            .map_err(|reason| fault(format!("compressed weight {}: {reason}", quoted(&name))))?;
        weights.push(weight);
    }
    weights.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(weights)
}

fn check(name: &str, raw: &RawWeight, tensors: &HashMap<&str, &TensorInfo>) -> Result<CompressedInfo, String> {
    let dtype = StoredDType::from_name(&raw.dtype).and_then(StoredDType::element);
    let dtype = dtype.ok_or_else(|| format!("dtype {} is unknown", quoted(&raw.dtype)))?;
    match raw.pattern.parse::<Pattern>() {
        Ok(Pattern::TWO_FOUR) => {}
        Ok(other) => return Err(format!("pattern {other}; version {FORMAT_VERSION} of the format knows 2:4 only")),
        Err(_) => return Err(format!("pattern {} is not one", quoted(&raw.pattern))),
    }
    let dim = |dim: u64| usize::try_from(dim).map_err(|_| format!("shape {:?} is not addressable", raw.shape));
    let mut weight =
        CompressedInfo::new(name, dtype, dim(raw.shape.0)?, dim(raw.shape.1)?).map_err(|e| e.to_string())?;
    // A tensor of that name that is anything else is an ordinary tensor: the input's own, in its own convention.
    weight.scaled = dtype == DataType::I8
        && tensors
            .get(Part::Scales.key(name).as_str())
            .is_some_and(|t| t.dtype == StoredDType::F32 && t.shape == [weight.rows]);
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
