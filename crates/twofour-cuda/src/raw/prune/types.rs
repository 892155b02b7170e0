//! The data types that pruning and compression support.

use crate::{
    DataType, Device, Error, Result,
    source::{Source, Support},
};

/// The supported data types of tensors and of their compressed values.
pub(crate) const TYPES: [(DataType, DataType); 10] = {
    use DataType::{BF16, E4M3, E5M2, F16, F32};
    [
        (F32, F16),
        (F32, BF16),
        (F16, F16),
        (BF16, BF16),
        (F32, E4M3),
        (F32, E5M2),
        (F16, E4M3),
        (F16, E5M2),
        (BF16, E4M3),
        (BF16, E5M2),
    ]
};

/// Returns the definitions of data types, and the architectures that have them.
pub(crate) fn types(input: DataType, output: DataType) -> (String, Support) {
    // Earlier architectures have no 8-bit floats.
    let support = if output.bytes() > 1 { Support::ALL } else { Support::FLOAT8 };
    (format!("#define IN {}\n#define OUT {}\n", input.definition(), output.definition()), support)
}

/// Returns an error for data types that compression does not support, or that the device lacks.
pub(crate) fn expect_types(device: &Device, input: DataType, output: DataType, source: &Source) -> Result<()> {
    if !TYPES.contains(&(input, output)) {
        return Err(Error::Types { input, output });
    }
    source.expect("compressing to 8-bit floats", device.architecture())
}
