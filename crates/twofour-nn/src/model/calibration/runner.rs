//! Where texts run through blocks: on the CPU, or in the memory of a device.

use std::{borrow::Cow, fmt};

use twofour::calibration::{CrossProducts, DenseSide, Statistic, StatisticKind};

use super::{BlockwiseCheckpoint, CheckpointBlock, Replace};
use crate::Result;

/// f32 values of a text in a runner's memory: hidden states, or an input of layers.
pub trait States: fmt::Debug + Sized + 'static {
    /// Some of the values, to be read.
    type View<'a>: Copy + fmt::Debug;

    /// How many there are.
    fn elements(&self) -> usize;

    /// All of them.
    fn view(&self) -> Self::View<'_>;

    /// How many values a view has.
    fn count(view: Self::View<'_>) -> usize;

    /// A copy of the first so many.
    ///
    /// # Errors
    /// Fewer values; those of the memory.
    fn first(&self, elements: usize) -> Result<Self>;

    /// The last so many of a view.
    ///
    /// # Errors
    /// Fewer values.
    fn last(view: Self::View<'_>, elements: usize) -> Result<Self::View<'_>>;
}

/// What is gathered of an input of layers, text by text.
pub trait Gathered<S: States>: fmt::Debug {
    /// Adds the inputs of some tokens, and what the stored model has for them, where that is asked for.
    ///
    /// # Errors
    /// Those of [`Statistic::add`] and of [`CrossProducts::add`]; those of a device.
    fn add(&mut self, x: S::View<'_>, beside: Option<S::View<'_>>) -> twofour::Result<()>;

    /// What was gathered.
    ///
    /// # Errors
    /// Sums that are not finite, where that was not found before; those of a device.
    fn finish(self) -> twofour::Result<(Statistic, Option<CrossProducts>)>;
}

/// What runs the blocks of a checkpoint: [`Host`], or a GPU.
pub trait Runner: fmt::Debug {
    /// Values in its memory.
    type States: States;

    /// What it gathers of inputs.
    type Gathered: Gathered<Self::States>;

    /// Moves values to its memory.
    ///
    /// # Errors
    /// Those of the memory.
    fn states(&self, values: Vec<f32>) -> Result<Self::States>;

    /// Values in host memory; waits for them.
    ///
    /// # Errors
    /// Those of the memory.
    fn to_host<'v>(&self, view: <Self::States as States>::View<'v>) -> Result<Cow<'v, [f32]>>;

    /// Reads a block, with the weights that `replace` returns in place of the stored ones.
    ///
    /// # Errors
    /// Those of [`BlockwiseCheckpoint::block`]; a block that it does not compute.
    fn block<'a>(
        &'a self,
        checkpoint: &'a dyn BlockwiseCheckpoint,
        index: usize,
        replace: Option<Replace<'_>>,
    ) -> Result<Box<dyn CheckpointBlock<Self::States> + 'a>>;

    /// No tokens yet, of an input of so many features and of what the stored model has beside it; none where nothing is
    /// to be gathered.
    ///
    /// # Errors
    /// Those of the memory.
    fn gather(
        &self,
        kind: StatisticKind,
        features: usize,
        beside: Option<DenseSide>,
    ) -> twofour::Result<Option<Self::Gathered>>;
}

/// The CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Host;

/// What is gathered on the CPU.
#[derive(Debug)]
pub struct HostGathered {
    statistic: Statistic,
    beside: Option<CrossProducts>,
}

impl States for Vec<f32> {
    type View<'a> = &'a [f32];

    fn elements(&self) -> usize {
        self.len()
    }

    fn view(&self) -> &[f32] {
        self
    }

    fn count(view: Self::View<'_>) -> usize {
        view.len()
    }

    fn first(&self, elements: usize) -> Result<Self> {
        Ok(self.get(..elements).ok_or_else(|| too_few(self.len(), elements))?.to_vec())
    }

    fn last(view: Self::View<'_>, elements: usize) -> Result<Self::View<'_>> {
        let first = view.len().checked_sub(elements).ok_or_else(|| too_few(view.len(), elements))?;
        Ok(&view[first..])
    }
}

fn too_few(found: usize, expected: usize) -> twofour::Error {
    twofour::Error::Length { what: "values of a text", expected, found }
}

impl Runner for Host {
    type States = Vec<f32>;
    type Gathered = HostGathered;

    fn states(&self, values: Vec<f32>) -> Result<Vec<f32>> {
        Ok(values)
    }

    fn to_host<'v>(&self, view: <Self::States as States>::View<'v>) -> Result<Cow<'v, [f32]>> {
        Ok(Cow::Borrowed(view))
    }

    fn block<'a>(
        &'a self,
        checkpoint: &'a dyn BlockwiseCheckpoint,
        index: usize,
        replace: Option<Replace<'_>>,
    ) -> Result<Box<dyn CheckpointBlock + 'a>> {
        checkpoint.block(index, replace)
    }

    fn gather(
        &self,
        kind: StatisticKind,
        features: usize,
        beside: Option<DenseSide>,
    ) -> twofour::Result<Option<HostGathered>> {
        let Some(statistic) = Statistic::new(kind, features)? else { return Ok(None) };
        let beside = beside.map(|side| CrossProducts::new(side, features)).transpose()?;
        Ok(Some(HostGathered { statistic, beside }))
    }
}

impl Gathered<Vec<f32>> for HostGathered {
    fn add(&mut self, x: &[f32], beside: Option<&[f32]>) -> twofour::Result<()> {
        self.statistic.add(x)?;
        match (&mut self.beside, beside) {
            (Some(products), Some(dense)) => products.add(dense, x),
            _ => Ok(()),
        }
    }

    fn finish(self) -> twofour::Result<(Statistic, Option<CrossProducts>)> {
        Ok((self.statistic, self.beside))
    }
}
