//! Tensors in pieces: each is read, changed and written by one thread while it is in its cache, so that memory holds a piece for each thread and no tensor.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use super::{Matrix, Reader, Writer};
use crate::{
    Arithmetic, Error, MatrixRef, Result,
    kernel::{Aligned, share},
    mask::Retained,
    match_element,
    select::{Selector, band::BandScratch},
};

/// Bytes of a piece, about.
const PIECE: usize = 512 << 10;

/// Copies a tensor byte for byte.
pub(super) fn copy(reader: &Reader, writer: &mut Writer, name: &str) -> Result<()> {
    let view = reader.tensor(name)?;
    let bytes = view.info.bytes;
    let place = writer.in_pieces(name, bytes)?;
    in_order(
        bytes.div_ceil(PIECE),
        Buffer::default,
        |buffer, piece| {
            let first = piece * PIECE;
            let buffer = buffer.of(PIECE.min(bytes - first))?;
            view.read_into(first, buffer)?;
            place.write_at(first, buffer)
        },
        |()| (),
    )
}

/// Checks that every element of a matrix is finite.
pub(super) fn expect_finite(reader: &Reader, matrix: Matrix<'_>) -> Result<()> {
    match_element!(matrix.dtype, |T| in_bands::<T, ()>(
        reader,
        matrix,
        1,
        |_, _, band| band.expect_finite_here(),
        |()| ()
    ))
}

/// Prunes a matrix of finite elements into the writer, and returns what it keeps.
pub(super) fn prune(reader: &Reader, writer: &mut Writer, matrix: Matrix<'_>, selector: Selector) -> Result<Retained> {
    match_element!(matrix.dtype, |T| prune_as::<T>(reader, writer, matrix, selector))
}

fn prune_as<T: Arithmetic>(
    reader: &Reader,
    writer: &mut Writer,
    matrix: Matrix<'_>,
    selector: Selector,
) -> Result<Retained> {
    let place = writer.in_pieces(&matrix.tensor.name, matrix.tensor.bytes)?;
    let row_bytes = matrix.cols * size_of::<T>();
    let mut total = Retained::default();
    in_bands::<T, _>(
        reader,
        matrix,
        selector.height(),
        |scratch, first_row, band| {
            let values = bytemuck::cast_slice_mut(scratch.output.of(band.rows() * row_bytes)?);
            let mut retained = vec![Retained::default(); band.rows()];
            selector.prune(band, scratch.bands, values, &mut retained);
            if !Retained::total(&retained).is_finite() {
                band.expect_finite_here()?;
            }
            place.write_at(first_row * row_bytes, bytemuck::cast_slice(values))?;
            Ok(retained)
        },
        |rows| total = rows.into_iter().fold(total, Retained::and),
    )?;
    Ok(total)
}

/// What a thread holds.
#[derive(Default)]
struct Scratch {
    input: Buffer,
    output: Buffer,
    bands: BandScratch,
}

/// Memory for a piece, used again for the next.
struct Buffer(Aligned<u8>);

impl Default for Buffer {
    fn default() -> Self {
        Buffer(Aligned::zeroed(0))
    }
}

impl Buffer {
    /// So many bytes of whatever contents.
    fn of(&mut self, bytes: usize) -> Result<&mut [u8]> {
        if self.0.len() < bytes {
            self.0 = Aligned::try_zeroed(bytes)?;
        }
        Ok(&mut self.0[..bytes])
    }
}

/// Runs `work` over bands of the matrix, whose heights are multiples of `height`, on all threads; then `then` with each result, in the order of the bands. `work` also gets a
/// band's first row, and errors name the row of the matrix.
fn in_bands<T: Arithmetic, R: Send>(
    reader: &Reader,
    matrix: Matrix<'_>,
    height: usize,
    work: impl Fn(&mut BandScratchOf<'_>, usize, MatrixRef<'_, T>) -> Result<R> + Sync,
    then: impl FnMut(R) + Send,
) -> Result<()> {
    let view = reader.tensor(&matrix.tensor.name)?;
    let row_bytes = matrix.cols * size_of::<T>();
    let rows = (PIECE / row_bytes).max(1).next_multiple_of(height);
    let outcome = in_order(
        matrix.rows.div_ceil(rows),
        Scratch::default,
        |scratch, band| {
            let first_row = band * rows;
            let rows = rows.min(matrix.rows - first_row);
            let Scratch { input, output, bands } = scratch;
            let input = input.of(rows * row_bytes)?;
            view.read_into(first_row * row_bytes, input)?;
            let elements = MatrixRef::new(rows, matrix.cols, bytemuck::cast_slice(input))?;
            work(&mut BandScratchOf { output, bands }, first_row, elements).map_err(|e| e.below(first_row))
        },
        then,
    );
    outcome.map_err(|e| match e {
        // Errors of reading and writing name their place already.
        Error::Io { .. } | Error::Format { .. } | Error::NotPlanned { .. } => e,
        e => e.in_tensor(&matrix.tensor.name).in_file(reader.path_of(&matrix.tensor.name)),
    })
}

/// A thread's memory beside the band that it was given.
struct BandScratchOf<'a> {
    output: &'a mut Buffer,
    bands: &'a mut BandScratch,
}

/// Runs `work` for so many pieces on all threads, each of which makes a state first, and `then` with every result, in the order of the pieces. The error is that of the first piece
/// that failed.
fn in_order<S, R: Send>(
    pieces: usize,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<R> + Sync,
    then: impl FnMut(R) + Send,
) -> Result<()> {
    let done = Mutex::new(InOrder { next: 0, waiting: BTreeMap::new(), then, error: None });
    share(0..pieces, state, |state, piece| {
        let lock = || done.lock().unwrap_or_else(PoisonError::into_inner);
        // Pieces are claimed in order, so those before the one that failed are done or under way.
        if lock().error.is_some() {
            return;
        }
        let outcome = work(state, piece);
        lock().take(piece, outcome);
    });
    match done.into_inner().unwrap_or_else(PoisonError::into_inner).error {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

/// Results that are passed on in order.
struct InOrder<R, F> {
    next: usize,
    waiting: BTreeMap<usize, R>,
    then: F,
    error: Option<(usize, Error)>,
}

impl<R, F: FnMut(R)> InOrder<R, F> {
    fn take(&mut self, piece: usize, outcome: Result<R>) {
        match outcome {
            Ok(result) => _ = self.waiting.insert(piece, result),
            Err(error) if self.error.as_ref().is_none_or(|(first, _)| piece < *first) => {
                self.error = Some((piece, error));
            }
            Err(_) => {}
        }
        while let Some(result) = self.waiting.remove(&self.next) {
            self.next += 1;
            (self.then)(result);
        }
    }
}
