//! Tensors in pieces: each is read, changed and written by one thread while it is in its cache, so that memory holds a
//! piece for each thread and no tensor.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use half::f16;
use rayon::prelude::*;

use super::{CompressedInfo, Matrix, Reader, TensorInfo, TensorView, ValueFormat, Writer, named};
use crate::{
    Arithmetic, Compressed, Element, Error, MatrixRef, Result, Selector,
    int4::{Granularity, Int4},
    int8::Int8,
    kernel::Aligned,
    mask::Retained,
    match_element, memory,
    select::band::BandScratch,
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

/// The rows of a matrix, some at a time; of a stack, those of one matrix after the other.
pub(super) struct Bands<'a> {
    reader: &'a Reader,
    view: TensorView<'a>,
    matrix: Matrix,
}

impl<'a> Bands<'a> {
    /// Those of the tensor of that name.
    pub(super) fn of(reader: &'a Reader, name: &str, matrix: Matrix) -> Result<Self> {
        Ok(Bands { reader, view: reader.tensor(name)?, matrix })
    }

    /// An error about the matrix, with its file and its name.
    pub(super) fn named(&self, error: Error) -> Error {
        named(self.reader, &self.view.info.name, error)
    }

    /// Checks that every element is finite.
    pub(super) fn expect_finite(&self) -> Result<()> {
        match_element!(self.matrix.dtype, |T| self.each::<T, ()>(1, |_, band| band.expect_finite_here(), |()| ()))
    }

    /// Runs `work` over bands whose heights are multiples of `height`, on all threads, with the number of a band's
    /// first row; then `then` with each result, in the order of the bands. Rows are counted through the matrices of a
    /// stack, and errors name them so.
    pub(super) fn each<T: Arithmetic, R: Send>(
        &self,
        height: usize,
        work: impl Fn(usize, MatrixRef<'_, T>) -> Result<R> + Sync,
        then: impl FnMut(R) + Send,
    ) -> Result<()> {
        self.each_with::<T, (), R>(height, || (), |(), row, band| work(row, band), then)
    }

    /// [`Bands::each`] with a state of each thread.
    pub(super) fn each_with<T: Arithmetic, S, R: Send>(
        &self,
        height: usize,
        state: impl Fn() -> S + Sync,
        work: impl Fn(&mut S, usize, MatrixRef<'_, T>) -> Result<R> + Sync,
        then: impl FnMut(R) + Send,
    ) -> Result<()> {
        let Matrix { count, rows: all, cols, .. } = self.matrix;
        let row_bytes = cols * size_of::<T>();
        let rows = rows_of_a_piece(row_bytes).next_multiple_of(height.min(all.max(1)));
        let bands = all.div_ceil(rows);
        let outcome = in_order(
            count * bands,
            || (Buffer::default(), Buffer::default(), state()),
            |(input, ordered, state), piece| {
                let (matrix, band) = (piece / bands, piece % bands);
                let first_row = matrix * all + band * rows;
                let rows = rows.min(all - band * rows);
                let mut input = input.of(rows * row_bytes)?;
                self.view.read_into(first_row * row_bytes, input)?;
                if let Some(kernel) = self.matrix.kernel {
                    let ordered = ordered.of(rows * row_bytes)?;
                    kernel.to_matrix::<T>(bytemuck::cast_slice(input), bytemuck::cast_slice_mut(ordered));
                    input = ordered;
                }
                let elements = MatrixRef::new(rows, cols, bytemuck::cast_slice(input))?;
                work(state, first_row, elements).map_err(|e| e.below(first_row))
            },
            then,
        );
        outcome.map_err(|error| self.named(error))
    }
}

/// Prunes a matrix of finite elements into the writer, and returns what it keeps.
pub(super) fn prune<T: Arithmetic>(bands: &Bands<'_>, writer: &mut Writer, selector: Selector) -> Result<Retained> {
    let TensorInfo { name, bytes, .. } = bands.view.info;
    let place = writer.in_pieces(name, *bytes)?;
    let row_bytes = bands.matrix.cols * size_of::<T>();
    let mut total = Retained::default();
    bands.each_with::<T, Scratch, _>(
        selector.height(),
        Scratch::default,
        |Scratch { output, stored, bands: scratch }, first_row, band| {
            let mut values: &mut [T] = bytemuck::cast_slice_mut(output.of(band.rows() * row_bytes)?);
            let mut retained = vec![Retained::default(); band.rows()];
            selector.prune(band, scratch, values, &mut retained);
            if !Retained::total(&retained).is_finite() {
                band.expect_finite_here()?;
            }
            if let Some(kernel) = bands.matrix.kernel {
                let stored = bytemuck::cast_slice_mut(stored.of(band.rows() * row_bytes)?);
                kernel.to_stored(values, stored);
                values = stored;
            }
            place.write_at(first_row * row_bytes, bytemuck::cast_slice(values))?;
            Ok(retained)
        },
        |rows| total = rows.into_iter().fold(total, Retained::and),
    )?;
    Ok(total)
}

/// Some rows of a compressed weight, as they are stored.
#[derive(Debug)]
pub(super) struct StoredRows<'a> {
    rows: usize,
    weight: &'a CompressedInfo,
    /// The bytes of each part.
    parts: Vec<Vec<u8>>,
}

impl StoredRows<'_> {
    fn of<T: bytemuck::Pod>(&self, part: usize) -> Vec<T> {
        self.parts.get(part).map_or(vec![], |bytes| bytemuck::allocation::pod_collect_to_vec(bytes))
    }

    /// The weight, without scales, after checking every rule of the canonical form.
    pub(super) fn compressed<T: Element>(&self) -> Result<Compressed<T>> {
        Compressed::from_parts(self.rows, self.weight.cols, self.of(0), self.of(1))
    }

    /// The weight in f32: integers times scales.
    pub(super) fn floats(&self) -> Result<Compressed<f32>> {
        let halves = || self.of::<f16>(2);
        Ok(match self.weight.format {
            ValueFormat::Plain(dtype) => match_element!(dtype, |T| self.compressed::<T>().map(|w| widened(&w)))?,
            ValueFormat::ScaledI8 => Int8::from_parts(self.compressed()?, self.of(2), Granularity::Row)?.dequantize(),
            ValueFormat::GroupedI8(granularity) => {
                let scales = halves().iter().map(|scale| scale.to_f32()).collect();
                Int8::from_parts(self.compressed()?, scales, granularity)?.dequantize()
            }
            ValueFormat::Int4(granularity) => {
                let (rows, cols) = (self.rows, self.weight.cols);
                Int4::from_packed(rows, cols, &self.parts[0], self.of(1), halves(), granularity)?.dequantize()
            }
        })
    }
}

/// The same weight in f32.
pub(super) fn widened<T: Element>(weight: &Compressed<T>) -> Compressed<f32> {
    let values = weight.values().iter().map(|v| v.to_f32()).collect();
    Compressed::from_trusted_parts(weight.rows(), weight.cols(), values, weight.meta().to_vec())
}

/// Runs `work` over the rows of a compressed weight, some at a time, as [`Bands::each`] does.
pub(super) fn in_stored_rows<R: Send>(
    reader: &Reader,
    weight: &CompressedInfo,
    work: impl Fn(usize, StoredRows<'_>) -> Result<R> + Sync,
    then: impl FnMut(R) + Send,
) -> Result<()> {
    let mut views = Vec::new();
    for (part, ..) in weight.parts() {
        let view = reader.tensor(&part.key(&weight.name))?;
        views.push((view, view.info.bytes / weight.rows));
    }
    let rows = rows_of_a_piece(weight.cols.saturating_mul(weight.format.dense().bytes()));
    let outcome = in_order(
        weight.rows.div_ceil(rows),
        || (),
        |(), band| {
            let first_row = band * rows;
            let rows = rows.min(weight.rows - first_row);
            let mut parts = Vec::with_capacity(views.len());
            for (view, row_bytes) in &views {
                let mut bytes = memory::zeroed(rows * row_bytes)?;
                view.read_into(first_row * row_bytes, &mut bytes)?;
                parts.push(bytes);
            }
            work(first_row, StoredRows { rows, weight, parts }).map_err(|e| e.below(first_row))
        },
        then,
    );
    outcome.map_err(|error| named(reader, &weight.name, error))
}

/// Rows whose elements are about a piece.
fn rows_of_a_piece(row_bytes: usize) -> usize {
    (PIECE / row_bytes.max(1)).max(1)
}

/// What a thread that prunes holds.
#[derive(Default)]
struct Scratch {
    output: Buffer,
    /// The output in the order of the tensor, where that is not the matrix's.
    stored: Buffer,
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

/// Runs `work` for so many pieces on all threads, each of which makes a state first, and `then` with every result, in
/// the order of the pieces. The error is that of the first piece that failed.
fn in_order<S, R: Send>(
    pieces: usize,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<R> + Sync,
    then: impl FnMut(R) + Send,
) -> Result<()> {
    let done = Mutex::new(InOrder { next: 0, waiting: BTreeMap::new(), then, error: None });
    let (claimed, threads) = (AtomicUsize::new(0), rayon::current_num_threads().min(pieces));
    // Each thread claims pieces in order, so that those before one that failed are done or under way.
    (0..threads).into_par_iter().for_each(|_| {
        let mut state = state();
        let lock = || done.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let piece = claimed.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces || lock().error.is_some() {
                return;
            }
            let outcome = work(&mut state, piece);
            lock().take(piece, outcome);
        }
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
