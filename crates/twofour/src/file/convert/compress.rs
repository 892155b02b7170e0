//! From 2:4 dense weights to compressed ones.

use std::{collections::HashMap, fmt, ops::ControlFlow, path::Path};

use rayon::prelude::*;

use super::{
    CompressedInfo, Conversion, Item, Matrix, OnMatrix, Overwrite, Plan, Progress, Reader, TensorInfo, Writer, run,
};
use crate::{
    Arithmetic, Axis, Compressed, Element, Error, Mask, MatrixRef, Pattern, Result, file::StoredDType, select,
};

/// What to compress, and what to do where a weight resists.
#[derive(Clone, Copy)]
pub struct CompressOptions<'a> {
    /// Which tensors to compress; asked for two-dimensional ones with elements of a dtype that twofour knows. Everything
    /// else is copied.
    pub which: &'a dyn Fn(&TensorInfo) -> bool,
    /// What to do with a chosen tensor that is not 2:4 along its rows.
    pub not_sparse: NotSparse,
    /// What to do with -0.0 in a chosen tensor.
    pub negative_zeros: NegativeZeros,
}

impl Default for CompressOptions<'_> {
    /// Every tensor that can be; one that is not 2:4 is an error; -0.0 becomes +0.0.
    fn default() -> Self {
        CompressOptions { which: &|_| true, not_sparse: NotSparse::default(), negative_zeros: NegativeZeros::default() }
    }
}

impl fmt::Debug for CompressOptions<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompressOptions")
            .field("not_sparse", &self.not_sparse)
            .field("negative_zeros", &self.negative_zeros)
            .finish_non_exhaustive()
    }
}

/// What to do with a chosen tensor that is not 2:4 along its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NotSparse {
    /// An error that names tensor, row and group.
    #[default]
    Error,
    /// Keep the two largest magnitudes of each group ([`select::magnitude`]) of every chosen tensor that is not 2:4.
    Prune,
    /// Leave the tensor dense.
    KeepDense,
}

/// What to do with -0.0 in a chosen tensor that is 2:4.
///
/// The canonical form has one zero, so -0.0 cannot come back. It is common, because multiplying weights by a mask
/// turns every negative weight that is dropped into one, and it changes no product by more than the sign of a zero:
/// hence the default, with the count in the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NegativeZeros {
    /// Store +0.0 and count them in the report.
    #[default]
    Normalise,
    /// An error that names the tensor and their number, for those who need every bit back.
    Refuse,
}

/// What [`compress()`] did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CompressReport {
    /// Every tensor of the input, in file order.
    pub tensors: Vec<CompressedTensor>,
}

impl CompressReport {
    /// How many -0.0 became +0.0, in all tensors together; 0 means that decompressing gives back every bit.
    pub fn negative_zeros(&self) -> usize {
        self.tensors
            .iter()
            .map(|t| match t.outcome {
                CompressOutcome::Compressed { negative_zeros } | CompressOutcome::Pruned { negative_zeros, .. } => {
                    negative_zeros
                }
                _ => 0,
            })
            .sum()
    }
}

/// What became of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct CompressedTensor {
    /// Its name.
    pub name: String,
    /// The dtype of its elements.
    pub dtype: StoredDType,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Bytes in the input.
    pub bytes_before: usize,
    /// Bytes in the output.
    pub bytes_after: usize,
    /// What was done.
    pub outcome: CompressOutcome,
}

/// What [`compress()`] did with a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum CompressOutcome {
    /// It was 2:4 and is compressed.
    Compressed {
        /// Elements that were -0.0 and are stored as +0.0.
        negative_zeros: usize,
    },
    /// It was not 2:4, was pruned and is compressed.
    Pruned {
        /// The share of `Σ|w|` that was kept.
        kept_l1: f64,
        /// The share of `Σw²` that was kept.
        kept_l2: f64,
        /// Kept elements that were -0.0 and are stored as +0.0.
        negative_zeros: usize,
    },
    /// It was not 2:4 and was copied.
    KeptDense {
        /// Groups with more than two non-zeros.
        violations: usize,
    },
    /// It was not chosen and was copied.
    NotChosen,
    /// It is no matrix with elements of a dtype that twofour knows, and was copied.
    NotAMatrix,
    /// It was compressed already and was copied.
    AlreadyCompressed,
}

impl CompressOutcome {
    /// Whether the tensor was dense and is now compressed.
    pub fn is_compressed(&self) -> bool {
        matches!(self, CompressOutcome::Compressed { .. } | CompressOutcome::Pruned { .. })
    }
}

/// Writes a model with the chosen weights compressed; all else, metadata included, is copied byte for byte.
///
/// A sharded input gives a directory with the same file names; see [`crate::file`](mod@crate::file) for what happens on the way.
///
/// # Errors
/// Those of [`Reader::open`]; [`Error::TooManyKept`], or [`Error::AlongColumns`], for a tensor that is not 2:4 and [`NotSparse::Error`];
/// [`Error::NotANumber`] or [`Error::Infinite`] where a tensor would have to be pruned and is not finite;
/// [`Error::NegativeZeros`] for [`NegativeZeros::Refuse`]; [`Error::Exists`] where the output exists and may not be
/// replaced; [`Error::Interrupted`] where `progress` breaks off; [`Error::Io`] where the system refuses. Nothing is left then.
pub fn compress(
    input: impl AsRef<Path>,
    output: impl AsRef<Path>,
    overwrite: Overwrite,
    options: &CompressOptions<'_>,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<CompressReport> {
    let reader = Reader::open(input)?;
    let mut conversion = Compress { options, report: CompressReport::default(), plans: HashMap::new() };
    run(&mut conversion, &reader, output.as_ref(), overwrite, progress)?;
    Ok(conversion.report)
}

struct Compress<'a> {
    options: &'a CompressOptions<'a>,
    report: CompressReport,
    /// What is to be done with each chosen matrix.
    plans: HashMap<String, Planned>,
}

/// What is to be done with a chosen matrix.
#[derive(Debug, Clone, Copy)]
enum Planned {
    /// It is 2:4 and has that many -0.0.
    Compress {
        negative_zeros: usize,
    },
    Prune,
    KeepDense {
        violations: usize,
    },
}

impl Conversion for Compress<'_> {
    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<()> {
        if let Item::Plain(tensor) = item
            && let Some(matrix) = Matrix::of(tensor)
            && (self.options.which)(tensor)
        {
            let planned = matrix.run(reader, Inspect(self.options))?;
            self.plans.insert(tensor.name.clone(), planned);
            if !matches!(planned, Planned::KeepDense { .. }) {
                plan.compressed(CompressedInfo::new(&tensor.name, matrix.dtype, matrix.rows, matrix.cols)?);
                return Ok(());
            }
        }
        item.plan_copy(plan);
        Ok(())
    }

    fn write(&mut self, reader: &Reader, item: Item<'_>, writer: &mut Writer) -> Result<()> {
        let bytes_before = item.bytes();
        let mut bytes_after = bytes_before;
        let (dtype, shape, outcome) = match item {
            Item::Compressed(w) => {
                item.write_copy(reader, writer)?;
                (w.format.stored(), vec![w.rows, w.cols], CompressOutcome::AlreadyCompressed)
            }
            Item::Plain(tensor) => {
                let outcome = match (Matrix::of(tensor), self.plans.get(&tensor.name)) {
                    (Some(matrix), Some(&planned)) => {
                        if !matches!(planned, Planned::KeepDense { .. }) {
                            let Matrix { dtype, rows, cols, .. } = matrix;
                            bytes_after = CompressedInfo::new(&tensor.name, dtype, rows, cols)?.bytes();
                        }
                        matrix.run(reader, Write { writer, name: &tensor.name, planned })?
                    }
                    (matrix, _) => {
                        item.write_copy(reader, writer)?;
                        matrix.map_or(CompressOutcome::NotAMatrix, |_| CompressOutcome::NotChosen)
                    }
                };
                (tensor.dtype, tensor.shape.clone(), outcome)
            }
        };
        let name = item.name().to_owned();
        self.report.tensors.push(CompressedTensor { name, dtype, shape, bytes_before, bytes_after, outcome });
        Ok(())
    }
}

/// Finds out what is to be done with a chosen matrix, in one pass.
struct Inspect<'a>(&'a CompressOptions<'a>);

/// What one row, or all of them, look like.
#[derive(Debug, Clone, Copy, Default)]
struct Census {
    violations: usize,
    negative_zeros: usize,
    not_finite: bool,
}

impl Census {
    fn of_row<T: Element>(row: &[T]) -> Self {
        let mut census = Census::default();
        for values in row.chunks(4) {
            let mut nonzeros = 0;
            for value in values {
                let value = value.to_f32();
                nonzeros += u32::from(value != 0.0);
                census.negative_zeros += usize::from(value.to_bits() == (-0.0f32).to_bits());
                census.not_finite |= !value.is_finite();
            }
            census.violations += usize::from(nonzeros > 2);
        }
        census
    }

    fn and(self, other: Self) -> Self {
        Census {
            violations: self.violations + other.violations,
            negative_zeros: self.negative_zeros + other.negative_zeros,
            not_finite: self.not_finite | other.not_finite,
        }
    }
}

impl OnMatrix for Inspect<'_> {
    type Output = Planned;

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<Planned> {
        let rows = (0..matrix.rows()).into_par_iter();
        let census = rows.map(|row| Census::of_row(matrix.row(row))).reduce(Census::default, Census::and);
        match (census.violations, self.0.not_sparse) {
            (0, _) => {
                let count = census.negative_zeros;
                if count > 0 && self.0.negative_zeros == NegativeZeros::Refuse {
                    return Err(Error::NegativeZeros { count });
                }
                Ok(Planned::Compress { negative_zeros: count })
            }
            (_, NotSparse::Error) => {
                // There is one; a second pass finds its place.
                let mask = Mask::of_nonzeros(matrix);
                if matrix.rows() >= 4 && mask.verify(Pattern::TWO_FOUR, Axis::Column).is_ok() {
                    return Err(Error::AlongColumns);
                }
                mask.verify(Pattern::TWO_FOUR, Axis::Row)?;
                Ok(Planned::Compress { negative_zeros: census.negative_zeros })
            }
            (violations, NotSparse::KeepDense) => Ok(Planned::KeepDense { violations }),
            (_, NotSparse::Prune) => {
                if census.not_finite {
                    matrix.expect_finite()?;
                }
                Ok(Planned::Prune)
            }
        }
    }
}

/// Compresses and writes a matrix.
struct Write<'a> {
    writer: &'a mut Writer,
    name: &'a str,
    planned: Planned,
}

impl OnMatrix for Write<'_> {
    type Output = CompressOutcome;

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<CompressOutcome> {
        let (weight, outcome) = match self.planned {
            Planned::Compress { negative_zeros } => {
                (Compressed::from_dense(matrix)?, CompressOutcome::Compressed { negative_zeros })
            }
            Planned::KeepDense { violations } => {
                self.writer.write_elements(self.name, matrix.data())?;
                return Ok(CompressOutcome::KeptDense { violations });
            }
            Planned::Prune => {
                let rule = select::nm::magnitude_rule(Pattern::TWO_FOUR, Axis::Row);
                let (weight, retained) = select::band::compressed(matrix, &rule)?;
                let (kept_l1, kept_l2) = (retained.l1(), retained.l2());
                let negative_zeros = retained.kept_negative_zeros;
                (weight, CompressOutcome::Pruned { kept_l1, kept_l2, negative_zeros })
            }
        };
        self.writer.write_compressed(self.name, &weight)?;
        Ok(outcome)
    }
}
