//! The dtypes that a safetensors file may hold: a superset of [`DataType`], under the names of that format.

use std::fmt;

use crate::{DataType, Element};

macro_rules! stored_dtypes {
    ($($variant:ident, $name:literal, $bits:literal, $doc:literal;)*) => {
        /// The dtype of a tensor in a safetensors file.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum StoredDType {
            $(#[doc = $doc] $variant,)*
        }

        impl StoredDType {
            /// Every dtype, in descending order of element size.
            pub const ALL: &'static [StoredDType] = &[$(StoredDType::$variant,)*];

            /// Bits that an element takes; some take less than a byte.
            pub fn bits(self) -> usize {
                match self { $(StoredDType::$variant => $bits,)* }
            }

            /// The name in the file's header.
            pub fn name(self) -> &'static str {
                match self { $(StoredDType::$variant => $name,)* }
            }
        }
    };
}

stored_dtypes! {
    C64, "C64", 64, "Complex, two f32.";
    F64, "F64", 64, "IEEE double.";
    I64, "I64", 64, "Signed 64-bit integer.";
    U64, "U64", 64, "Unsigned 64-bit integer.";
    F32, "F32", 32, "IEEE single.";
    I32, "I32", 32, "Signed 32-bit integer.";
    U32, "U32", 32, "Unsigned 32-bit integer.";
    BF16, "BF16", 16, "Brain floating point.";
    F16, "F16", 16, "IEEE half.";
    I16, "I16", 16, "Signed 16-bit integer.";
    U16, "U16", 16, "Unsigned 16-bit integer.";
    F8E4M3, "F8_E4M3", 8, "OCP E4M3.";
    F8E4M3Fnuz, "F8_E4M3FNUZ", 8, "E4M3 without negative zero and infinities.";
    F8E5M2, "F8_E5M2", 8, "OCP E5M2.";
    F8E5M2Fnuz, "F8_E5M2FNUZ", 8, "E5M2 without negative zero and infinities.";
    F8E8M0, "F8_E8M0", 8, "OCP microscaling exponent.";
    I8, "I8", 8, "Signed byte.";
    U8, "U8", 8, "Unsigned byte.";
    Bool, "BOOL", 8, "Boolean, one byte.";
    F6E2M3, "F6_E2M3", 6, "OCP microscaling E2M3, packed.";
    F6E3M2, "F6_E3M2", 6, "OCP microscaling E3M2, packed.";
    F4, "F4", 4, "OCP microscaling E2M1, packed.";
}

impl StoredDType {
    /// The dtype of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|d| d.name() == name)
    }

    /// The data type of weights that is stored so, where twofour prunes and compresses it.
    pub fn element(self) -> Option<DataType> {
        DataType::ALL.into_iter().find(|data_type| data_type.is_of_weights() && StoredDType::of(*data_type) == self)
    }

    /// The dtype that a data type is stored as.
    pub const fn of(data_type: DataType) -> Self {
        match data_type {
            DataType::F32 => StoredDType::F32,
            DataType::F16 => StoredDType::F16,
            DataType::BF16 => StoredDType::BF16,
            DataType::E4M3 => StoredDType::F8E4M3,
            DataType::E5M2 => StoredDType::F8E5M2,
            DataType::I8 => StoredDType::I8,
            DataType::I32 => StoredDType::I32,
        }
    }

    /// Bytes that a tensor of this shape takes; `None` where that overflows or is no whole number.
    pub fn bytes(self, shape: &[usize]) -> Option<usize> {
        let elements = shape.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))?;
        let bits = elements.checked_mul(self.bits())?;
        bits.is_multiple_of(8).then_some(bits / 8)
    }
}

impl From<DataType> for StoredDType {
    fn from(data_type: DataType) -> Self {
        StoredDType::of(data_type)
    }
}

impl fmt::Display for StoredDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type whose memory is that of a stored dtype.
pub trait StoredElement: bytemuck::Pod {
    /// The dtype.
    const STORED: StoredDType;
}

impl<T: Element> StoredElement for T {
    const STORED: StoredDType = StoredDType::of(T::DTYPE);
}

macro_rules! stored_element {
    ($($type:ty => $dtype:ident),*) => {
        $(impl StoredElement for $type {
            const STORED: StoredDType = StoredDType::$dtype;
        })*
    };
}

stored_element!(f64 => F64, i64 => I64, u64 => U64, i32 => I32, u32 => U32, i16 => I16, u16 => U16, u8 => U8);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes_are_those_of_the_safetensors_crate() {
        for &dtype in StoredDType::ALL {
            let theirs: safetensors::Dtype = serde_json::from_value(dtype.name().into()).unwrap();
            assert_eq!(theirs.bitsize(), dtype.bits());
            assert_eq!(StoredDType::from_name(dtype.name()), Some(dtype));
            if let Some(element) = dtype.element() {
                assert_eq!(StoredDType::from(element), dtype);
                assert_eq!(element.bytes() * 8, dtype.bits());
            }
        }
        assert_eq!(StoredDType::ALL.iter().filter(|d| d.element().is_some()).count(), 6);
        assert!(StoredDType::ALL.is_sorted_by_key(|d| std::cmp::Reverse(d.bits())));
        assert_eq!(StoredDType::from_name("Q4"), None);
    }

    #[test]
    fn byte_counts_refuse_overflow_and_part_bytes() {
        assert_eq!(StoredDType::F32.bytes(&[]), Some(4));
        assert_eq!(StoredDType::BF16.bytes(&[3, 5]), Some(30));
        assert_eq!(StoredDType::F4.bytes(&[3]), None);
        assert_eq!(StoredDType::F6E2M3.bytes(&[4]), Some(3));
        assert_eq!(StoredDType::U8.bytes(&[usize::MAX, 2]), None);
        assert_eq!(StoredDType::F32.bytes(&[usize::MAX / 2]), None);
        assert_eq!(StoredDType::F32.bytes(&[0, 7]), Some(0));
    }
}
