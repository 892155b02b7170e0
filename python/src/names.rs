//! The names that Python has for data types, mask rules, estimators and activations, each in one table.
//!
//! Operators take rules, estimators and activations by number, since schemas without strings cost less. The number is
//! the index here; the package's `operators` reads the tables as dictionaries.

use pyo3::{prelude::*, types::PyDict};
use twofour::{
    DataType,
    estimate::Estimator,
    file::StoredDType,
    int4::Granularity,
    layer::{Activation, MaskRule},
};

use crate::torch::ScalarType;

/// Data types by the names that numpy, `ml_dtypes` and torch have for them.
const DATA_TYPES: [(&str, StoredDType); 19] = [
    ("complex64", StoredDType::C64),
    ("float64", StoredDType::F64),
    ("int64", StoredDType::I64),
    ("uint64", StoredDType::U64),
    ("float32", StoredDType::F32),
    ("int32", StoredDType::I32),
    ("uint32", StoredDType::U32),
    ("bfloat16", StoredDType::BF16),
    ("float16", StoredDType::F16),
    ("int16", StoredDType::I16),
    ("uint16", StoredDType::U16),
    ("float8_e4m3fn", StoredDType::F8E4M3),
    ("float8_e4m3fnuz", StoredDType::F8E4M3Fnuz),
    ("float8_e5m2", StoredDType::F8E5M2),
    ("float8_e5m2fnuz", StoredDType::F8E5M2Fnuz),
    ("float8_e8m0fnu", StoredDType::F8E8M0),
    ("int8", StoredDType::I8),
    ("uint8", StoredDType::U8),
    ("bool", StoredDType::Bool),
];

/// Activations of the GEMM's epilogue, by number.
pub(crate) const ACTIVATIONS: [Activation; 4] =
    [Activation::Identity, Activation::Relu, Activation::Silu, Activation::Gelu];

/// The name of weights of 4-bit integers.
pub(crate) const INT4: &str = "int4";

/// What shares a scale of 4-bit integers: 128 or 64 columns, or a row for -1; `None` for another number.
pub(crate) fn granularity(group_size: i64) -> Option<Granularity> {
    match group_size {
        PER_ROW => Some(Granularity::Row),
        size => usize::try_from(size).ok().and_then(Granularity::of_columns),
    }
}

/// The number of [`granularity`].
pub(crate) fn group_size(granularity: Granularity) -> i64 {
    granularity.columns().map_or(PER_ROW, |columns| columns as i64)
}

/// The group size of a scale for each row.
pub(crate) const PER_ROW: i64 = -1;

/// The data type of weights of that name; `None` where there is none.
pub(crate) fn of_weights(name: &str) -> Option<DataType> {
    DATA_TYPES.iter().find(|(known, _)| *known == name).and_then(|(_, stored)| stored.element())
}

/// The names of all data types of weights.
pub(crate) fn all_of_weights() -> Vec<&'static str> {
    DATA_TYPES.iter().filter(|(_, stored)| stored.element().is_some()).map(|(name, _)| *name).collect()
}

/// The name of a data type.
pub(crate) fn of(data_type: StoredDType) -> &'static str {
    DATA_TYPES.iter().find(|(_, stored)| *stored == data_type).map_or(data_type.name(), |(name, _)| name)
}

/// Adds the tables to the module: names of data types to those of safetensors, and all others to numbers; those of
/// torch's types are torch's.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let stored = PyDict::new(module.py());
    for (name, dtype) in DATA_TYPES {
        stored.set_item(name, dtype.name())?;
    }
    module.add("STORED_DTYPES", stored)?;
    let scalars = PyDict::new(module.py());
    for scalar in ScalarType::ALL {
        scalars.set_item(scalar.name(), scalar as i64)?;
    }
    module.add("TORCH_DTYPES", scalars)?;
    let numbered = |names: Vec<&str>| {
        let numbers = PyDict::new(module.py());
        names.iter().enumerate().try_for_each(|(number, name)| numbers.set_item(name, number))?;
        PyResult::Ok(numbers)
    };
    module.add("MASK_RULES", numbered(MaskRule::CHOOSING.map(MaskRule::name).into())?)?;
    module.add("ESTIMATORS", numbered(Estimator::all(0).map(Estimator::name).into())?)?;
    module.add("ACTIVATIONS", numbered(ACTIVATIONS.map(Activation::name).into())?)
}
