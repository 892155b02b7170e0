//! Formats of weights as values of options, with the line that `--help` has for each.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use twofour::DataType;

use crate::weight_format::WeightFormat;

/// The formats that CPU kernels multiply.
pub const ON_CPU: [WeightFormat; 5] = [
    WeightFormat::Plain(DataType::F32),
    WeightFormat::Plain(DataType::BF16),
    WeightFormat::Plain(DataType::F16),
    WeightFormat::Plain(DataType::I8),
    WeightFormat::Int4,
];

/// What `--help` says of a format of weights.
pub fn description(format: WeightFormat) -> &'static str {
    match format {
        WeightFormat::Plain(DataType::F32) => "IEEE single; on a CPU",
        WeightFormat::Plain(DataType::BF16) => "Brain floating point",
        WeightFormat::Plain(DataType::F16) => "IEEE half",
        WeightFormat::Plain(DataType::E4M3) => "8-bit floating point, 4 bits of exponent and 3 of mantissa; on a GPU",
        WeightFormat::Plain(DataType::E5M2) => {
            "8-bit floating point, 5 bits of exponent and 2 of mantissa; on a GPU, against dense e4m3, since cuBLASLt \
             multiplies no two tensors of e5m2"
        }
        WeightFormat::Plain(DataType::I8) => "8-bit integers with a scale for each row",
        WeightFormat::Plain(DataType::I32) => "32-bit integers",
        WeightFormat::Int4 => {
            "4-bit integers with a scale for every 128 columns; on a CPU against dense int8, on a GPU against dense \
             bf16 and up to 64 tokens"
        }
    }
}

/// The name of a format in options and messages; results are labelled i8 where this is int8.
fn name(format: WeightFormat) -> &'static str {
    match format {
        WeightFormat::Plain(DataType::I8) => "int8",
        format => format.name(),
    }
}

/// The value of an option that names a format.
pub fn possible(format: WeightFormat) -> PossibleValue {
    let alias = Some(format.name()).filter(|alias| *alias != name(format));
    PossibleValue::new(name(format)).aliases(alias).help(description(format))
}

/// Returns the error for a format that CPU kernels do not multiply.
pub fn not_on_cpu(format: WeightFormat) -> anyhow::Error {
    let (format, known) = (name(format), ON_CPU.map(name).join(", "));
    anyhow::anyhow!("a GEMM on a CPU does not support weights of {format}; supported: {known}")
}

/// The parser of an option that takes the formats of CPU kernels.
pub fn on_cpu() -> impl TypedValueParser<Value = WeightFormat> {
    PossibleValuesParser::new(ON_CPU.map(possible)).try_map(|name| name.parse::<WeightFormat>())
}

/// The parser of an option that takes the data types that models compute in.
pub fn computing() -> impl TypedValueParser<Value = DataType> {
    let types = [DataType::F32, DataType::BF16, DataType::F16].map(DataType::name);
    PossibleValuesParser::new(types).try_map(|name| name.parse::<DataType>())
}
