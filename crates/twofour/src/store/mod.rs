//! Sparse weights of any pattern: coordinates, compressed sparse rows and columns, and blocks.
//!
//! | store | holds | for |
//! |---|---|---|
//! | [`Coo`] | row, column and value of every element, row by row | building, exchange |
//! | [`Csr`] | columns and values, row by row | products with an unstructured weight |
//! | [`Csc`] | rows and values, column by column | exchange, products with the transpose |
//! | [`Bsr`] | blocks with a nonzero, row of blocks by row of blocks | products with a block-sparse weight |
//! | [`Compressed`] | two values of every four, and where they were | 2:4 |
//!
//! They are the formats of torch (`sparse_coo`, `sparse_csr`, `sparse_csc`, `sparse_bsr`) and of scipy, with columns
//! and rows in ascending order and no place twice. Each is made of a dense matrix, of parts, which are checked, or of
//! another one: [`Csr`] is what all of them are converted to and from.
//!
//! An element is stored where it is neither +0.0 nor -0.0 (NaN is stored), so that a -0.0 comes back as +0.0; parts
//! may hold zeros, and [`Coo`], [`Csr`] and [`Csc`] keep them when they are converted to each other. A block is stored
//! as it is, with its zeros.
//!
//! ```
//! use twofour::{MatrixRef, store::{Bsr, Coo, Csc, Csr}};
//! let w = [0.0f32, 2.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0];
//! let csr = Csr::from_dense(MatrixRef::new(2, 4, &w)?)?;
//! assert_eq!((csr.starts(), csr.columns(), csr.values()), (&[0, 1, 2][..], &[1, 0][..], &[2.0, 3.0][..]));
//! assert_eq!(Csc::from(&csr).to_dense()?, w);
//! assert_eq!(Csr::from(&Coo::from(&csr)), csr);
//! let blocks = Bsr::from_csr(&csr, [2, 2])?;
//! assert_eq!((blocks.columns(), blocks.values()), (&[0][..], &[0.0, 2.0, 3.0, 0.0][..]));
//! let mut y = [0.0; 2];
//! csr.linear(&[1.0, 10.0, 100.0, 1000.0], 1, Default::default(), &mut y)?;
//! assert_eq!(y, [20.0, 3.0]);
//! # Ok::<(), twofour::Error>(())
//! ```
//!
//! [`Csr`], [`Csc`] and [`Coo`] multiply as they are; a [`Bsr`] is multiplied as a
//! [`BlockSparseRef`](crate::kernel::BlockSparseRef), or copied as a
//! [`BlockSparseWeight`](crate::kernel::BlockSparseWeight).

mod bsr;
mod coo;
mod csc;
mod csr;
#[cfg(test)]
mod tests;

pub use bsr::Bsr;
pub(crate) use bsr::expect_block_sparse;
pub use coo::Coo;
pub use csc::Csc;
pub use csr::Csr;

use crate::{Compressed, Element, Error, MatrixRef, Result, compressed::code};

/// An error unless rows and columns can be counted in 32 bits, as indices are.
fn expect_indices(rows: usize, cols: usize) -> Result<()> {
    match u32::try_from(rows.max(cols)) {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::TooLarge { shape: vec![rows, cols] }),
    }
}

/// The parts of a compressed line of rows, columns or blocks: where each begins, and ascending indices in each.
fn expect_lines(form: &'static str, lines: usize, width: usize, starts: &[usize], indices: &[u32]) -> Result<()> {
    let at = |part, index, found, expected| Err(Error::StorePart { form, part, index, found, expected });
    if starts.len() != lines + 1 {
        return Err(Error::Length { what: "where lines begin", expected: lines + 1, found: starts.len() });
    }
    if starts[0] != 0 {
        return at("beginning", 0, starts[0], "0".to_owned());
    }
    if starts[lines] != indices.len() {
        return at("beginning", lines, starts[lines], format!("{}, the number of indices", indices.len()));
    }
    if let Some(line) = (0..lines).find(|line| starts[*line] > starts[line + 1]) {
        return at("beginning", line + 1, starts[line + 1], format!("at least {}, the one before", starts[line]));
    }
    for line in starts.windows(2) {
        let mut least = 0;
        for (i, index) in (line[0]..line[1]).zip(&indices[line[0]..line[1]]) {
            let index = *index as usize;
            if index >= width {
                return at("index", i, index, format!("less than {width}"));
            }
            if index < least {
                return at("index", i, index, format!("at least {least}: they ascend, none is twice in a line"));
            }
            least = index + 1;
        }
    }
    Ok(())
}

/// An error unless there is a value for each index.
fn expect_values(expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what: "values of a sparse matrix", expected, found }) }
}

impl<T: Element> From<&Compressed<T>> for Csr<T> {
    /// The nonzeros of a 2:4 weight.
    fn from(weight: &Compressed<T>) -> Self {
        let (rows, cols) = (weight.rows(), weight.cols());
        let mut csr = Csr::empty(rows, cols);
        for row in 0..rows {
            for group in 0..weight.groups() {
                let (first, second) = code::positions(weight.code(row, group));
                for (position, value) in [first, second].into_iter().zip(weight.pair(row, group)) {
                    if !value.is_zero() {
                        csr.push((4 * group + position) as u32, value);
                    }
                }
            }
            csr.end_row(row);
        }
        csr
    }
}

impl<T: Element> TryFrom<&Csr<T>> for Compressed<T> {
    type Error = Error;

    /// # Errors
    /// [`Error::TooManyKept`] with the first group of four that has three or four nonzeros.
    fn try_from(csr: &Csr<T>) -> Result<Self> {
        Compressed::from_dense(MatrixRef::new(csr.rows(), csr.cols(), &csr.to_dense()?)?)
    }
}

macro_rules! by_rows {
    ($($from:ident -> $to:ident),*) => {$(
        impl<T: Element> From<&$from<T>> for $to<T> {
            fn from(store: &$from<T>) -> Self {
                $to::from(&Csr::from(store))
            }
        }
    )*};
}

impl<T: Element> TryFrom<&Coo<T>> for Compressed<T> {
    type Error = Error;

    /// # Errors
    /// Those from [`Csr`].
    fn try_from(coo: &Coo<T>) -> Result<Self> {
        Compressed::try_from(&Csr::from(coo))
    }
}

by_rows!(Coo -> Csc, Csc -> Coo, Bsr -> Coo, Bsr -> Csc, Compressed -> Coo, Compressed -> Csc);
