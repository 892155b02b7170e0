//! The integers that a solver rounds to: symmetric, so that zero stays zero.

use crate::{Error, Result, quantization::nearest};

/// The width of the integers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bits {
    /// -7 to 7.
    Int4,
    /// -127 to 127.
    Int8,
}

impl Bits {
    /// The largest integer.
    pub fn largest(self) -> f32 {
        match self {
            Bits::Int4 => 7.0,
            Bits::Int8 => 127.0,
        }
    }
}

/// Which columns of a row share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleScope {
    /// All.
    Row,
    /// So many consecutive ones, the last group fewer.
    Group(usize),
}

/// The integers that kept weights are rounded to: `w ≈ q · scale`, the scale a value of f16 as the files store it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grid {
    /// The width of the integers.
    pub bits: Bits,
    /// Which columns share a scale.
    pub scope: ScaleScope,
}

impl Grid {
    /// Columns that share a scale, at least 1.
    pub(super) fn width(self, cols: usize) -> Result<usize> {
        match self.scope {
            ScaleScope::Row => Ok(cols.max(1)),
            ScaleScope::Group(0) => {
                Err(Error::Setting { what: "columns that share a scale", value: 0.0, expected: "at least 1" })
            }
            ScaleScope::Group(width) => Ok(width),
        }
    }

    /// The scale of values whose largest magnitude is given, as f16 in f32; `None` where f16 cannot hold it.
    pub(super) fn scale(self, largest: f32) -> Option<f32> {
        let scale = half::f16::from_f32(largest / self.bits.largest());
        scale.is_finite().then_some(scale.to_f32())
    }

    /// The integer nearest to a value, ties to even; zero where the scale is zero.
    pub(super) fn round(self, value: f32, scale: f32) -> f32 {
        nearest(value, scale, -self.bits.largest()..=self.bits.largest())
    }
}
