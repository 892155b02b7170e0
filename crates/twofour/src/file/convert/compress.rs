//! From 2:4 dense weights to compressed ones.

use std::{collections::HashMap, fmt, ops::ControlFlow, path::Path};

use super::{
    CompressedInfo, Conversion, Item, Matrix, OnMatrix, Overwrite, Plan, Progress, Reader, TensorInfo, Writer,
    reject_not_finite, run,
};
use crate::{Axis, Compressed, Element, Error, Mask, MatrixRef, Pattern, Result, file::StoredDType, select, verify};

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
/// Those of [`Reader::open`]; [`Error::TooManyKept`] for a tensor that is not 2:4 and [`NotSparse::Error`];
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
    let mut conversion = Compress { options, report: CompressReport::default(), outcomes: HashMap::new() };
    run(&mut conversion, &reader, output.as_ref(), overwrite, progress)?;
    Ok(conversion.report)
}

struct Compress<'a> {
    options: &'a CompressOptions<'a>,
    report: CompressReport,
    outcomes: HashMap<String, CompressOutcome>,
}

impl Conversion for Compress<'_> {
    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<()> {
        let mut compressed = None;
        let (dtype, shape, outcome) = match item {
            Item::Compressed(w) => (w.dtype.into(), vec![w.rows, w.cols], CompressOutcome::AlreadyCompressed),
            Item::Plain(tensor) => {
                let outcome = match Matrix::of(tensor) {
                    None => CompressOutcome::NotAMatrix,
                    Some(_) if !(self.options.which)(tensor) => CompressOutcome::NotChosen,
                    Some(matrix) => {
                        let outcome = matrix.run(reader, Inspect(self.options))?;
                        if outcome.is_compressed() {
                            let Matrix { dtype, rows, cols, .. } = matrix;
                            compressed = Some(CompressedInfo::new(&tensor.name, dtype, rows, cols)?);
                        }
                        outcome
                    }
                };
                (tensor.dtype, tensor.shape.clone(), outcome)
            }
        };
        let name = item.name().to_owned();
        let bytes_before = item.bytes();
        let mut bytes_after = bytes_before;
        match compressed {
            None => item.plan_copy(plan),
            Some(weight) => {
                bytes_after = weight.bytes();
                plan.compressed(weight);
            }
        }
        self.outcomes.insert(name.clone(), outcome);
        self.report.tensors.push(CompressedTensor { name, dtype, shape, bytes_before, bytes_after, outcome });
        Ok(())
    }

    fn write(&mut self, reader: &Reader, item: Item<'_>, writer: &mut Writer) -> Result<()> {
        let outcome = self.outcomes.get(item.name());
        match item {
            Item::Plain(tensor) if outcome.is_some_and(CompressOutcome::is_compressed) => {
                let prune = matches!(outcome, Some(CompressOutcome::Pruned { .. })).then_some(Pattern::TWO_FOUR);
                match Matrix::of(tensor) {
                    Some(matrix) => matrix.run(reader, Write { writer, name: &tensor.name, prune }),
                    None => item.write_copy(reader, writer),
                }
            }
            _ => item.write_copy(reader, writer),
        }
    }
}

/// Finds out what is to be done with a chosen matrix.
struct Inspect<'a>(&'a CompressOptions<'a>);

impl OnMatrix for Inspect<'_> {
    type Output = CompressOutcome;

    fn run<T: Element>(self, matrix: MatrixRef<'_, T>) -> Result<CompressOutcome> {
        let nonzeros = Mask::of_nonzeros(matrix);
        let conforms = nonzeros.verify(Pattern::TWO_FOUR, Axis::Row);
        match (conforms, self.0.not_sparse) {
            (Ok(()), _) => {
                let negative_zeros = verify::census(matrix.data()).negative_zeros;
                if negative_zeros > 0 && self.0.negative_zeros == NegativeZeros::Refuse {
                    return Err(Error::NegativeZeros { count: negative_zeros });
                }
                Ok(CompressOutcome::Compressed { negative_zeros })
            }
            (Err(place), NotSparse::Error) => Err(place),
            (Err(_), NotSparse::KeepDense) => {
                Ok(CompressOutcome::KeptDense { violations: nonzeros.violations(Pattern::TWO_FOUR, Axis::Row).count() })
            }
            (Err(_), NotSparse::Prune) => {
                reject_not_finite(matrix)?;
                let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row)?;
                let kept_negative_zeros = |row: usize| {
                    let values = matrix.row(row).iter().enumerate();
                    values.filter(|(col, v)| v.is_negative_zero() && mask.is_kept(row, *col)).count()
                };
                Ok(CompressOutcome::Pruned {
                    kept_l1: mask.kept_l1(matrix)?,
                    kept_l2: mask.kept_l2(matrix)?,
                    negative_zeros: (0..matrix.rows()).map(kept_negative_zeros).sum(),
                })
            }
        }
    }
}

/// Compresses and writes a matrix.
struct Write<'a> {
    writer: &'a mut Writer,
    name: &'a str,
    prune: Option<Pattern>,
}

impl OnMatrix for Write<'_> {
    type Output = ();

    fn run<T: Element>(self, matrix: MatrixRef<'_, T>) -> Result<()> {
        let compressed = match self.prune {
            None => Compressed::from_dense(matrix)?,
            Some(pattern) => Compressed::from_masked(matrix, &select::magnitude(matrix, pattern, Axis::Row)?)?,
        };
        self.writer.write_compressed(self.name, &compressed)
    }
}
