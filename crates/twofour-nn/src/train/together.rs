//! A trainer among others that train the same model.

use super::{
    Trainer, TrainingData,
    ranks::{Post, Seat},
};
use crate::{Error, Result, engine::Engine, model::ModelParts as _, parameter::Parameter};

/// Steps between two comparisons of the ranks' masks.
const COMPARED_EVERY: u64 = 100;

impl<E: Engine, D: TrainingData> Trainer<E, D> {
    /// The trainer as one of several ranks: it computes its share of each batch, and its updates are those of the whole
    /// batch. Losses, norms and masks are the same on all ranks. Waits until every rank has come here, and compares
    /// their masks and weights.
    ///
    /// # Errors
    /// A batch that is not divided evenly; [`Error::RanksDiffer`] for trainers that were made or resumed differently;
    /// [`Error::Rank`] where another rank has failed.
    pub fn take(mut self, seat: Seat<E>) -> Result<Self> {
        let seated = seat.share(self.settings.batch, self.settings.micro_batch).and_then(|_| {
            let offset = seat.seed_offset();
            self.model.linears_mut().try_for_each(|linear| linear.move_seed(offset))
        });
        self.seat = Some(seat);
        let compared = seated.and_then(|()| self.compare());
        self.told(compared)?;
        Ok(self)
    }

    /// Does the steps that rank 0 does, until its trainer is dropped.
    ///
    /// # Errors
    /// Those of [`Trainer::step`].
    pub fn follow(&mut self) -> Result<()> {
        loop {
            let step = self.progress.step;
            let Some(seat) = &self.seat else { return Ok(()) };
            let Some(posts) = seat.rank.exchange_or_end(Post::Step(step))? else { return Ok(()) };
            let begun = expect_step(&posts, step);
            self.told(begun)?;
            self.step_with_others()?;
        }
    }

    /// Waits until all ranks begin the step.
    pub(super) fn begin_with_others(&mut self) -> Result<()> {
        let step = self.progress.step;
        let Some(seat) = &self.seat else { return Ok(()) };
        let begun = seat.rank.exchange(Post::Step(step)).and_then(|posts| expect_step(&posts, step));
        self.told(begun)
    }

    /// Tells the other ranks of an error; returns the one that came first. What every rank finds in the same step is no
    /// failure of one of them: rank 0 tells of it, and returns it whichever rank found it first.
    pub(super) fn told<T>(&self, outcome: Result<T>) -> Result<T> {
        if let (Err(error), Some(seat)) = (&outcome, &self.seat) {
            let is_common = matches!(error, Error::Diverged { .. } | Error::RanksDiffer { .. });
            if is_common && seat.rank.index() != 0 {
                return outcome;
            }
            seat.rank.check()?;
            seat.rank.fail(error.to_string());
        }
        outcome
    }

    /// Compares masks and weights with those of the other ranks, where it is time to, or whenever layers `changed`
    /// their form.
    pub(super) fn compare_if_due(&mut self, changed: bool) -> Result<()> {
        // After the first step too: a gradient that was not summed shows there.
        let is_due = changed || self.progress.step == 1 || self.progress.step.is_multiple_of(COMPARED_EVERY);
        if self.seat.is_some() && is_due { self.compare() } else { Ok(()) }
    }

    /// Compares the hashes of masks, and the norm of all weights, with those of the other ranks.
    fn compare(&mut self) -> Result<()> {
        let masked: Vec<_> = self.model.linears().filter(|linear| linear.has_mask()).collect();
        let hashes = masked.iter().filter_map(|linear| linear.mask_hash().transpose());
        let mut own = hashes.collect::<Result<Vec<u64>>>()?;
        let masters: Vec<&E::Buffer> = self.model.parameters().into_iter().map(Parameter::master).collect();
        own.push(self.engine.gradient_norm(&masters)?.to_bits());
        own.push(self.progress.step);
        let Some(seat) = &self.seat else { return Ok(()) };
        let posts = seat.rank.exchange(Post::Words(own.clone()))?;
        for (rank, post) in posts.iter().enumerate() {
            let words = match post {
                Post::Words(words) => words.as_slice(),
                _ => &[],
            };
            let differs = (0..own.len().max(words.len())).find(|&index| own.get(index) != words.get(index));
            let Some(index) = differs else { continue };
            let what = match masked.get(index) {
                Some(linear) => format!("the mask of layer `{}`", linear.name()),
                None => "the weights".to_owned(),
            };
            return Err(Error::RanksDiffer { what, step: self.progress.step, ranks: [seat.rank.index(), rank] });
        }
        Ok(())
    }
}

/// An error unless all ranks are at a step.
fn expect_step(posts: &[Post], step: u64) -> Result<()> {
    match posts.iter().position(|post| *post != Post::Step(step)) {
        None => Ok(()),
        Some(rank) => Err(Error::Rank { rank, reason: format!("it is at another step than {step}") }),
    }
}
