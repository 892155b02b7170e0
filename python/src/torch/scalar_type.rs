//! The types of torch's elements.

use twofour::file::StoredDType;

use crate::names;

/// torch's scalar types (`c10::ScalarType`), as far as kernels take them, by torch's numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum ScalarType {
    U8 = 0,
    I8 = 1,
    I16 = 2,
    I32 = 3,
    I64 = 4,
    F16 = 5,
    F32 = 6,
    Bool = 11,
    Bf16 = 15,
    E5m2 = 23,
    E4m3 = 24,
}

impl ScalarType {
    /// The type of torch's number.
    pub(crate) fn of(number: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as i64 == number)
    }

    /// The type of torch's name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.name() == name)
    }

    /// torch's name of the type of that number, for errors.
    pub(crate) fn name_of(number: i64) -> String {
        let other = match number {
            7 => "float64",
            8 => "complex32",
            9 => "complex64",
            10 => "complex128",
            12..=14 | 16..=17 => "a quantized type",
            25 => "float8_e5m2fnuz",
            26 => "float8_e4m3fnuz",
            27 => "uint16",
            28 => "uint32",
            29 => "uint64",
            _ => return Self::of(number).map_or_else(|| format!("type {number}"), |own| own.name().to_owned()),
        };
        other.to_owned()
    }

    /// All of them.
    pub(crate) const ALL: [Self; 11] = [
        Self::U8,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F16,
        Self::F32,
        Self::Bool,
        Self::Bf16,
        Self::E5m2,
        Self::E4m3,
    ];

    /// The type under the name that files have for it.
    pub(crate) fn stored(self) -> StoredDType {
        match self {
            Self::U8 => StoredDType::U8,
            Self::I8 => StoredDType::I8,
            Self::I16 => StoredDType::I16,
            Self::I32 => StoredDType::I32,
            Self::I64 => StoredDType::I64,
            Self::F16 => StoredDType::F16,
            Self::F32 => StoredDType::F32,
            Self::Bool => StoredDType::Bool,
            Self::Bf16 => StoredDType::BF16,
            Self::E5m2 => StoredDType::F8E5M2,
            Self::E4m3 => StoredDType::F8E4M3,
        }
    }

    /// torch's name.
    pub(crate) fn name(self) -> &'static str {
        names::of(self.stored())
    }

    pub(crate) fn bytes(self) -> usize {
        self.stored().bits() / 8
    }
}
