//! Whether a conversion would change anything: a copy of the input under another name is not what its user asked for.

use anyhow::{Result, bail};
use twofour::{
    Axis, DataType, Element, MatrixRef, Pattern,
    file::{Reader, StoredDType, TensorInfo, ValueFormat},
    verify,
};

use super::tensor::{OnMatrix, on_plain};
use crate::interrupt;

/// Which tensors a command chooses, by name, dtype and shape.
type Chosen<'a> = &'a dyn Fn(&str, StoredDType, &[usize]) -> bool;

/// An error where no tensor would be pruned.
pub(super) fn expect_to_prune(reader: &Reader, chosen: Chosen<'_>) -> Result<()> {
    if reader.plain_tensors().any(|t| chosen(&t.name, t.dtype, &t.shape)) {
        return Ok(());
    }
    let path = reader.path().display();
    let is_matrix = |t: &TensorInfo| t.shape.len() >= 2 && t.dtype.element().is_some();
    match reader.compressed_weights().count() {
        0 if !reader.plain_tensors().any(is_matrix) => bail!(
            "{path}: no tensor is a matrix of floats, as the weights of linear layers are, or a convolution's, so \
             nothing was written"
        ),
        0 => bail!("{path}: no tensor would be pruned, so nothing was written; choose some with --include"),
        packed => bail!(
            "{path}: no tensor would be pruned, so nothing was written: {packed} are compressed already; twofour \
             decompress makes them dense"
        ),
    }
}

/// An error where no tensor would be compressed. Chosen tensors that are not 2:4 count only where they are pruned or an
/// error.
pub(super) fn expect_to_compress(reader: &Reader, chosen: Chosen<'_>, keeps_dense: bool) -> Result<()> {
    let candidates = reader.plain_tensors().filter(|t| chosen(&t.name, t.dtype, &t.shape));
    let path = reader.path().display();
    match (reader.compressed_weights().count(), Found::among(reader, candidates, keeps_dense)?) {
        (_, Found::Some) => Ok(()),
        (0, Found::None) => {
            bail!("{path}: no tensor would be compressed, so nothing was written; choose some with --include")
        }
        (0, Found::NotSparse(count)) => bail!(
            "{path}: none of the {count} chosen tensors is 2:4 along its rows, so nothing was written; prune the model \
             first, with twofour prune or with --prune"
        ),
        (packed, _) => {
            bail!("{path}: {packed} weights are compressed already and no other can be, so nothing was written")
        }
    }
}

/// An error where no tensor would be quantized.
pub(super) fn expect_to_quantize(reader: &Reader, chosen: Chosen<'_>, dense: Chosen<'_>) -> Result<()> {
    let is_float = |format: ValueFormat| matches!(format, ValueFormat::Plain(dtype) if dtype != DataType::I8);
    let mut packed = reader.compressed_weights();
    let any_packed = packed.any(|w| is_float(w.format) && chosen(&w.name, w.format.dense().into(), &[w.rows, w.cols]));
    let is_float = |dtype: StoredDType| dtype.element().is_some_and(|dtype| dtype != DataType::I8);
    let mut floats = reader.plain_tensors().filter(|t| is_float(t.dtype));
    if any_packed || floats.any(|t| dense(&t.name, t.dtype, &t.shape)) {
        return Ok(());
    }
    let floats = reader.plain_tensors().filter(|t| is_float(t.dtype) && chosen(&t.name, t.dtype, &t.shape));
    let path = reader.path().display();
    match Found::among(reader, floats, true)? {
        Found::Some => Ok(()),
        Found::None if reader.compressed_weights().next().is_some() => {
            bail!(
                "{path}: the weights are integers already, so nothing was written; quantize the model that they were \
                 made from"
            )
        }
        Found::None => {
            bail!("{path}: no tensor would be quantized, so nothing was written; choose some with --include")
        }
        Found::NotSparse(count) => bail!(
            "{path}: none of the {count} chosen tensors is 2:4 along its rows, so nothing was written; prune the model \
             first, with twofour prune"
        ),
    }
}

/// An error where no weight would become dense.
pub(super) fn expect_to_decompress(reader: &Reader) -> Result<()> {
    let any = reader.compressed_weights().next().is_some()
        || reader.plain_tensors().any(|tensor| reader.is_dense_int8(&tensor.name));
    if any {
        return Ok(());
    }
    bail!("{}: no weight is compressed, so nothing was written; the model is as it would be", reader.path().display())
}

/// What is found among chosen tensors.
enum Found {
    /// One that can be converted.
    Some,
    None,
    /// As many as that, and none of them is 2:4.
    NotSparse(usize),
}

impl Found {
    fn among<'a>(reader: &Reader, tensors: impl Iterator<Item = &'a TensorInfo>, must_be_sparse: bool) -> Result<Self> {
        let mut count = 0;
        for tensor in tensors {
            interrupt::check()?;
            if !must_be_sparse || on_plain(reader, tensor, IsSparse)? == Some(true) {
                return Ok(Found::Some);
            }
            count += 1;
        }
        Ok(if count == 0 { Found::None } else { Found::NotSparse(count) })
    }
}

/// Whether a matrix is 2:4 along its rows.
#[derive(Clone, Copy)]
struct IsSparse;

impl OnMatrix for IsSparse {
    type Output = bool;

    fn run<T: Element>(self, matrix: MatrixRef<'_, T>) -> bool {
        verify::conformance(matrix, Pattern::TWO_FOUR, Axis::Row, 0).is_ok_and(|found| found.obeys())
    }
}
