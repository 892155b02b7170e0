//! The formats of weights that are measured.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use twofour::DataType;

/// The format of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightFormat {
    /// One value for each kept element.
    Plain(DataType),
    /// 4-bit integers with a scale for every 128 columns. On a CPU activations are quantized to int8.
    Int4,
}

impl WeightFormat {
    /// The name, as in `bf16` or `int4`.
    pub fn name(self) -> &'static str {
        match self {
            WeightFormat::Plain(data_type) => data_type.name(),
            WeightFormat::Int4 => "int4",
        }
    }
}

impl From<DataType> for WeightFormat {
    fn from(data_type: DataType) -> Self {
        WeightFormat::Plain(data_type)
    }
}

impl FromStr for WeightFormat {
    type Err = twofour::Error;

    fn from_str(name: &str) -> twofour::Result<Self> {
        match name {
            "int4" => Ok(WeightFormat::Int4),
            "int8" => Ok(WeightFormat::Plain(DataType::I8)),
            name => name.parse().map(WeightFormat::Plain),
        }
    }
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for WeightFormat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for WeightFormat {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
    }
}
