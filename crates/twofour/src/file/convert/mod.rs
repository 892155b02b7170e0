//! Conversions of whole models: one walk over the pieces of the input, and an [`Operation`] for each kind.

mod beside;
mod compress;
mod decompress;
mod description;
mod destination;
#[cfg(test)]
mod directory_tests;
mod merge;
mod operation;
mod pieces;
mod prune;
mod prune_quantized;
mod prune_with;
mod quantize;
mod report;
mod staging;
#[cfg(test)]
mod tests;
mod unchanged;

use std::{collections::HashMap, fmt, ops::ControlFlow, path::Path};

use super::{
    CompressedInfo, Overwrite, Part, Plan, PlannedTensor, Reader, StoredDType, TensorInfo, TensorView, ValueFormat,
    Writer,
};
use crate::{Arithmetic, DataType, Error, MatrixRef, Result, match_element, role::Kernel};
use destination::Destination;

pub use beside::{Beside, LeftOut};
pub use compress::{Compress, MadeCompressed, NegativeZeros, NotSparse};
pub use decompress::{Decompress, MadeDense};
pub use merge::{Merge, Merged};
pub use operation::{Item, Operation, Planned};
pub use prune::{Prune, Pruned, prune};
pub use prune_quantized::PruneAndQuantize;
pub use prune_with::{PruneWith, PrunedWeight};
pub use quantize::{Quantization, Quantize, Quantized, QuantizedWeight};
pub use report::{Converted, Kept, Outcome, Report};
pub use unchanged::Unchanged;

/// How far a conversion is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress<'a> {
    /// Which of the two passes runs.
    pub phase: Phase,
    /// The tensor that was just finished, or the file beside the tensors that is being copied.
    pub tensor: &'a str,
    /// Bytes of the input that this pass is through with.
    pub bytes_done: u64,
    /// Bytes of the input altogether.
    pub bytes_total: u64,
}

/// A pass of a conversion over its input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Looking at the input.
    Checking,
    /// Writing the output.
    Writing,
}

/// Checks that a conversion of `reader` could write to `output`, for callers with long work to do before. The
/// conversions check it themselves.
///
/// # Errors
/// [`Error::Exists`] where there is an output already and `overwrite` does not allow to replace it; [`Error::Format`]
/// where a file is named for a directory of shards or the other way round, where the output is the input's own
/// directory, is no file but a device, or holds another model that the output would leave there; [`Error::Io`] where
/// the directory that is to hold the output cannot be read.
pub fn check_output(reader: &Reader, output: impl AsRef<Path>, overwrite: Overwrite) -> Result<()> {
    Destination::new(reader, output.as_ref(), overwrite).map(drop)
}

/// A function that is told how far a conversion is, and whether it goes on.
type Watch<'a> = Box<dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a>;

/// A conversion of a model: from where, and how it is watched.
///
/// ```no_run
/// use std::ops::ControlFlow;
/// use twofour::file::{Compress, Convert, Overwrite};
/// let report = Convert::open("pruned/")?
///     .overwrite(Overwrite::Yes)
///     .progress(|p| {
///         println!("{}: {} of {} bytes", p.tensor, p.bytes_done, p.bytes_total);
///         ControlFlow::Continue(())
///     })
///     .run("small/", Compress::default())?;
/// println!("{} bytes of {}", report.bytes_after(), report.bytes_before());
/// # Ok::<(), twofour::Error>(())
/// ```
pub struct Convert<'a> {
    reader: Reader,
    overwrite: Overwrite,
    watch: Watch<'a>,
}

impl fmt::Debug for Convert<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Convert")
            .field("reader", &self.reader)
            .field("overwrite", &self.overwrite)
            .finish_non_exhaustive()
    }
}

impl<'a> Convert<'a> {
    /// A conversion of a model that was opened.
    pub fn new(reader: Reader) -> Self {
        Convert { reader, overwrite: Overwrite::No, watch: Box::new(|_| ControlFlow::Continue(())) }
    }

    /// A conversion of a model on disk.
    ///
    /// # Errors
    /// Those of [`Reader::open`].
    pub fn open(input: impl AsRef<Path>) -> Result<Self> {
        Ok(Self::new(Reader::open(input)?))
    }

    /// With an existing output replaced, or not, as without this.
    #[must_use]
    pub fn overwrite(self, overwrite: Overwrite) -> Self {
        Convert { overwrite, ..self }
    }

    /// With a function that is called after every tensor of either pass. Where it returns [`ControlFlow::Break`] the
    /// conversion ends with [`Error::Interrupted`].
    #[must_use]
    pub fn progress(self, watch: impl FnMut(Progress<'_>) -> ControlFlow<()> + 'a) -> Self {
        Convert { watch: Box::new(watch), ..self }
    }

    /// Writes what the operation makes of the model. What it does not change is copied byte for byte, metadata
    /// included.
    ///
    /// A sharded input gives a directory with the same file names; see [`crate::file`](mod@crate::file) for what
    /// happens on the way.
    ///
    /// # Errors
    /// Those of the operation; [`Error::Exists`] where the output exists and may not be replaced;
    /// [`Error::Interrupted`] where the function of [`Convert::progress`] breaks off; [`Error::Io`] where the system
    /// refuses. Nothing is left then.
    pub fn run<O: Operation>(mut self, output: impl AsRef<Path>, mut operation: O) -> Result<Report<O::Change>> {
        let reader = &self.reader;
        let destination = Destination::new(reader, output.as_ref(), self.overwrite)?;
        let items: Vec<Vec<Item<'_>>> = reader
            .shards()
            .iter()
            .map(|shard| {
                let plain = shard.plain_tensors().map(Item::Plain);
                plain.chain(shard.compressed_weights().iter().map(Item::Compressed)).collect()
            })
            .collect();
        let bytes_total = items.iter().flatten().map(|item| item.bytes() as u64).sum();
        let mut tell = |phase, (name, bytes): (&str, usize), done: &mut u64| {
            *done += bytes as u64;
            match (self.watch)(Progress { phase, tensor: name, bytes_done: *done, bytes_total }) {
                ControlFlow::Continue(()) => Ok(()),
                ControlFlow::Break(()) => Err(Error::Interrupted),
            }
        };

        let mut done = 0;
        let (mut plans, mut planned) = (Vec::new(), Vec::new());
        // Bytes of what is written with another piece, by the name of that.
        let mut parts: HashMap<String, usize> = HashMap::new();
        for items in &items {
            let mut plan = Plan::new();
            for item in items {
                let before = plan.tensors().len();
                let answer = operation.plan(reader, *item, &mut plan)?;
                match &answer {
                    Planned::Copy(_) => item.plan_copy(&mut plan),
                    Planned::PartOf(name) => *parts.entry(name.clone()).or_default() += item.bytes(),
                    Planned::Change(_) => {}
                }
                let added = plan.tensors()[before..].iter().filter_map(|t| t.dtype.bytes(&t.shape));
                planned.push((answer, added.sum::<usize>()));
                tell(Phase::Checking, (item.name(), item.bytes()), &mut done)?;
            }
            plans.push(plan);
        }
        let plans: Vec<Plan> = plans.into_iter().map(|plan| plan.restacked(reader.stacks())).collect();
        destination.check(&plans)?;
        let configuration = operation.configuration(reader)?;

        let mut done = 0;
        let mut copying = |file: &Path| tell(Phase::Writing, (&file.to_string_lossy(), 0), &mut 0);
        let mut opened = destination.open(reader, &plans, configuration, &mut copying)?;
        let mut planned = planned.into_iter();
        let mut report = Report { tensors: Vec::new() };
        for ((shard, items), plan) in reader.shards().iter().zip(&items).zip(plans) {
            // The old manifest goes, a new one comes with the plan.
            let mut writer = opened.writer(shard, plan, shard.metadata().clone())?;
            for (item, (answer, bytes_after)) in items.iter().zip(planned.by_ref()) {
                let outcome = match answer {
                    Planned::Copy(kept) => {
                        item.write_copy(reader, &mut writer)?;
                        Some(Outcome::Copied(kept))
                    }
                    Planned::Change(plan) => {
                        Some(Outcome::Changed(operation.write(reader, *item, plan, &mut writer)?))
                    }
                    Planned::PartOf(_) => None,
                };
                if let Some(outcome) = outcome {
                    let bytes_before = item.bytes() + parts.get(item.name()).copied().unwrap_or_default();
                    report.tensors.push(Converted::new(*item, bytes_before, bytes_after, outcome));
                }
                tell(Phase::Writing, (item.name(), item.bytes()), &mut done)?;
            }
            opened.seal(writer)?;
        }
        opened.publish()?;
        Ok(report)
    }
}

/// A tensor that can be pruned and compressed: two-dimensional, of a dtype that twofour knows, and not without
/// elements; or, to be pruned, a stack of such matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Matrix {
    dtype: DataType,
    /// How many matrices stand one below the other.
    count: usize,
    /// Rows of each.
    rows: usize,
    cols: usize,
    /// The kernel, where the tensor is the weight of a convolution and this its matrix.
    kernel: Option<Kernel>,
}

impl Matrix {
    fn of(tensor: &TensorInfo) -> Option<Self> {
        match (tensor.dtype.element(), tensor.shape.as_slice()) {
            (Some(dtype), &[rows, cols]) if rows > 0 && cols > 0 => {
                Some(Matrix { dtype, count: 1, rows, cols, kernel: None })
            }
            _ => None,
        }
    }

    /// A matrix, that of a convolution, or the matrices of experts in one tensor.
    fn of_weight(tensor: &TensorInfo) -> Option<Self> {
        let dtype = tensor.dtype.element()?;
        if let Some(kernel) = Kernel::of_weight(&tensor.name, &tensor.shape) {
            return Some(Matrix { dtype, count: 1, rows: kernel.rows(), cols: kernel.cols(), kernel: Some(kernel) });
        }
        match *tensor.shape.as_slice() {
            [count, rows, cols] if count > 0 && rows > 0 && cols > 0 => {
                Some(Matrix { dtype, count, rows, cols, kernel: None })
            }
            _ => Matrix::of(tensor),
        }
    }

    /// Runs code over all elements of the tensor of that name; errors name file and tensor.
    fn run<C: OnMatrix>(self, reader: &Reader, name: &str, code: C) -> Result<C::Output> {
        let view = reader.tensor(name)?;
        let outcome = match_element!(self.dtype, |T| self.typed::<T, C>(view, code));
        outcome.map_err(|error| named(reader, name, error))
    }

    fn typed<T: Arithmetic, C: OnMatrix>(self, view: TensorView<'_>, code: C) -> Result<C::Output> {
        let elements = view.elements::<T>()?;
        code.run(MatrixRef::new(self.rows, self.cols, &elements)?)
    }
}

/// An error about a tensor, with its file and its name where it has none.
fn named(reader: &Reader, name: &str, error: Error) -> Error {
    match error {
        // Errors of reading and writing name their place already.
        Error::Io { .. } | Error::Format { .. } | Error::NotPlanned { .. } => error,
        error => error.in_tensor(name).in_file(reader.path_of(name)),
    }
}

/// Code over a matrix of any element type.
trait OnMatrix {
    type Output;

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<Self::Output>;
}
