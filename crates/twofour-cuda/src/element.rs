//! What tensors on a device are made of.

use serde::{Deserialize, Serialize};

/// An element type; kernels number them in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Element {
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

impl Element {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Element::F32 | Element::I32 => 4,
            Element::F16 | Element::BF16 => 2,
            Element::E4M3 | Element::E5M2 | Element::I8 => 1,
        }
    }

    /// Its name, as in `bf16`.
    pub const fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::F16 => "f16",
            Element::BF16 => "bf16",
            Element::E4M3 => "e4m3",
            Element::E5M2 => "e5m2",
            Element::I8 => "i8",
            Element::I32 => "i32",
        }
    }

    /// What the sources of kernels call it.
    pub(crate) const fn definition(self) -> &'static str {
        match self {
            Element::F32 => "F32",
            Element::F16 => "F16",
            Element::BF16 => "BF16",
            Element::E4M3 => "E4M3",
            Element::E5M2 => "E5M2",
            Element::I8 => "I8",
            Element::I32 => "I32",
        }
    }
}

impl std::fmt::Display for Element {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}
