//! From 2:4 weights of floats to 2:4 weights of integers.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    ops::ControlFlow,
    path::Path,
};

use half::f16;

use super::{
    CompressedInfo, Conversion, Item, Matrix, OnMatrix, Overwrite, Part, Plan, PlannedTensor, Progress, Reader,
    ValueFormat, Writer, run,
};

use crate::{
    Arithmetic, Axis, Compressed, DataType, Element, Error, Mask, MatrixRef, Pattern, Result,
    file::StoredDType,
    int4::{Granularity, Int4},
    int8::Int8,
    kernel, match_element,
    quantization::{ScaleRule, relative_error},
    solve::{Bits, Grid, GridScales, ScaleScope, Solved},
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

/// What to quantize, and to what.
#[derive(Clone, Copy)]
pub struct QuantizeOptions<'a> {
    /// Which 2:4 weights to quantize, by name, dtype and shape; asked for matrices of floats, dense or compressed. Everything else is copied.
    pub which: &'a dyn Fn(&str, StoredDType, &[usize]) -> bool,
    /// Which matrices to store dense, in 8-bit integers with a scale for each row, whatever their zeros; asked first. Scales are those of [`quantize`](crate::kernel::quantize).
    pub dense: &'a dyn Fn(&str, StoredDType, &[usize]) -> bool,
    /// The integers and the scales.
    pub to: Quantization,
    /// How scales follow from values.
    pub rule: ScaleRule,
}

impl fmt::Debug for QuantizeOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuantizeOptions").field("to", &self.to).field("rule", &self.rule).finish_non_exhaustive()
    }
}

/// What [`quantize()`] did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct QuantizeReport {
    /// Every tensor and compressed weight of the input, in file order.
    pub tensors: Vec<QuantizedTensor>,
}

/// What became of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedTensor {
    /// Its name.
    pub name: String,
    /// The type of its elements in the input: safetensors' name, or `I4`.
    pub dtype: &'static str,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Bytes in the input.
    pub bytes_before: usize,
    /// Bytes in the output.
    pub bytes_after: usize,
    /// What was done.
    pub outcome: QuantizeOutcome,
}

/// What [`quantize()`] did with a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum QuantizeOutcome {
    /// It was quantized.
    Quantized {
        /// `‖W − Ŵ‖ / ‖W‖` in the Frobenius norm.
        relative_error: f64,
    },
    /// It was stored dense, in 8-bit integers with a scale for each row.
    QuantizedDense {
        /// `‖W − Ŵ‖ / ‖W‖` in the Frobenius norm.
        relative_error: f64,
    },
    /// It is not 2:4 along its rows and was copied.
    NotSparse {
        /// Groups with more than two non-zeros.
        violations: usize,
    },
    /// It holds integers already and was copied.
    Integers,
    /// It was not chosen and was copied.
    NotChosen,
    /// It is no matrix with elements of a dtype that twofour knows, and was copied.
    NotAMatrix,
}

/// Writes a model with the chosen 2:4 weights compressed and quantized; all else, metadata included, is copied byte for byte.
///
/// The input's weights may be dense with zeros, or compressed. Their masks stay: a kept value that rounds to zero keeps its place, as an integer 0. Of a
/// dense weight with fewer than two non-zeros in a group the lowest free positions are kept, as [`compress`](crate::file::compress()) does. A weight that
/// is not 2:4 is left as it is. Each weight is made again from what is to be written, and compared, before it is written.
///
/// Memory holds one weight at a time; see [`crate::file`](mod@crate::file) for sharded models and what happens on the way.
///
/// # Errors
/// [`Error::NotANumber`], [`Error::Infinite`] or [`Error::Scale`], with tensor and place, where a chosen weight cannot be quantized, before anything is
/// written. Those of [`Reader::open`] and [`Reader::compressed`]; [`Error::Exists`] where the output exists and may not be replaced;
/// [`Error::Interrupted`] where `progress` breaks off; [`Error::Io`] where the system refuses. Nothing is left then.
pub fn quantize(
    input: impl AsRef<Path>,
    output: impl AsRef<Path>,
    overwrite: Overwrite,
    options: &QuantizeOptions<'_>,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<QuantizeReport> {
    let reader = Reader::open(input)?;
    let mut conversion =
        Quantize { options, report: QuantizeReport::default(), outcomes: HashMap::new(), dense: HashSet::new() };
    run(&mut conversion, &reader, output.as_ref(), overwrite, progress)?;
    Ok(conversion.report)
}

struct Quantize<'a> {
    options: &'a QuantizeOptions<'a>,
    report: QuantizeReport,
    /// What becomes of each weight that is copied.
    outcomes: HashMap<String, QuantizeOutcome>,
    /// The weights that stay dense, as integers.
    dense: HashSet<String>,
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

    /// The integers of a solver that rounds to these, with scales of the weight that it finds without rounding ([`GridScales::Solved`]).
    pub fn grid(self) -> Grid {
        let (bits, granularity) = match self {
            Quantization::Int8(granularity) => (Bits::Int8, granularity),
            Quantization::Int4(granularity) => (Bits::Int4, granularity),
        };
        let scope = granularity.columns().map_or(ScaleScope::Row, ScaleScope::Group);
        Grid { bits, scope, scales: GridScales::Solved }
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
    /// What [`sparsegpt`](crate::solve::sparsegpt()) found with [`Quantization::grid`].
    ///
    /// # Errors
    /// [`Error::Length`] for a solution of another grid or without one, [`Error::TooManyKept`] for a mask that is not 2:4 along rows; those of [`Int8::from_parts`] and
    /// [`Int4::from_parts`].
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

    pub(super) fn write(&self, name: &str, writer: &mut Writer) -> Result<()> {
        match self {
            QuantizedWeight::Int8(weight) => writer.write_int8(name, weight),
            QuantizedWeight::Int4(weight) => writer.write_int4(name, weight),
        }
    }
}

impl Quantize<'_> {
    /// What becomes of a piece, if it is not quantized; an error for a chosen weight that cannot be.
    fn look(&self, reader: &Reader, item: Item<'_>) -> Result<Option<QuantizeOutcome>> {
        let dtype = match item {
            Item::Plain(tensor) => match Matrix::of(tensor) {
                Some(matrix) => matrix.dtype,
                None => return Ok(Some(QuantizeOutcome::NotAMatrix)),
            },
            Item::Compressed(weight) => match weight.format {
                ValueFormat::Plain(dtype) => dtype,
                _ => return Ok(Some(QuantizeOutcome::Integers)),
            },
        };
        let (rows, cols) = shape_of(item);
        if dtype == DataType::I8 {
            return Ok(Some(QuantizeOutcome::Integers));
        }
        if !(self.options.which)(item.name(), dtype.into(), &[rows, cols]) {
            return Ok(Some(QuantizeOutcome::NotChosen));
        }
        match floats(reader, item)? {
            Floats::NotSparse { violations } => Ok(Some(QuantizeOutcome::NotSparse { violations })),
            // Tried with the largest scales, for the errors: with others, which are smaller, there are no more.
            Floats::Sparse(weight) => {
                let tried = self.options.to.apply(&weight, ScaleRule::MaxAbs);
                tried.map(|_| None).map_err(|e| e.in_tensor(item.name()).in_file(reader.path_of(item.name())))
            }
        }
    }

    /// Quantizes and writes a weight, and returns its relative error.
    fn quantized(&self, reader: &Reader, item: Item<'_>, writer: &mut Writer) -> Result<f64> {
        let Floats::Sparse(weight) = floats(reader, item)? else {
            let (path, name) = (reader.path().to_owned(), item.name().to_owned());
            return Err(Error::NotPlanned { path, name, reason: "is no longer 2:4; it changed while it was read" });
        };
        let integers = self.options.to.apply(&weight, self.options.rule)?.verified()?;
        integers.write(item.name(), writer)?;
        relative_error(&weight, &integers.dequantize())
    }
}

impl Conversion for Quantize<'_> {
    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<()> {
        if let Item::Plain(tensor) = item
            && let Some(matrix) = Matrix::of(tensor).filter(|matrix| matrix.dtype != DataType::I8)
            && (self.options.dense)(&tensor.name, tensor.dtype, &tensor.shape)
        {
            // For the errors, before anything is written.
            matrix.run(reader, DenseInt8)?;
            self.dense.insert(tensor.name.clone());
            plan.tensor(PlannedTensor::new(&tensor.name, StoredDType::I8, tensor.shape.as_slice()));
            plan.tensor(PlannedTensor::new(Part::Scales.key(&tensor.name), StoredDType::F32, [matrix.rows]));
            return Ok(());
        }
        if let Some(outcome) = self.look(reader, item)? {
            self.outcomes.insert(item.name().to_owned(), outcome);
            item.plan_copy(plan);
            return Ok(());
        }
        let (rows, cols) = shape_of(item);
        plan.compressed(self.options.to.info(item.name(), rows, cols)?);
        Ok(())
    }

    fn write(&mut self, reader: &Reader, item: Item<'_>, writer: &mut Writer) -> Result<()> {
        let mut bytes_after = item.bytes();
        let dense = match item {
            Item::Plain(tensor) if self.dense.contains(&tensor.name) => Matrix::of(tensor),
            _ => None,
        };
        let outcome = match (dense, self.outcomes.get(item.name())) {
            (Some(matrix), _) => {
                let (values, scales, relative_error) = matrix.run(reader, DenseInt8)?;
                writer.write_elements(item.name(), &values)?;
                writer.write_elements(&Part::Scales.key(item.name()), &scales)?;
                bytes_after = size_of_val(values.as_slice()) + size_of_val(scales.as_slice());
                QuantizeOutcome::QuantizedDense { relative_error }
            }
            (None, Some(outcome)) => {
                item.write_copy(reader, writer)?;
                *outcome
            }
            (None, None) => {
                let (rows, cols) = shape_of(item);
                bytes_after = self.options.to.info(item.name(), rows, cols)?.bytes();
                QuantizeOutcome::Quantized { relative_error: self.quantized(reader, item, writer)? }
            }
        };
        let (dtype, shape) = match item {
            Item::Plain(tensor) => (tensor.dtype.name(), tensor.shape.clone()),
            Item::Compressed(weight) => (weight.format.name(), vec![weight.rows, weight.cols]),
        };
        let (name, bytes_before) = (item.name().to_owned(), item.bytes());
        self.report.tensors.push(QuantizedTensor { name, dtype, shape, bytes_before, bytes_after, outcome });
        Ok(())
    }
}

/// Rows and columns of a matrix.
fn shape_of(item: Item<'_>) -> (usize, usize) {
    match item {
        Item::Plain(tensor) => Matrix::of(tensor).map_or((0, 0), |matrix| (matrix.rows, matrix.cols)),
        Item::Compressed(weight) => (weight.rows, weight.cols),
    }
}

/// A weight in f32.
enum Floats {
    Sparse(Compressed<f32>),
    NotSparse { violations: usize },
}

/// Reads a matrix of floats.
fn floats(reader: &Reader, item: Item<'_>) -> Result<Floats> {
    fn typed<T: Element>(reader: &Reader, name: &str) -> Result<Floats> {
        Ok(Floats::Sparse(widened(&reader.compressed::<T>(name)?)))
    }
    match item {
        Item::Plain(tensor) => match Matrix::of(tensor) {
            Some(matrix) => matrix.run(reader, Look),
            None => Ok(Floats::NotSparse { violations: 0 }),
        },
        Item::Compressed(weight) => match_element!(weight.format.dense(), |T| typed::<T>(reader, &weight.name)),
    }
}

fn widened<T: Element>(weight: &Compressed<T>) -> Compressed<f32> {
    let values = weight.values().iter().map(|v| v.to_f32()).collect();
    Compressed::from_trusted_parts(weight.rows(), weight.cols(), values, weight.meta().to_vec())
}

/// Rounds a matrix to 8-bit integers with a scale for each row; returns both, and the relative error.
struct DenseInt8;

impl OnMatrix for DenseInt8 {
    type Output = (Vec<i8>, Vec<f32>, f64);

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<Self::Output> {
        let dense: Vec<f32> = matrix.data().iter().map(|value| value.to_f32()).collect();
        let (values, scales) = kernel::quantize(MatrixRef::new(matrix.rows(), matrix.cols(), &dense)?)?;
        let (mut difference, mut norm) = (0.0, 0.0);
        let rows = dense.chunks_exact(matrix.cols()).zip(values.chunks_exact(matrix.cols()));
        for ((row, values), scale) in rows.zip(&scales) {
            for (w, q) in row.iter().zip(values) {
                difference += f64::from(w - f32::from(*q) * scale).powi(2);
                norm += f64::from(*w).powi(2);
            }
        }
        let relative_error = if norm == 0.0 { 0.0 } else { (difference / norm).sqrt() };
        Ok((values, scales, relative_error))
    }
}

/// Compresses a dense matrix that is 2:4.
struct Look;

impl OnMatrix for Look {
    type Output = Floats;

    fn run<T: Element>(self, matrix: MatrixRef<'_, T>) -> Result<Floats> {
        match verify::conformance(matrix, Pattern::TWO_FOUR, Axis::Row, 0).violation_count {
            0 => Ok(Floats::Sparse(widened(&Compressed::from_dense(matrix)?))),
            violations => Ok(Floats::NotSparse { violations }),
        }
    }
}
