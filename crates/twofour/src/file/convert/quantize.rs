//! From 2:4 weights of floats to 2:4 weights of integers.

use std::fmt;

use half::f16;

use super::{
    super::writer::RowsPlace,
    CompressedInfo, Item, Kept, Matrix, Operation, Part, Plan, Planned, PlannedTensor, Reader, ValueFormat, Writer,
    named,
    pieces::{self, Bands, widened},
};
use crate::{
    Arithmetic, Axis, Compressed, DataType, Error, Mask, MatrixRef, Pattern, Result,
    file::StoredDType,
    int4::{Granularity, Int4},
    int8::Int8,
    kernel, match_element,
    quantization::{ScaleRule, SquaredError},
    solve::{Bits, Grid, ScaleScope, Solved},
    verify,
};

/// The integers and the scales that weights are quantized to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Quantization {
    /// 8-bit integers.
    Int8(Granularity),
    /// 4-bit integers.
    Int4(Granularity),
}

/// Which weights, by name, dtype and shape.
type Chosen<'a> = &'a dyn Fn(&str, StoredDType, &[usize]) -> bool;

/// Writes the chosen 2:4 weights compressed and quantized: which, and to what.
///
/// The input's weights may be dense with zeros, or compressed. Their masks stay: a kept value that rounds to zero keeps
/// its place, as an integer 0. Of a dense weight with fewer than two non-zeros in a group the lowest free positions are
/// kept, as [`Compress`](super::Compress) does. A weight that is not 2:4 is left as it is. Each weight is made again
/// from what is to be written before it is written. Memory holds some rows of a weight for each thread.
///
/// # Errors
/// [`Error::NotANumber`], [`Error::Infinite`] or [`Error::Scale`], with tensor and place, where a chosen weight cannot
/// be quantized, before anything is written. Those of [`Reader::compressed`].
#[derive(Clone, Copy)]
pub struct Quantize<'a> {
    /// Which 2:4 weights to quantize; asked for matrices of floats, dense or compressed. Everything else is copied.
    pub which: Chosen<'a>,
    /// Which matrices to store dense, in 8-bit integers with a scale for each row, whatever their zeros; asked first.
    /// Scales are those of [`quantize`](crate::kernel::quantize).
    pub dense: Chosen<'a>,
    /// The integers and the scales.
    pub to: Quantization,
    /// How scales follow from values.
    pub rule: ScaleRule,
}

impl fmt::Debug for Quantize<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quantize").field("to", &self.to).field("rule", &self.rule).finish_non_exhaustive()
    }
}

/// A tensor that became integers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quantized {
    /// `‖W − Ŵ‖ / ‖W‖` in the Frobenius norm.
    pub relative_error: f64,
    /// Whether it is stored dense, in 8-bit integers with a scale for each row.
    pub is_dense: bool,
}

impl Quantization {
    pub(super) fn info(self, name: &str, rows: usize, cols: usize) -> Result<CompressedInfo> {
        match self {
            Quantization::Int8(granularity) => CompressedInfo::int8(name, granularity, rows, cols),
            Quantization::Int4(granularity) => CompressedInfo::int4(name, granularity, rows, cols),
        }
    }

    fn apply(self, weight: &Compressed<f32>, rule: ScaleRule) -> Result<QuantizedWeight> {
        Ok(match self {
            Quantization::Int8(granularity) => QuantizedWeight::Int8(Int8::quantize_with(weight, granularity, rule)?),
            Quantization::Int4(granularity) => QuantizedWeight::Int4(Int4::quantize_with(weight, granularity, rule)?),
        })
    }

    /// The integers that [`round`](crate::solve::round()) is to find for these.
    pub fn grid(self) -> Grid {
        let (bits, granularity) = match self {
            Quantization::Int8(granularity) => (Bits::Int8, granularity),
            Quantization::Int4(granularity) => (Bits::Int4, granularity),
        };
        let scope = granularity.columns().map_or(ScaleScope::Row, ScaleScope::Group);
        Grid { bits, scope }
    }
}

/// A 2:4 weight of integers with its scales.
#[derive(Debug, Clone, PartialEq)]
pub enum QuantizedWeight {
    /// Of 8-bit integers.
    Int8(Int8),
    /// Of 4-bit integers.
    Int4(Int4),
}

impl QuantizedWeight {
    /// What [`round`](crate::solve::round()) found with [`Quantization::grid`].
    ///
    /// # Errors
    /// [`Error::Length`] for a solution of another grid or without one, [`Error::TooManyKept`] for a mask that is not
    /// 2:4 along rows; those of [`Int8::from_parts`] and [`Int4::from_parts`].
    pub fn of_solved(solved: &Solved, to: Quantization) -> Result<Self> {
        let (rows, cols) = (solved.mask.rows(), solved.mask.cols());
        solved.mask.verify(Pattern::TWO_FOUR, Axis::Row)?;
        let integers = solved.integers.as_deref().unwrap_or_default();
        let scales = solved.scales.as_deref().unwrap_or_default();
        let weight = Compressed::from_masked(MatrixRef::new(rows, cols, integers)?, &solved.mask)?;
        Ok(match to {
            Quantization::Int8(granularity) => {
                QuantizedWeight::Int8(Int8::from_parts(weight, scales.to_vec(), granularity)?)
            }
            Quantization::Int4(granularity) => {
                let scales = scales.iter().map(|scale| f16::from_f32(*scale)).collect();
                QuantizedWeight::Int4(Int4::from_parts(weight, scales, granularity)?)
            }
        })
    }

    /// Its integers and what shares a scale.
    pub fn quantization(&self) -> Quantization {
        match self {
            QuantizedWeight::Int8(weight) => Quantization::Int8(weight.granularity()),
            QuantizedWeight::Int4(weight) => Quantization::Int4(weight.granularity()),
        }
    }

    /// What is kept.
    pub fn mask(&self) -> Mask {
        match self {
            QuantizedWeight::Int8(weight) => weight.weight().mask(),
            QuantizedWeight::Int4(weight) => weight.weight().mask(),
        }
    }

    /// The scale of each element, `[rows, cols]`: 0 where the weight is pruned.
    pub fn scales_of_elements(&self) -> Vec<f32> {
        match self {
            QuantizedWeight::Int8(weight) => weight.scales_of_elements(),
            QuantizedWeight::Int4(weight) => weight.scales_of_elements(),
        }
    }

    /// The weight of the integers nearest to other values `[rows, cols]`, under the same mask and scales.
    ///
    /// # Errors
    /// [`Error::Length`] for other than one value for each element.
    pub fn nearest_to(&self, values: &[f32]) -> Result<Self> {
        Ok(match self {
            QuantizedWeight::Int8(weight) => QuantizedWeight::Int8(weight.nearest_to(values)?),
            QuantizedWeight::Int4(weight) => QuantizedWeight::Int4(weight.nearest_to(values)?),
        })
    }

    /// Makes the weight again from the parts that a file holds, under every rule that a reader checks.
    pub(super) fn verified(self) -> Result<Self> {
        Ok(match self {
            QuantizedWeight::Int8(weight) => {
                let (granularity, (q, scales)) = (weight.granularity(), weight.into_parts());
                let (rows, cols, (values, meta)) = (q.rows(), q.cols(), q.into_parts());
                QuantizedWeight::Int8(Int8::from_parts(
                    Compressed::from_parts(rows, cols, values, meta)?,
                    scales,
                    granularity,
                )?)
            }
            QuantizedWeight::Int4(weight) => {
                let (q, scales) = (weight.weight(), weight.scales().to_vec());
                let (values, meta) = (weight.packed_values(), q.meta().to_vec());
                QuantizedWeight::Int4(Int4::from_packed(
                    q.rows(),
                    q.cols(),
                    &values,
                    meta,
                    scales,
                    weight.granularity(),
                )?)
            }
        })
    }

    /// The weight that it stands for: integers times scales.
    pub fn dequantize(&self) -> Compressed<f32> {
        match self {
            QuantizedWeight::Int8(weight) => weight.dequantize(),
            QuantizedWeight::Int4(weight) => weight.dequantize(),
        }
    }

    /// Writes some of the rows of a weight.
    fn write_rows(&self, first_row: usize, place: &RowsPlace<'_>) -> Result<()> {
        match self {
            QuantizedWeight::Int8(weight) => {
                let halves: Vec<f16>;
                let scales = match weight.granularity() {
                    Granularity::Row => bytemuck::cast_slice(weight.scales()),
                    _ => {
                        halves = weight.scales().iter().map(|scale| f16::from_f32(*scale)).collect();
                        bytemuck::cast_slice(&halves)
                    }
                };
                let q = weight.weight();
                place.write(first_row, &[bytemuck::cast_slice(q.values()), bytemuck::cast_slice(q.meta()), scales])
            }
            QuantizedWeight::Int4(weight) => {
                let (values, meta) = (weight.packed_values(), bytemuck::cast_slice(weight.weight().meta()));
                place.write(first_row, &[&values, meta, bytemuck::cast_slice(weight.scales())])
            }
        }
    }

    pub(super) fn write(&self, name: &str, writer: &mut Writer) -> Result<()> {
        match self {
            QuantizedWeight::Int8(weight) => writer.write_int8(name, weight),
            QuantizedWeight::Int4(weight) => writer.write_int4(name, weight),
        }
    }
}

/// What becomes of a matrix.
#[derive(Debug, Clone, Copy)]
pub struct QuantizePlan {
    /// How it is stored, if not compressed.
    matrix: Option<Matrix>,
    is_dense: bool,
}

impl Operation for Quantize<'_> {
    type Plan = QuantizePlan;
    type Change = Quantized;

    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<Planned<QuantizePlan>> {
        let (matrix, dtype, rows, cols) = match item {
            Item::Plain(tensor) => match Matrix::of(tensor) {
                Some(matrix) => (Some(matrix), matrix.dtype, matrix.rows, matrix.cols),
                None => return Ok(Planned::Copy(Kept::NotAMatrix)),
            },
            Item::Compressed(weight) => match weight.format {
                ValueFormat::Plain(dtype) => (None, dtype, weight.rows, weight.cols),
                _ => return Ok(Planned::Copy(Kept::Integers)),
            },
        };
        if dtype == DataType::I8 {
            return Ok(Planned::Copy(Kept::Integers));
        }
        let (name, stored, shape) = (item.name(), StoredDType::from(dtype), [rows, cols]);
        if let Some(matrix) = matrix.filter(|_| (self.dense)(name, stored, &shape)) {
            // For the errors, before anything is written.
            let bands = Bands::of(reader, name, matrix)?;
            match_element!(dtype, |T| bands.each::<T, ()>(1, |_, band| dense_int8(band).map(drop), |()| ()))?;
            plan.tensor(PlannedTensor::new(name, StoredDType::I8, shape));
            plan.tensor(PlannedTensor::new(Part::Scales.key(name), StoredDType::F32, [rows]));
            return Ok(Planned::Change(QuantizePlan { matrix: Some(matrix), is_dense: true }));
        }
        if !(self.which)(name, stored, &shape) {
            return Ok(Planned::Copy(Kept::NotChosen));
        }
        // Tried with the largest scales, for the errors: with others, which are smaller, there are no more.
        let tried = |weight: &Compressed<f32>| self.to.apply(weight, ScaleRule::MaxAbs).map(drop);
        let (mut violations, mut first_error) = (0, None);
        of_rows(
            reader,
            item,
            matrix,
            |row, rows| match rows {
                Floats::Sparse(weight) => Ok((0, tried(&weight).err().map(|error| error.below(row)))),
                Floats::NotSparse { violations } => Ok((violations, None)),
            },
            |(found, error): (usize, Option<Error>)| {
                violations += found;
                first_error = first_error.take().or(error);
            },
        )?;
        match (violations, first_error) {
            (1.., _) => Ok(Planned::Copy(Kept::NotSparse { violations })),
            (0, Some(error)) => Err(named(reader, name, error)),
            (0, None) => {
                plan.compressed(self.to.info(name, rows, cols)?);
                Ok(Planned::Change(QuantizePlan { matrix, is_dense: false }))
            }
        }
    }

    fn write(
        &mut self,
        reader: &Reader,
        item: Item<'_>,
        QuantizePlan { matrix, is_dense }: QuantizePlan,
        writer: &mut Writer,
    ) -> Result<Quantized> {
        let name = item.name();
        if let Some(matrix) = matrix.filter(|_| is_dense) {
            let bands = Bands::of(reader, name, matrix)?;
            let relative_error = match_element!(matrix.dtype, |T| write_dense::<T>(&bands, name, matrix, writer))?;
            return Ok(Quantized { relative_error, is_dense });
        }
        let (rows, cols) = match (item, matrix) {
            (Item::Compressed(weight), _) => (weight.rows, weight.cols),
            (Item::Plain(_), Some(matrix)) => (matrix.rows, matrix.cols),
            (Item::Plain(_), None) => return Err(changed(reader, name)),
        };
        let place = writer.rows_of(&self.to.info(name, rows, cols)?)?;
        let mut total = SquaredError::default();
        of_rows(
            reader,
            item,
            matrix,
            |row, rows| {
                let Floats::Sparse(weight) = rows else { return Err(changed(reader, name)) };
                let integers = self.to.apply(&weight, self.rule)?.verified()?;
                integers.write_rows(row, &place)?;
                Ok(SquaredError::of(&weight, &integers.dequantize()))
            },
            |error| total = total.and(error),
        )?;
        Ok(Quantized { relative_error: total.relative(), is_dense })
    }
}

fn changed(reader: &Reader, name: &str) -> Error {
    let reason = "is no longer 2:4; it changed while it was read";
    Error::NotPlanned { path: reader.path().to_owned(), name: name.to_owned(), reason }
}

/// Rows of a weight in f32.
enum Floats {
    Sparse(Compressed<f32>),
    NotSparse { violations: usize },
}

impl Floats {
    fn of<T: Arithmetic>(band: MatrixRef<'_, T>) -> Result<Self> {
        match verify::conformance(band, Pattern::TWO_FOUR, Axis::Row, 0)?.violation_count {
            0 => Ok(Floats::Sparse(widened(&Compressed::from_dense(band)?))),
            violations => Ok(Floats::NotSparse { violations }),
        }
    }
}

/// Runs `work` over rows of a matrix of floats, dense or compressed, as [`Bands::each`] does.
fn of_rows<R: Send>(
    reader: &Reader,
    item: Item<'_>,
    matrix: Option<Matrix>,
    work: impl Fn(usize, Floats) -> Result<R> + Sync,
    then: impl FnMut(R) + Send,
) -> Result<()> {
    match (item, matrix) {
        (Item::Compressed(weight), _) => {
            let work = |row, stored: pieces::StoredRows<'_>| work(row, Floats::Sparse(stored.floats()?));
            pieces::in_stored_rows(reader, weight, work, then)
        }
        (Item::Plain(tensor), Some(matrix)) => {
            let bands = Bands::of(reader, &tensor.name, matrix)?;
            match_element!(matrix.dtype, |T| bands.each::<T, R>(1, |row, band| work(row, Floats::of(band)?), then))
        }
        (Item::Plain(_), None) => Ok(()),
    }
}

/// Rounds rows to 8-bit integers with a scale for each row; returns both, and the error.
fn dense_int8<T: Arithmetic>(band: MatrixRef<'_, T>) -> Result<(Vec<i8>, Vec<f32>, SquaredError)> {
    let dense: Vec<f32> = band.data().iter().map(|value| value.to_f32()).collect();
    let (values, scales) = kernel::quantize(MatrixRef::new(band.rows(), band.cols(), &dense)?)?;
    let mut error = SquaredError::default();
    let rows = dense.chunks_exact(band.cols()).zip(values.chunks_exact(band.cols()));
    for ((row, values), scale) in rows.zip(&scales) {
        row.iter().zip(values).for_each(|(w, q)| error.add(*w, f32::from(*q) * scale));
    }
    Ok((values, scales, error))
}

/// Writes a matrix as dense integers, and returns its relative error.
fn write_dense<T: Arithmetic>(bands: &Bands<'_>, name: &str, matrix: Matrix, writer: &mut Writer) -> Result<f64> {
    let (rows, cols) = (matrix.rows, matrix.cols);
    let mut all = Vec::with_capacity(rows);
    let place = writer.in_pieces(name, rows * cols)?;
    let mut total = SquaredError::default();
    let work = |row: usize, band: MatrixRef<'_, T>| {
        let (values, scales, error) = dense_int8(band)?;
        place.write_at(row * cols, bytemuck::cast_slice(&values))?;
        Ok((scales, error))
    };
    bands.each::<T, _>(1, work, |(scales, error)| {
        all.extend(scales);
        total = total.and(error);
    })?;
    writer.write_elements(&Part::Scales.key(name), &all)?;
    Ok(total.relative())
}
