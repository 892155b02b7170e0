//! How the kept values of a compressed weight are stored.

use super::StoredDType;
use crate::{
    DataType,
    int4::{GROUP, Granularity},
};

/// How the kept values of a compressed weight are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ValueFormat {
    /// As elements of the weight's data type.
    Plain(DataType),
    /// As 8-bit integers, with an F32 scale for each row.
    ScaledI8,
    /// As 4-bit integers, two in a byte, with F16 scales: an [`Int4`](crate::int4::Int4).
    Int4(Granularity),
}

/// The manifest's name of 4-bit integers.
const INT4: &str = "I4";

impl ValueFormat {
    /// The name of the values' type in the manifest: safetensors', or `I4`.
    pub fn name(self) -> &'static str {
        match self {
            ValueFormat::Int4(_) => INT4,
            other => other.stored().name(),
        }
    }

    /// The dtype of the tensor that holds the values.
    pub fn stored(self) -> StoredDType {
        match self {
            ValueFormat::Plain(dtype) => dtype.into(),
            ValueFormat::ScaledI8 => StoredDType::I8,
            ValueFormat::Int4(_) => StoredDType::U8,
        }
    }

    /// The data type of the dense weight that [`decompress`](crate::file::decompress()) makes: F32 for 4-bit integers, whose products with scales are
    /// exact in it.
    pub fn dense(self) -> DataType {
        match self {
            ValueFormat::Plain(dtype) => dtype,
            ValueFormat::ScaledI8 => DataType::I8,
            ValueFormat::Int4(_) => DataType::F32,
        }
    }

    /// The manifest's field `group_size`: the columns that share a scale, where it is not a whole row.
    pub(super) fn group_size(self) -> Option<u64> {
        matches!(self, ValueFormat::Int4(Granularity::Group)).then_some(GROUP as u64)
    }

    /// The format of a manifest's entry, but for the scales of 8-bit integers, which no field tells.
    ///
    /// # Errors
    /// A text that says what the entry names that does not exist.
    pub(super) fn named(name: &str, group_size: Option<u64>) -> Result<Self, String> {
        if name == INT4 {
            return match group_size {
                None => Ok(ValueFormat::Int4(Granularity::Row)),
                Some(size) if size == GROUP as u64 => Ok(ValueFormat::Int4(Granularity::Group)),
                Some(other) => Err(format!("group_size {other}; version 1 of the format has {GROUP} only")),
            };
        }
        let dtype = StoredDType::from_name(name).and_then(StoredDType::element);
        dtype.map(ValueFormat::Plain).ok_or_else(|| format!("dtype {} is unknown", super::unique::quoted(name)))
    }
}
