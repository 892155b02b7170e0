//! How the kept values of a compressed weight are stored.

use super::StoredDType;
use crate::{DataType, int4::Granularity};

/// How the kept values of a compressed weight are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ValueFormat {
    /// As elements of the weight's data type.
    Plain(DataType),
    /// As 8-bit integers, with an F32 scale for each row: an [`Int8`](crate::int8::Int8).
    ScaledI8,
    /// As 8-bit integers, with F16 scales for groups of columns: an [`Int8`](crate::int8::Int8). Since version 2; the
    /// granularity is never [`Granularity::Row`].
    GroupedI8(Granularity),
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
            ValueFormat::ScaledI8 | ValueFormat::GroupedI8(_) => StoredDType::I8,
            ValueFormat::Int4(_) => StoredDType::U8,
        }
    }

    /// The data type of the dense weight that [`Decompress`](crate::file::Decompress) makes: F32 for integers with
    /// scales. Their products are exact in it where scales are F16.
    pub fn dense(self) -> DataType {
        match self {
            ValueFormat::Plain(dtype) => dtype,
            ValueFormat::ScaledI8 | ValueFormat::Int4(_) | ValueFormat::GroupedI8(_) => DataType::F32,
        }
    }

    /// The first version of the format that has it.
    pub fn since(self) -> u64 {
        match self {
            ValueFormat::GroupedI8(_) | ValueFormat::Int4(Granularity::Group64) => 2,
            _ => 1,
        }
    }

    /// The manifest's field `group_size`: the columns that share a scale, where it is not a whole row.
    pub fn group_size(self) -> Option<usize> {
        match self {
            ValueFormat::Int4(granularity) | ValueFormat::GroupedI8(granularity) => granularity.columns(),
            _ => None,
        }
    }

    /// The format of a manifest's entry, but for the scales of rows of 8-bit integers, which no field tells.
    ///
    /// # Errors
    /// A text that says what the entry names that does not exist in that version.
    pub(super) fn named(name: &str, group_size: Option<u64>, version: u64) -> Result<Self, String> {
        let granularity = || match group_size {
            None => Ok(Granularity::Row),
            Some(size) => {
                let found = usize::try_from(size).ok().and_then(Granularity::of_columns);
                found.ok_or_else(|| format!("group_size {size}; version {version} of the format has 128 and 64 only"))
            }
        };
        let format = match (name, group_size) {
            (INT4, _) => ValueFormat::Int4(granularity()?),
            // Version 1 has no such field for 8-bit integers, and readers ignore fields that they do not have.
            ("I8", Some(_)) if version > 1 => ValueFormat::GroupedI8(granularity()?),
            _ => {
                let dtype = StoredDType::from_name(name).and_then(StoredDType::element);
                let unknown = || format!("dtype {} is unknown", super::unique::quoted(name));
                ValueFormat::Plain(dtype.ok_or_else(unknown)?)
            }
        };
        if format.since() > version {
            let size = group_size.unwrap_or_default();
            return Err(format!("group_size {size} of {name}, which version {version} of the format does not have"));
        }
        Ok(format)
    }
}
