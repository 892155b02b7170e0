//! Data types as values of options, with the line that `--help` has for each.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use twofour::DataType;

/// The data types that CPU kernels multiply.
pub(crate) const ON_CPU: [DataType; 4] = [DataType::F32, DataType::BF16, DataType::F16, DataType::I8];

/// What `--help` says of a data type of weights.
pub(crate) fn description(data_type: DataType) -> &'static str {
    match data_type {
        DataType::F32 => "IEEE single; on a CPU",
        DataType::BF16 => "Brain floating point",
        DataType::F16 => "IEEE half",
        DataType::E4M3 => "8-bit floating point, 4 bits of exponent and 3 of mantissa; on a GPU",
        DataType::E5M2 => {
            "8-bit floating point, 5 bits of exponent and 2 of mantissa; on a GPU, against dense e4m3, since cuBLASLt multiplies no two tensors of e5m2"
        }
        DataType::I8 => "8-bit integers with a scale for each row",
        DataType::I32 => "32-bit integers",
    }
}

/// The value of an option that names a data type.
pub(crate) fn possible(data_type: DataType) -> PossibleValue {
    PossibleValue::new(data_type.name()).help(description(data_type))
}

/// The parser of an option that takes the data types of CPU kernels.
pub(crate) fn on_cpu() -> impl TypedValueParser<Value = DataType> {
    PossibleValuesParser::new(ON_CPU.map(possible)).try_map(|name| name.parse::<DataType>())
}

/// The parser of an option that takes the data types that models compute in.
pub(crate) fn computing() -> impl TypedValueParser<Value = DataType> {
    let types = [DataType::F32, DataType::BF16, DataType::F16].map(DataType::name);
    PossibleValuesParser::new(types).try_map(|name| name.parse::<DataType>())
}
