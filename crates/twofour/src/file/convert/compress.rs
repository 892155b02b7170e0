//! From 2:4 dense weights to compressed ones.

use std::fmt;

use super::{
    super::writer::RowsPlace, CompressedInfo, Item, Kept, Matrix, Operation, Plan, Planned, Reader, TensorInfo, Writer,
    pieces::Bands,
};
use crate::{
    Arithmetic, Axis, Compressed, Element, Error, Mask, MatrixRef, Pattern, Result, mask::Retained, match_element,
    select,
};

/// Writes the chosen weights compressed: which, and what to do where one resists.
///
/// Memory holds some rows of a weight for each thread.
///
/// # Errors
/// [`Error::TooManyKept`], or [`Error::AlongColumns`], for a tensor that is not 2:4 and [`NotSparse::Error`];
/// [`Error::NotANumber`] or [`Error::Infinite`] where a tensor would have to be pruned and is not finite;
/// [`Error::NegativeZeros`] for [`NegativeZeros::Refuse`].
#[derive(Clone, Copy)]
pub struct Compress<'a> {
    /// Which tensors to compress; asked for two-dimensional ones with elements of a dtype that twofour knows.
    /// Everything else is copied.
    pub which: &'a dyn Fn(&TensorInfo) -> bool,
    /// What to do with a chosen tensor that is not 2:4 along its rows.
    pub not_sparse: NotSparse,
    /// What to do with -0.0 in a chosen tensor.
    pub negative_zeros: NegativeZeros,
}

impl Default for Compress<'_> {
    /// Every tensor that can be; one that is not 2:4 is an error; -0.0 becomes +0.0.
    fn default() -> Self {
        Compress { which: &|_| true, not_sparse: NotSparse::default(), negative_zeros: NegativeZeros::default() }
    }
}

impl fmt::Debug for Compress<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compress")
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

/// A tensor that was dense and is compressed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MadeCompressed {
    /// Kept elements that were -0.0 and are stored as +0.0.
    pub negative_zeros: usize,
    /// What pruning kept, where the tensor was not 2:4: the shares of `Σ|w|` and of `Σw²`.
    pub pruned: Option<(f64, f64)>,
}

/// What is to be done with a chosen matrix.
#[derive(Debug, Clone, Copy)]
pub struct CompressPlan {
    matrix: Matrix,
    action: Action,
}

#[derive(Debug, Clone, Copy)]
enum Action {
    /// It is 2:4 and has that many -0.0.
    Compress {
        negative_zeros: usize,
    },
    Prune,
}

impl Operation for Compress<'_> {
    type Plan = CompressPlan;
    type Change = MadeCompressed;

    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<Planned<CompressPlan>> {
        let tensor = match item {
            Item::Compressed(_) => return Ok(Planned::Copy(Kept::Compressed)),
            Item::Plain(tensor) => tensor,
        };
        let Some(matrix) = Matrix::of(tensor) else { return Ok(Planned::Copy(Kept::NotAMatrix)) };
        if !(self.which)(tensor) {
            return Ok(Planned::Copy(Kept::NotChosen));
        }
        let bands = Bands::of(reader, &tensor.name, matrix)?;
        let action = match match_element!(matrix.dtype, |T| self.inspect::<T>(&bands, matrix))? {
            Ok(action) => action,
            Err(kept) => return Ok(Planned::Copy(kept)),
        };
        plan.compressed(info(&tensor.name, matrix)?);
        Ok(Planned::Change(CompressPlan { matrix, action }))
    }

    fn write(
        &mut self,
        reader: &Reader,
        item: Item<'_>,
        CompressPlan { matrix, action }: CompressPlan,
        writer: &mut Writer,
    ) -> Result<MadeCompressed> {
        let bands = Bands::of(reader, item.name(), matrix)?;
        let rows = writer.rows_of(&info(item.name(), matrix)?)?;
        match_element!(matrix.dtype, |T| write::<T>(&bands, &rows, action))
    }
}

fn info(name: &str, matrix: Matrix) -> Result<CompressedInfo> {
    CompressedInfo::new(name, matrix.dtype, matrix.rows, matrix.cols)
}

/// What one row, or all of them, look like.
#[derive(Debug, Clone, Copy, Default)]
struct Census {
    violations: usize,
    negative_zeros: usize,
    not_finite: bool,
}

impl Census {
    fn of<T: Element>(band: MatrixRef<'_, T>) -> Self {
        let mut census = Census::default();
        for values in (0..band.rows()).flat_map(|row| band.row(row).chunks(4)) {
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

impl Compress<'_> {
    /// What is to be done with a chosen matrix, or why nothing is.
    fn inspect<T: Arithmetic>(&self, bands: &Bands<'_>, matrix: Matrix) -> Result<std::result::Result<Action, Kept>> {
        let mut census = Census::default();
        bands.each::<T, _>(1, |_, band| Ok(Census::of(band)), |band| census = census.and(band))?;
        match (census.violations, self.not_sparse) {
            (0, _) => {
                let count = census.negative_zeros;
                if count > 0 && self.negative_zeros == NegativeZeros::Refuse {
                    return Err(bands.named(Error::NegativeZeros { count }));
                }
                Ok(Ok(Action::Compress { negative_zeros: count }))
            }
            (_, NotSparse::Error) => {
                expect_sparse::<T>(bands, matrix)?;
                Ok(Ok(Action::Compress { negative_zeros: census.negative_zeros }))
            }
            (violations, NotSparse::KeepDense) => Ok(Err(Kept::NotSparse { violations })),
            (_, NotSparse::Prune) => {
                if census.not_finite {
                    bands.expect_finite()?;
                }
                Ok(Ok(Action::Prune))
            }
        }
    }
}

/// The error of a matrix that is not 2:4 along its rows: that it is along its columns, or the place of the first
/// violation.
fn expect_sparse<T: Arithmetic>(bands: &Bands<'_>, matrix: Matrix) -> Result<()> {
    let verify = |band: MatrixRef<'_, T>, axis| Mask::of_nonzeros(band).verify(Pattern::TWO_FOUR, axis);
    let mut along_columns = matrix.rows >= 4;
    let look = |_: usize, band: MatrixRef<'_, T>| Ok(verify(band, Axis::Column).is_ok());
    bands.each::<T, _>(4, look, |holds| along_columns &= holds)?;
    if along_columns {
        return Err(bands.named(Error::AlongColumns));
    }
    bands.each::<T, ()>(1, |_, band| verify(band, Axis::Row), |()| ())
}

/// Compresses and writes a matrix.
fn write<T: Arithmetic>(bands: &Bands<'_>, rows: &RowsPlace<'_>, action: Action) -> Result<MadeCompressed> {
    let put = |first_row: usize, weight: &Compressed<T>| {
        rows.write(first_row, &[bytemuck::cast_slice(weight.values()), bytemuck::cast_slice(weight.meta())])
    };
    let negative_zeros = match action {
        Action::Compress { negative_zeros } => negative_zeros,
        Action::Prune => {
            let rule = select::nm::magnitude_rule(Pattern::TWO_FOUR, Axis::Row);
            let mut total = Retained::default();
            let work = |first_row: usize, band: MatrixRef<'_, T>| {
                let (weight, retained) = select::band::compressed(band, &rule)?;
                put(first_row, &weight)?;
                Ok(retained)
            };
            bands.each::<T, _>(1, work, |retained| total = total.and(retained))?;
            let pruned = Some((total.l1(), total.l2()));
            return Ok(MadeCompressed { negative_zeros: total.kept_negative_zeros, pruned });
        }
    };
    bands.each::<T, ()>(1, |first_row, band| put(first_row, &Compressed::from_dense(band)?), |()| ())?;
    Ok(MadeCompressed { negative_zeros, pruned: None })
}
