//! The conversions' common ground: what a piece of a model is, and the two passes over all of them.

mod beside;
mod compress;
mod decompress;
mod description;
mod destination;
#[cfg(test)]
mod directory_tests;
mod pieces;
mod prune;
mod prune_quantized;
mod quantize;
mod staging;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use super::{
    CompressedInfo, Overwrite, Part, Plan, PlannedTensor, Reader, StoredDType, TensorInfo, TensorView, ValueFormat,
    Writer,
};
use crate::{Arithmetic, DataType, Error, MatrixRef, Result, match_element};
use destination::Destination;

pub use beside::{Beside, LeftOut};
pub use compress::{
    CompressOptions, CompressOutcome, CompressReport, CompressedTensor, NegativeZeros, NotSparse, compress,
};
pub use decompress::{DecompressReport, DecompressedWeight, decompress};
pub use prune::{PruneOutcome, PruneReport, PrunedTensor, PrunedWeight, prune, prune_with};
pub use prune_quantized::prune_and_quantize_with;
pub use quantize::{
    Quantization, QuantizeOptions, QuantizeOutcome, QuantizeReport, QuantizedTensor, QuantizedWeight, quantize,
};

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

/// A piece of the input.
#[derive(Debug, Clone, Copy)]
enum Item<'a> {
    Plain(&'a TensorInfo),
    Compressed(&'a CompressedInfo),
}

impl Item<'_> {
    fn name(&self) -> &str {
        match self {
            Item::Plain(tensor) => &tensor.name,
            Item::Compressed(weight) => &weight.name,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Item::Plain(tensor) => tensor.bytes,
            Item::Compressed(weight) => weight.bytes(),
        }
    }

    /// Plans the piece as it is.
    fn plan_copy(&self, plan: &mut Plan) {
        match self {
            Item::Plain(t) => plan.tensor(PlannedTensor::new(&t.name, t.dtype, t.shape.as_slice())),
            Item::Compressed(weight) => plan.compressed((*weight).clone()),
        };
    }

    /// Copies the piece byte for byte.
    fn write_copy(&self, reader: &Reader, writer: &mut Writer) -> Result<()> {
        match self {
            Item::Plain(t) => pieces::copy(reader, writer, &t.name),
            Item::Compressed(weight) => weight
                .parts()
                .into_iter()
                .try_for_each(|(part, ..)| pieces::copy(reader, writer, &part.key(&weight.name))),
        }
    }
}

/// What a conversion does with one piece at a time.
trait Conversion {
    /// Checks the piece and plans what becomes of it.
    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<()>;

    /// Writes what was planned.
    fn write(&mut self, reader: &Reader, item: Item<'_>, writer: &mut Writer) -> Result<()>;
}

/// Checks that a conversion of `reader` could write to `output`, for callers with long work to do before. The conversions check it themselves.
///
/// # Errors
/// [`Error::Exists`] where there is an output already and `overwrite` does not allow to replace it; [`Error::Format`] where a file is named for a directory of shards or the
/// other way round, where the output is the input's own directory, is no file but a device, or holds another model that the output would leave there; [`Error::Io`] where the
/// directory that is to hold the output cannot be read.
pub fn check_output(reader: &Reader, output: impl AsRef<Path>, overwrite: Overwrite) -> Result<()> {
    Destination::new(reader, output.as_ref(), overwrite).map(drop)
}

/// Runs a conversion over every shard of a model.
fn run(
    conversion: &mut impl Conversion,
    reader: &Reader,
    output: &Path,
    overwrite: Overwrite,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<()> {
    let destination = Destination::new(reader, output, overwrite)?;
    let items: Vec<Vec<Item<'_>>> = reader
        .shards()
        .iter()
        .map(|shard| {
            let plain = shard.plain_tensors().map(Item::Plain);
            plain.chain(shard.compressed_weights().iter().map(Item::Compressed)).collect()
        })
        .collect();
    let bytes_total = items.iter().flatten().map(|item| item.bytes() as u64).sum();
    let mut report = |phase, (name, bytes): (&str, usize), done: &mut u64| {
        *done += bytes as u64;
        match progress(Progress { phase, tensor: name, bytes_done: *done, bytes_total }) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(Error::Interrupted),
        }
    };

    let mut done = 0;
    let mut plans = Vec::with_capacity(items.len());
    for items in &items {
        let mut plan = Plan::new();
        for item in items {
            conversion.plan(reader, *item, &mut plan)?;
            report(Phase::Checking, (item.name(), item.bytes()), &mut done)?;
        }
        plans.push(plan);
    }
    destination.check(&plans)?;

    let mut done = 0;
    let mut copying = |file: &Path| report(Phase::Writing, (&file.to_string_lossy(), 0), &mut 0);
    let mut opened = destination.open(reader, &plans, &mut copying)?;
    for ((shard, items), plan) in reader.shards().iter().zip(&items).zip(plans) {
        // The old manifest goes, a new one comes with the plan.
        let metadata: BTreeMap<String, String> = shard.header().metadata().clone();
        let mut writer = opened.writer(shard.path(), plan, metadata)?;
        for item in items {
            conversion.write(reader, *item, &mut writer)?;
            report(Phase::Writing, (item.name(), item.bytes()), &mut done)?;
        }
        opened.seal(writer)?;
    }
    opened.publish()
}

/// A tensor that can be pruned and compressed: two-dimensional, of a dtype that twofour knows, and not without elements.
#[derive(Debug, Clone, Copy)]
struct Matrix<'a> {
    tensor: &'a TensorInfo,
    dtype: DataType,
    rows: usize,
    cols: usize,
}

impl<'a> Matrix<'a> {
    fn of(tensor: &'a TensorInfo) -> Option<Self> {
        match (tensor.dtype.element(), tensor.shape.as_slice()) {
            (Some(dtype), &[rows, cols]) if rows > 0 && cols > 0 => Some(Matrix { tensor, dtype, rows, cols }),
            _ => None,
        }
    }

    /// Runs code over the elements; errors name file and tensor.
    fn run<C: OnMatrix>(self, reader: &Reader, code: C) -> Result<C::Output> {
        let view = reader.tensor(&self.tensor.name)?;
        let outcome = match_element!(self.dtype, |T| self.typed::<T, C>(view, code));
        outcome.map_err(|e| match e {
            // Writing errors name their place already.
            Error::Io { .. } | Error::NotPlanned { .. } => e,
            e => e.in_tensor(&self.tensor.name).in_file(reader.path_of(&self.tensor.name)),
        })
    }

    fn typed<T: Arithmetic, C: OnMatrix>(self, view: TensorView<'_>, code: C) -> Result<C::Output> {
        let elements = view.elements::<T>()?;
        code.run(MatrixRef::new(self.rows, self.cols, &elements)?)
    }
}

/// Code over a matrix of any element type.
trait OnMatrix {
    type Output;

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<Self::Output>;
}
