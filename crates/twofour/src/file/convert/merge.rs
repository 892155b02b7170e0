//! From weights and an adapter to the weights of both.

use std::collections::BTreeMap;

use rayon::prelude::*;

use super::{Item, Kept, Matrix, Operation, Plan, Planned, Reader, ValueFormat, Writer, named};
use crate::{
    Arithmetic, Compressed, DataType, Error, Mask, MatrixRef, Result,
    file::adapter::{Adapter, Update, UpdateKind},
    first_error::first_error,
    match_element, memory,
    role::{Layout, Roles},
};

/// Writes a model with the updates of an [`Adapter`] added to its weights.
///
/// A weight that is compressed, or of which at least a fifth of the elements are zero, keeps its zeros: the update is
/// added to the elements that it has, and the rest of the update is lost. [`Merged::lost`] tells how much that is. With
/// LoRS and SPP, whose updates have the weight's zeros, every weight keeps them and nothing is lost.
///
/// # Errors
/// [`Error::Format`] for an adapter of another model, [`Error::Shape`] for an update of another shape,
/// [`Error::Format`] for a weight of integers or of more dimensions, [`Error::Infinite`] for a sum beyond the weight's
/// dtype, with tensor, row and column.
///
/// ```no_run
/// use twofour::file::{Adapter, Convert, Merge, Reader};
/// let reader = Reader::open("pruned/")?;
/// let adapter = Adapter::open("adapter/")?;
/// let merge = Merge::new(&adapter, &reader)?;
/// let report = Convert::new(reader).run("merged/", merge)?;
/// for (tensor, merged) in report.changed() {
///     println!("{}: {:.1} % of the update is lost", tensor.name, merged.lost * 100.0);
/// }
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug)]
pub struct Merge<'a> {
    adapter: &'a Adapter,
    /// The adapter's modules, by the name of the weight that they change.
    modules: BTreeMap<String, String>,
    roles: Roles,
}

/// What became of a weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Merged {
    /// How the adapter changes it.
    pub kind: UpdateKind,
    /// Whether its zeros were kept.
    pub keeps_zeros: bool,
    /// The norm of the whole update by that of the weight, `‖Δ‖ / ‖W‖`.
    pub update: f64,
    /// The norm of what the weight's zeros lose of the update by that of the update, `‖(1 - m) ⊙ Δ‖ / ‖Δ‖`.
    pub lost: f64,
}

impl<'a> Merge<'a> {
    /// The merging of an adapter into a model.
    ///
    /// # Errors
    /// [`Error::Format`] where the adapter changes a weight that the model does not have; those of
    /// [`Roles::of_model`].
    pub fn new(adapter: &'a Adapter, model: &Reader) -> Result<Self> {
        let compressed = model.compressed_weights().map(|weight| weight.name.as_str());
        let names: Vec<&str> = model.plain_tensors().map(|tensor| tensor.name.as_str()).chain(compressed).collect();
        let modules = adapter.weights(&names)?;
        let modules = modules.into_iter().map(|(name, module)| (name.to_owned(), module.to_owned())).collect();
        Ok(Merge { adapter, modules, roles: Roles::of_model(model)? })
    }
}

/// What is to be done with a weight.
#[derive(Debug, Clone, Copy)]
pub struct MergePlan {
    dtype: DataType,
    shape: [usize; 2],
    layout: Layout,
}

impl Operation for Merge<'_> {
    type Plan = MergePlan;
    type Change = Merged;

    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<Planned<MergePlan>> {
        let Some(module) = self.modules.get(item.name()) else { return Ok(Planned::Copy(Kept::NotChosen)) };
        let fault = |reason: &str| Error::Format {
            path: reader.path_of(item.name()).to_owned(),
            reason: format!("tensor `{}` is {reason}, which an adapter is not merged into", item.name()),
        };
        let (dtype, shape) = match item {
            Item::Plain(tensor) => match Matrix::of(tensor) {
                Some(matrix) if matrix.dtype != DataType::I8 => (matrix.dtype, [matrix.rows, matrix.cols]),
                Some(_) => return Err(fault("of integers")),
                None => return Err(fault("no matrix of floats")),
            },
            Item::Compressed(weight) => match weight.format {
                ValueFormat::Plain(dtype) if dtype != DataType::I8 => (dtype, [weight.rows, weight.cols]),
                _ => return Err(fault("of integers")),
            },
        };
        let layout = self.roles.layout(item.name(), &shape).unwrap_or_default();
        if let Some((kind, [out, inputs])) = self.adapter.of(module) {
            let [rows, cols] = layout.features(shape);
            if [out, inputs] != [rows, cols] {
                let error = Error::Shape { what: "update and weight", expected: (rows, cols), found: (out, inputs) };
                return Err(named(reader, item.name(), error));
            }
            if kind == UpdateKind::Spp && layout == Layout::InOut {
                return Err(fault("stored [in_features, out_features], and SPP's rows are outputs: a weight"));
            }
        }
        item.plan_copy(plan);
        Ok(Planned::Change(MergePlan { dtype, shape, layout }))
    }

    fn write(&mut self, reader: &Reader, item: Item<'_>, planned: MergePlan, writer: &mut Writer) -> Result<Merged> {
        let module = self.modules.get(item.name()).map_or("", String::as_str);
        let Some(update) = self.adapter.update(module)? else {
            return Err(Error::NoParameter { name: module.to_owned() });
        };
        let outcome = match_element!(planned.dtype, |T| merge::<T>(reader, item, planned, &update, writer));
        outcome.map_err(|error| named(reader, item.name(), error))
    }
}

/// The share of zeros from which on a weight keeps them.
const SPARSE: f64 = 0.2;

fn merge<T: Arithmetic>(
    reader: &Reader,
    item: Item<'_>,
    MergePlan { shape: [rows, cols], layout, .. }: MergePlan,
    update: &Update,
    writer: &mut Writer,
) -> Result<Merged> {
    let factors = Factors::of(update, layout, [rows, cols])?;
    let (dense, mask) = match item {
        Item::Plain(tensor) => {
            let dense = reader.tensor(&tensor.name)?.to_vec::<T>()?;
            let mask = Mask::of_nonzeros(MatrixRef::new(rows, cols, &dense)?);
            let is_sparse = mask.density() <= 1.0 - SPARSE || update.kind == UpdateKind::LoRS;
            (dense, if is_sparse { Some(mask) } else { None })
        }
        Item::Compressed(weight) => {
            let compressed = reader.compressed::<T>(&weight.name)?;
            (compressed.to_dense(), Some(compressed.mask()))
        }
    };
    let matrix = MatrixRef::new(rows, cols, &dense)?;
    matrix.expect_finite()?;
    let mut merged = memory::zeroed::<T>(rows * cols)?;
    let mut sums = vec![Sums::default(); rows];
    first_error(merged.par_chunks_mut(cols).zip(&mut sums).enumerate(), |(row, (out, sums))| {
        let (weight, mut change) = (matrix.row(row), vec![0f32; cols]);
        factors.add(row, weight, &mut change);
        if let Some(mask) = mask.as_ref().filter(|_| update.kind == UpdateKind::LoRS) {
            let pruned = change.iter_mut().enumerate().filter(|(col, _)| !mask.is_kept(row, *col));
            pruned.for_each(|(_, change)| *change = 0.0);
        }
        for (col, ((out, weight), change)) in out.iter_mut().zip(weight).zip(&change).enumerate() {
            let weight = weight.to_f32();
            let square = f64::from(*change).powi(2);
            sums.weight += f64::from(weight).powi(2);
            sums.update += square;
            if mask.as_ref().is_some_and(|mask| !mask.is_kept(row, col)) {
                sums.lost += square;
                continue;
            }
            *out = T::from_f32(weight + change);
            if !out.to_f32().is_finite() {
                return Err(Error::Infinite { row, col });
            }
        }
        Ok(())
    })?;
    match (item, &mask) {
        (Item::Compressed(weight), Some(mask)) => {
            let compressed = Compressed::from_masked(MatrixRef::new(rows, cols, &merged)?, mask)?;
            writer.write_compressed(&weight.name, &compressed)?;
        }
        _ => writer.write_elements(item.name(), &merged)?,
    }
    let total = |of: fn(&Sums) -> f64| sums.iter().map(of).sum::<f64>();
    let share = |part: f64, whole: f64| if whole > 0.0 { (part / whole).sqrt() } else { 0.0 };
    Ok(Merged {
        kind: update.kind,
        keeps_zeros: mask.is_some(),
        update: share(total(|sums| sums.update), total(|sums| sums.weight)),
        lost: share(total(|sums| sums.lost), total(|sums| sums.update)),
    })
}

/// Sums of squares of a row.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    weight: f64,
    update: f64,
    lost: f64,
}

/// An update in the order of the stored weight.
enum Factors<'a> {
    /// `left · right`, of `[rows, rank]` and `[rank, cols]`.
    Product { left: Vec<f32>, right: Vec<f32>, rank: usize, scale: f32 },
    /// Of each row of a weight `[out, in]` the factors of its columns, which `repeated` rows share, and its own.
    Elements { columns: &'a [f32], rows: &'a [f32], repeated: usize, scale: f32 },
}

impl<'a> Factors<'a> {
    fn of(update: &'a Update, layout: Layout, [rows, cols]: [usize; 2]) -> Result<Self> {
        let &Update { kind, ref a, ref b, rank, scale } = update;
        Ok(match (kind, layout) {
            (UpdateKind::Spp, _) => Factors::Elements { columns: a, rows: b, repeated: (rows / rank).max(1), scale },
            (UpdateKind::LoRA | UpdateKind::LoRS, Layout::InOut) => {
                let left = MatrixRef::new(rank, rows, a)?.transposed();
                Factors::Product { left, right: MatrixRef::new(cols, rank, b)?.transposed(), rank, scale }
            }
            (UpdateKind::LoRA | UpdateKind::LoRS, _) => {
                Factors::Product { left: b.clone(), right: a.clone(), rank, scale }
            }
        })
    }

    /// Writes the change of a row.
    fn add<T: Arithmetic>(&self, row: usize, weight: &[T], change: &mut [f32]) {
        let cols = change.len();
        match *self {
            Factors::Product { ref left, ref right, rank, scale } => {
                for (factor, right) in left[row * rank..][..rank].iter().zip(right.chunks(cols)) {
                    change.iter_mut().zip(right).for_each(|(change, right)| *change += factor * right);
                }
                change.iter_mut().for_each(|change| *change *= scale);
            }
            Factors::Elements { columns, rows, repeated, scale } => {
                let columns = &columns[row / repeated * cols..][..cols];
                for ((change, weight), column) in change.iter_mut().zip(weight).zip(columns) {
                    *change = column * rows[row] * weight.to_f32() * scale;
                }
            }
        }
    }
}
