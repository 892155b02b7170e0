//! Scales of quantized weights of other tools, and what the weights are here.

use half::{bf16, f16};

use super::{super::unique::quoted, Decoded, tensors::Parts};
use crate::{
    Arithmetic, Compressed, DataType, Element, Error, MatrixRef, Result,
    int4::{Granularity, Int4},
    int8::Int8,
    match_element, memory,
};

/// Symmetric scales of the blocks of a matrix: of one element to all of it.
#[derive(Debug)]
pub(super) struct Scales {
    dtype: DataType,
    values: Vec<f32>,
    /// Rows and columns that share a scale.
    block: [usize; 2],
    /// Scales of a row.
    per_row: usize,
    shape: [usize; 2],
}

impl Scales {
    /// Reads the scales of a matrix of that shape: one, one a row, one for each block of columns of a row, or one for
    /// each block.
    pub(super) fn read(parts: &Parts<'_>, end: &str, [rows, cols]: [usize; 2]) -> Result<Self> {
        let info = parts.expect(end)?;
        let grid = match *info.shape {
            [] | [1] => [1, 1],
            [down, across] => [down, across],
            _ => [0, 0],
        };
        let [down, across] = grid;
        let fits = |size: usize, count: usize| count > 0 && size.is_multiple_of(count);
        if !fits(rows, down) || !fits(cols, across) {
            let (name, shape) = (quoted(&info.name), &info.shape);
            return Err(parts.fault(format!("its scales {name} of shape {shape:?} do not divide [{rows}, {cols}]")));
        }
        let (dtype, values) = match info.dtype.element() {
            Some(dtype @ DataType::F32) => (dtype, parts.elements::<f32>(end)?),
            Some(dtype @ DataType::F16) => (dtype, widened(&parts.elements::<f16>(end)?)),
            Some(dtype @ DataType::BF16) => (dtype, widened(&parts.elements::<bf16>(end)?)),
            _ => {
                let (name, dtype) = (quoted(&info.name), info.dtype);
                return Err(parts.fault(format!("its scales {name} are {dtype}; F32, F16 and BF16 are read")));
            }
        };
        let block = [rows / down, cols / across];
        Ok(Scales { dtype, values, block, per_row: across, shape: [rows, cols] })
    }

    /// Scales `[rows, scales of a row]` in f16.
    pub(super) fn of_columns(values: &[f16], columns: usize, shape: [usize; 2]) -> Self {
        let per_row = shape[1] / columns.max(1);
        Scales { dtype: DataType::F16, values: widened(values), block: [1, columns], per_row, shape }
    }

    fn at(&self, row: usize, col: usize) -> f32 {
        self.values[row / self.block[0] * self.per_row + col / self.block[1]]
    }

    /// What shares a scale, where this library has it, and the scales of each row.
    fn granular(&self) -> Option<(Granularity, Vec<f32>)> {
        let [rows, cols] = self.shape;
        let granularity = match self.block[1] {
            columns if columns == cols => Granularity::Row,
            columns => Granularity::of_columns(columns)?,
        };
        let step = self.block[1];
        let scales = (0..rows).flat_map(|row| (0..self.per_row).map(move |at| self.at(row, at * step)));
        Some((granularity, scales.collect()))
    }

    /// The weight of integers of so many bits with these scales: 2:4 integers where it is 2:4 and this library has such
    /// scales, or else the products in the scales' type.
    pub(super) fn integers(&self, name: String, bits: u32, integers: Values<i8>) -> Result<Decoded> {
        let integers = integers.sparse(self.shape)?;
        if let Values::Sparse(weight) = &integers
            && let Some((granularity, scales)) = self.granular()
        {
            let halves = || -> Option<Vec<f16>> {
                let half = |scale: &f32| Some(f16::from_f32(*scale)).filter(|half| half.to_f32() == *scale);
                scales.iter().map(half).collect()
            };
            match (bits, granularity) {
                (4, _) if let Some(halves) = halves() => {
                    return Decoded::int4(name, &Int4::from_parts(weight.clone(), halves, granularity)?);
                }
                (8, Granularity::Row) => {
                    return Decoded::int8(name, &Int8::from_parts(weight.clone(), scales, granularity)?);
                }
                (8, _) if halves().is_some() => {
                    return Decoded::int8(name, &Int8::from_parts(weight.clone(), scales, granularity)?);
                }
                _ => {}
            }
        }
        self.products(name, integers)
    }

    /// The weight of values times these scales, in the scales' type: compressed where it is 2:4.
    pub(super) fn products<T: Element>(&self, name: String, values: Values<T>) -> Result<Decoded> {
        match self.dtype {
            DataType::F16 => self.products_in::<T, f16>(name, values),
            DataType::BF16 => self.products_in::<T, bf16>(name, values),
            _ => self.products_in::<T, f32>(name, values),
        }
    }

    fn products_in<T: Element, S: Arithmetic>(&self, name: String, values: Values<T>) -> Result<Decoded> {
        let dense = match values {
            Values::Sparse(weight) => weight.to_dense(),
            Values::Dense(dense) => dense,
        };
        let [rows, cols] = self.shape;
        let mut products: Vec<S> = memory::zeroed(dense.len())?;
        for (i, (product, value)) in products.iter_mut().zip(&dense).enumerate() {
            let (row, col) = (i / cols, i % cols);
            *product = S::from_f32(value.to_f32() * self.at(row, col));
            match product.to_f32() {
                0.0 => *product = S::ZERO,
                found if found.is_nan() => return Err(Error::NotANumber { row, col }),
                found if found.is_infinite() => return Err(Error::Infinite { row, col }),
                _ => {}
            }
        }
        match (Values::Dense(products)).sparse([rows, cols])? {
            Values::Sparse(weight) => Decoded::compressed(name, &weight),
            Values::Dense(dense) => Ok(Decoded::dense(name, [rows, cols], &dense)),
        }
    }
}

/// The values of a weight, as far as they are known to be 2:4.
#[derive(Debug)]
pub(super) enum Values<T> {
    Sparse(Compressed<T>),
    Dense(Vec<T>),
}

impl<T: Element> Values<T> {
    /// Compressed, where they are 2:4.
    fn sparse(self, [rows, cols]: [usize; 2]) -> Result<Self> {
        let Values::Dense(dense) = self else { return Ok(self) };
        match Compressed::from_dense(MatrixRef::new(rows, cols, &dense)?) {
            Ok(weight) => Ok(Values::Sparse(weight)),
            Err(Error::TooManyKept { .. }) => Ok(Values::Dense(dense)),
            Err(error) => Err(error),
        }
    }
}

/// The values of a weight of 8 bits with scales: integers, or floats.
pub(super) fn of_eight_bits<T: Element>(scales: &Scales, name: String, values: Values<T>) -> Result<Decoded> {
    match values {
        _ if T::DTYPE != DataType::I8 => scales.products(name, values),
        Values::Dense(dense) => scales.integers(name, 8, Values::Dense(bytemuck::cast_slice(&dense).to_vec())),
        Values::Sparse(weight) => {
            let (rows, cols) = (weight.rows(), weight.cols());
            let (values, meta) = weight.into_parts();
            let values = bytemuck::cast_slice(&values).to_vec();
            scales.integers(name, 8, Values::Sparse(Compressed::from_trusted_parts(rows, cols, values, meta)))
        }
    }
}

/// An error unless zero points are all zero.
pub(super) fn expect_symmetric(parts: &Parts<'_>) -> Result<()> {
    const END: &str = "weight_zero_point";
    let Some(info) = parts.get(END) else { return Ok(()) };
    let is_zero = match info.dtype.element() {
        Some(dtype) => match_element!(dtype, |T| are_zero::<T>(parts, END))?,
        None => false,
    };
    match is_zero {
        true => Ok(()),
        false => Err(parts.fault(format!(
            "its zero points {} are not all 0, and weights here have symmetric scales: a pruned weight would be no \
             zero; start from the model that was quantized",
            quoted(&info.name)
        ))),
    }
}

fn are_zero<T: Element>(parts: &Parts<'_>, end: &str) -> Result<bool> {
    Ok(parts.elements::<T>(end)?.iter().all(|element| element.is_zero()))
}

fn widened<T: Element>(values: &[T]) -> Vec<f32> {
    values.iter().map(|value| value.to_f32()).collect()
}
