//! The data types of tensors, under one name for every engine.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::DType;

/// What the elements of a tensor are: of weights, activations, results and accumulators. CUDA kernels number data types in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum DataType {
    F32,
    F16,
    BF16,
    /// 8-bit float: four bits of exponent, three of fraction, no infinity.
    E4M3,
    /// 8-bit float: five bits of exponent, two of fraction.
    E5M2,
    I8,
    I32,
}

impl DataType {
    /// Every data type, in order.
    pub const ALL: [Self; 7] = [Self::F32, Self::F16, Self::BF16, Self::E4M3, Self::E5M2, Self::I8, Self::I32];

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            DataType::F32 | DataType::I32 => 4,
            DataType::F16 | DataType::BF16 => 2,
            DataType::E4M3 | DataType::E5M2 | DataType::I8 => 1,
        }
    }

    /// The name, as in `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            DataType::F32 => "f32",
            DataType::F16 => "f16",
            DataType::BF16 => "bf16",
            DataType::E4M3 => "e4m3",
            DataType::E5M2 => "e5m2",
            DataType::I8 => "i8",
            DataType::I32 => "i32",
        }
    }

    /// The name of the constant that stands for the type in the sources of CUDA kernels, as in `BF16`.
    pub const fn definition(self) -> &'static str {
        match self {
            DataType::F32 => "F32",
            DataType::F16 => "F16",
            DataType::BF16 => "BF16",
            DataType::E4M3 => "E4M3",
            DataType::E5M2 => "E5M2",
            DataType::I8 => "I8",
            DataType::I32 => "I32",
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The data type of what safetensors stores under a dtype.
impl From<DType> for DataType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => DataType::F32,
            DType::F16 => DataType::F16,
            DType::BF16 => DataType::BF16,
            DType::I8 => DataType::I8,
            DType::F8E4M3 => DataType::E4M3,
            DType::F8E5M2 => DataType::E5M2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_in_case_only_and_are_those_of_serde() {
        for data_type in DataType::ALL {
            assert_eq!(data_type.definition().to_lowercase(), data_type.name());
            assert_eq!(serde_json::to_string(&data_type).unwrap(), format!("\"{data_type}\""));
        }
    }

    #[test]
    fn what_is_stored_keeps_its_width() {
        use DType::{BF16, F8E4M3, F8E5M2, F16, F32, I8};
        for dtype in [F32, F16, BF16, I8, F8E4M3, F8E5M2] {
            assert_eq!(DataType::from(dtype).bytes(), dtype.size());
        }
    }
}
