//! From dense weights to dense weights with zeros.

use std::{fmt, path::Path};

use super::{
    Convert, Item, Kept, Matrix, Operation, Plan, Planned, Reader, Report, TensorInfo, Writer,
    pieces::{self, Bands},
};
use crate::{
    Axis, Result, Selector,
    mask::Retained,
    match_element,
    role::{Layout, Roles},
};

/// Writes the chosen weights pruned: dense, with +0.0 in the place of every element that is dropped.
///
/// # Errors
/// [`crate::Error::NotANumber`] or [`crate::Error::Infinite`], with tensor, row and column, where a chosen tensor is
/// not finite, before anything is written.
pub struct Prune<F> {
    choose: F,
}

impl<F: FnMut(&TensorInfo) -> Option<Selector>> Prune<F> {
    /// `choose` is asked once for every tensor of two to five dimensions with elements of a dtype that twofour knows;
    /// `None` keeps it as it is. A tensor of more than two dimensions is a convolution's weight, where the selector's
    /// axes are those of its [`Kernel`](crate::role::Kernel)'s matrix, or a stack of matrices, such as experts, each of
    /// which is pruned.
    pub fn new(choose: F) -> Self {
        Prune { choose }
    }
}

impl<F> fmt::Debug for Prune<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prune").finish_non_exhaustive()
    }
}

/// A tensor that was pruned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pruned {
    /// How the mask was chosen, where a selector chose it.
    pub selector: Option<Selector>,
    /// The share of elements that were not zero before.
    pub density_before: f64,
    /// The share of elements that the mask keeps.
    pub density: f64,
    /// The share of `Σ|w|` of the input in the places that are kept.
    pub kept_l1: f64,
    /// The share of `Σw²` of the input in the places that are kept.
    pub kept_l2: f64,
    /// Whether kept weights were adjusted.
    pub adjusted: bool,
}

impl Pruned {
    pub(super) fn new(retained: &Retained, selector: Option<Selector>, adjusted: bool) -> Self {
        Pruned {
            selector,
            density_before: retained.density_before(),
            density: retained.density(),
            kept_l1: retained.l1(),
            kept_l2: retained.l2(),
            adjusted,
        }
    }
}

/// Writes a model with the weights of its linear layers and convolutions pruned, along the axis that each layer sums,
/// as `twofour prune` does; [`Roles`] tells which those are. An axis of the selector is the one of a weight
/// `[out, in]`; of a weight that is stored as `[in, out]` it is the other one.
///
/// ```no_run
/// use twofour::{Selector, file};
/// file::prune("model/", "pruned/", Selector::TWO_FOUR)?;
/// # Ok::<(), twofour::Error>(())
/// ```
///
/// # Errors
/// Those of [`Prune`] and of [`Convert::run`]. An existing output is an error.
pub fn prune(input: impl AsRef<Path>, output: impl AsRef<Path>, selector: Selector) -> Result<Report<Pruned>> {
    let reader = Reader::open(input)?;
    let roles = Roles::of_model(&reader)?;
    let choose = move |tensor: &TensorInfo| {
        let is_chosen = roles.of(&tensor.name, &tensor.shape).is_worth_pruning();
        let layout = roles.layout(&tensor.name, &tensor.shape).filter(|_| is_chosen)?;
        Some(stored_as(selector, layout))
    };
    Convert::new(reader).run(output, Prune::new(choose))
}

/// The selector of a weight `[out, in]` for one that is stored so.
fn stored_as(selector: Selector, layout: Layout) -> Selector {
    let other = |axis| if axis == Axis::Row { Axis::Column } else { Axis::Row };
    match (selector, layout) {
        (Selector::Magnitude { pattern, axis }, Layout::InOut) => Selector::Magnitude { pattern, axis: other(axis) },
        (Selector::Pattern { sparsity, axis }, Layout::InOut) => Selector::Pattern { sparsity, axis: other(axis) },
        (selector, _) => selector,
    }
}

/// What is to be done with a tensor that is pruned.
#[derive(Debug, Clone, Copy)]
pub struct PrunePlan {
    matrix: Matrix,
    selector: Selector,
}

impl<F: FnMut(&TensorInfo) -> Option<Selector>> Operation for Prune<F> {
    type Plan = PrunePlan;
    type Change = Pruned;

    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<Planned<PrunePlan>> {
        let (tensor, matrix) = match item {
            Item::Compressed(_) => return Ok(Planned::Copy(Kept::Compressed)),
            Item::Plain(tensor) => match Matrix::of_weight(tensor) {
                Some(matrix) => (tensor, matrix),
                None => return Ok(Planned::Copy(Kept::NotAMatrix)),
            },
        };
        let Some(selector) = (self.choose)(tensor) else { return Ok(Planned::Copy(Kept::NotChosen)) };
        Bands::of(reader, &tensor.name, matrix)?.expect_finite()?;
        item.plan_copy(plan);
        Ok(Planned::Change(PrunePlan { matrix, selector }))
    }

    fn write(
        &mut self,
        reader: &Reader,
        item: Item<'_>,
        PrunePlan { matrix, selector }: PrunePlan,
        writer: &mut Writer,
    ) -> Result<Pruned> {
        let bands = Bands::of(reader, item.name(), matrix)?;
        let retained = match_element!(matrix.dtype, |T| pieces::prune::<T>(&bands, writer, selector))?;
        Ok(Pruned::new(&retained, Some(selector), false))
    }
}

/// A piece that can be pruned, or why it is not.
pub(super) fn dense_matrix(item: Item<'_>) -> std::result::Result<(&TensorInfo, Matrix), Kept> {
    match item {
        Item::Compressed(_) => Err(Kept::Compressed),
        Item::Plain(tensor) => Ok((tensor, Matrix::of(tensor).ok_or(Kept::NotAMatrix)?)),
    }
}
