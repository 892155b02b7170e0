//! The data types of tensors, under one name for every engine and front end.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The type of a tensor's elements: of weights, activations, results and accumulators. CUDA kernels number data types
/// in this order.
///
/// Two other vocabularies exist because others define them: [`StoredDType`](crate::file::StoredDType), all that
/// safetensors files may hold, and the types of the frameworks.
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

    /// Whether weights are pruned, compressed and stored in it: all but i32, the type of integer accumulators.
    pub const fn is_of_weights(self) -> bool {
        !matches!(self, DataType::I32)
    }

    /// The error of an operation on weights.
    #[doc(hidden)]
    pub const fn not_of_weights(self, operation: &'static str) -> Error {
        Error::UnsupportedDType { operation, dtype: self, supported: "f32, f16, bf16, e4m3, e5m2, i8" }
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

impl FromStr for DataType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|data_type| data_type.name() == name).ok_or_else(|| Error::UnknownDataType {
            name: name.to_owned(),
            known: "f32, f16, bf16, e4m3, e5m2, i8, i32",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Element;
    use crate::match_element;

    #[test]
    fn names_differ_in_case_only_and_are_those_of_serde() {
        for data_type in DataType::ALL {
            assert_eq!(data_type.definition().to_lowercase(), data_type.name());
            assert_eq!(serde_json::to_string(&data_type).unwrap(), format!("\"{data_type}\""));
            assert_eq!(data_type.name().parse::<DataType>().unwrap(), data_type);
        }
        let error = "f64".parse::<DataType>().unwrap_err().to_string();
        assert!(DataType::ALL.iter().all(|data_type| error.contains(data_type.name())), "{error}");
    }

    #[test]
    fn elements_have_the_type_that_names_them() {
        fn of<T: Element>() -> Result<(DataType, usize)> {
            Ok((T::DTYPE, size_of::<T>()))
        }
        for data_type in DataType::ALL {
            match match_element!(data_type, |T| of::<T>()) {
                Ok(found) => assert_eq!(found, (data_type, data_type.bytes())),
                Err(error) => {
                    assert!(
                        matches!(error, Error::UnsupportedDType { dtype: DataType::I32, .. })
                            && !data_type.is_of_weights()
                    );
                }
            }
        }
    }
}
