//! A linear layer's weight before it is packed.

use half::{bf16, f16};
use twofour::{Compressed, int4::Int4, int8::Int8, kernel::KernelElement};

use super::passes::widened;
use crate::{Error, Result};

/// A weight `[outputs, inputs]` as a file or a model holds it.
#[derive(Debug)]
pub(crate) enum Weight<T: KernelElement> {
    /// Dense, row-major.
    Dense(Vec<T>),
    /// 2:4 in the type that the model computes in.
    Sparse(Compressed<T>),
    /// Dense 8-bit integers with a scale for each row.
    DenseInt8 {
        /// Row-major.
        values: Vec<i8>,
        /// One for each row.
        scales: Vec<f32>,
    },
    /// Compressed in its file as f32.
    F32(Compressed<f32>),
    /// Compressed in its file as bf16.
    Bf16(Compressed<bf16>),
    /// Compressed in its file as f16.
    F16(Compressed<f16>),
    /// 2:4, 8-bit integers.
    Int8(Int8),
    /// 2:4, 4-bit integers.
    Int4(Int4),
}

impl<T: KernelElement> Weight<T> {
    /// A row in f32; nothing where the weight is 2:4 or has no such row.
    pub(crate) fn row(&self, row: usize, inputs: usize) -> Option<Vec<f32>> {
        let of_row = row * inputs..(row + 1) * inputs;
        match self {
            Weight::Dense(values) => values.get(of_row).map(widened),
            Weight::DenseInt8 { values, scales } => {
                let scale = *scales.get(row)?;
                Some(values.get(of_row)?.iter().map(|q| f32::from(*q) * scale).collect())
            }
            _ => None,
        }
    }

    /// Whether another weight is of this one's kind, so that the two can be one above the other.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Weight::Int8(a), Weight::Int8(b)) => a.granularity() == b.granularity(),
            (Weight::Int4(a), Weight::Int4(b)) => a.granularity() == b.granularity(),
            (a, b) => std::mem::discriminant(a) == std::mem::discriminant(b),
        }
    }

    /// Adds the rows of a weight of this one's kind below this one's.
    pub(super) fn append(&mut self, below: Self) -> Result<()> {
        match (self, below) {
            (Weight::Dense(values), Weight::Dense(mut below)) => values.append(&mut below),
            (Weight::Sparse(weight), Weight::Sparse(below)) => weight.append(below)?,
            (Weight::DenseInt8 { values, scales }, Weight::DenseInt8 { values: mut below, scales: mut its_scales }) => {
                values.append(&mut below);
                scales.append(&mut its_scales);
            }
            (Weight::F32(weight), Weight::F32(below)) => weight.append(below)?,
            (Weight::Bf16(weight), Weight::Bf16(below)) => weight.append(below)?,
            (Weight::F16(weight), Weight::F16(below)) => weight.append(below)?,
            (Weight::Int8(weight), Weight::Int8(below)) => weight.append(below)?,
            (Weight::Int4(weight), Weight::Int4(below)) => weight.append(below)?,
            _ => {
                return Err(Error::Setting {
                    what: "parts of a layer",
                    found: "of different types".to_owned(),
                    expected: "of one type to be joined",
                });
            }
        }
        Ok(())
    }
}
