//! Data parallel training: several trainers of one model, each with its own engine and its share of every batch.
//!
//! | item | |
//! |---|---|
//! | [`train_together`] | runs a trainer as rank 0, and the others in threads of this process |
//! | [`Seat`], [`Trainer::take`] | a rank's place among the others, and a trainer that takes it |
//! | [`GradientReduction`] | sums gradients over ranks while the backward pass runs |
//! | [`HostReduction`], `NcclReduction` | those of the CPU and of GPUs |
//!
//! Rank 0 decides: the others do the steps that it does, and nothing else, so that it alone validates and writes files.
//! A rank that fails, by an error or a panic, stops the others: host waits end at once, and device waits by an abort of
//! the sums.

mod group;
mod host;
#[cfg(feature = "cuda")]
mod nccl;
mod reduction;

use std::{
    fmt::Display,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

pub(super) use group::Post;
pub use group::Rank;
pub use host::HostReduction;
#[cfg(feature = "cuda")]
pub use nccl::NcclReduction;
pub use reduction::GradientReduction;

use super::{Trainer, TrainingData};
use crate::{Error, Result, engine::Engine};

/// How long the end of a run waits for the threads of the other ranks.
const END_PATIENCE: Duration = Duration::from_secs(30);

/// Seeds of ranks are so far apart.
const SEED_DISTANCE: u64 = 1 << 40;

/// A rank's place among the others, with the sums of its gradients.
#[derive(Debug)]
pub struct Seat<E: Engine> {
    pub(super) reduction: Box<dyn GradientReduction<E>>,
    pub(super) rank: Rank,
}

impl<E: Engine> Seat<E> {
    /// The places of a group of ranks, with these sums.
    pub fn group(reductions: Vec<Box<dyn GradientReduction<E>>>) -> Vec<Self> {
        let ranks = Rank::group(reductions.len());
        let seat = |(reduction, rank): (Box<dyn GradientReduction<E>>, Rank)| {
            if let Some(abort) = reduction.abort_handle() {
                rank.on_failure(abort);
            }
            Seat { reduction, rank }
        };
        reductions.into_iter().zip(ranks).map(seat).collect()
    }

    /// The rank.
    pub fn rank(&self) -> &Rank {
        &self.rank
    }

    /// Sums gradients and a loss over all ranks, which call it with buffers of the same lengths.
    ///
    /// # Errors
    /// [`Error::Rank`] where another rank has failed; those of the device.
    pub fn sum(&mut self, gradients: Vec<&mut E::Buffer>, loss: &mut E::Buffer) -> Result<()> {
        self.reduction.ready(&self.rank, gradients)?;
        self.reduction.finish(&self.rank, loss)
    }

    /// An error once a rank has failed: sums since then are worth nothing.
    ///
    /// # Errors
    /// [`Error::Rank`].
    pub fn check(&self) -> Result<()> {
        self.rank.check()
    }

    /// Stops all ranks, because this one cannot go on for that reason. The first failure counts.
    pub fn fail(&self, reason: &str) {
        self.rank.fail(reason.to_owned());
    }

    /// What is added to seeds of random estimates, so that ranks draw different numbers.
    pub(super) fn seed_offset(&self) -> u64 {
        (self.rank.index() as u64).wrapping_mul(SEED_DISTANCE)
    }

    /// Sequences of this rank in a batch.
    ///
    /// # Errors
    /// [`Error::Setting`] for a batch that is not divided evenly.
    pub(super) fn share(&self, batch: usize, micro_batch: Option<usize>) -> Result<usize> {
        let ranks = self.rank.count();
        if !batch.is_multiple_of(ranks) {
            let found = format!("{batch} for {ranks} ranks");
            return Err(Error::Setting { what: "batch", found, expected: "a multiple of the number of ranks" });
        }
        let share = batch / ranks;
        match micro_batch.filter(|micro| *micro < share && !share.is_multiple_of(*micro)) {
            None => Ok(share),
            Some(micro) => {
                let found = format!("{micro} for {share} sequences of each of {ranks} ranks");
                Err(Error::Setting { what: "micro_batch", found, expected: "a divisor of a rank's sequences" })
            }
        }
    }
}

/// What makes a rank's trainer with its engine.
pub type MakeTrainer<E, D, X> = dyn Fn(E) -> Result<Trainer<E, D>, X> + Send + Sync;

/// Trains with several engines at once. `make` makes each rank's trainer, the same but for the engine, where it begins:
/// new, or resumed from the same checkpoint. `lead` makes that of rank 0 itself, takes the seat with [`Trainer::take`],
/// and trains; the other ranks follow in threads of their own until its trainer is dropped.
///
/// ```
/// use std::sync::Arc;
/// use twofour_nn::{recipe::*, train::{Corpus, SparsityPlan, Trainer, ranks::*}};
/// use twofour_transformer::engine::cpu::CpuEngine;
/// let corpus = Arc::new(Corpus::new(b"two of every four ".repeat(100), 0.1)?);
/// let kind = ModelKind::Gpt;
/// let model = ModelSettings {
///     kind,
///     layers: 1,
///     width: 16,
///     heads: 2,
///     context: 16,
///     feed_forward: Some(32),
///     ..Default::default()
/// };
/// let training = TrainingSettings { steps: 5, batch: 4, warm_up: 1, ..Default::default() };
/// let make = Arc::new(move |engine| Trainer::new(engine, &model, &training, SparsityPlan::dense(), corpus.clone()));
/// let member = |_| Ok((CpuEngine, Box::new(HostReduction::new(1)?) as _));
/// let members = (0..2).map(member).collect::<twofour_nn::Result<_>>()?;
/// let loss = train_together(members, make.clone(), |engine, seat| {
///     let mut trainer = make(engine)?.take(seat)?;
///     (0..5).try_for_each(|_| trainer.step().map(drop))?;
///     trainer.validate(4)
/// })?;
/// assert!(loss < 5.6);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
///
/// # Errors
/// No members; threads that the system does not start; what `lead` returns otherwise, [`Error::Rank`] among it for a
/// failure of another rank.
pub fn train_together<E, D, R, X, Y>(
    members: Vec<(E, Box<dyn GradientReduction<E>>)>,
    make: Arc<MakeTrainer<E, D, X>>,
    lead: impl FnOnce(E, Seat<E>) -> Result<R, Y>,
) -> Result<R, Y>
where
    E: Engine + 'static,
    D: TrainingData + 'static,
    X: Display + From<Error> + 'static,
    Y: From<Error>,
{
    let (engines, reductions): (Vec<E>, Vec<_>) = members.into_iter().unzip();
    let mut seats = engines.into_iter().zip(Seat::group(reductions));
    let Some((engine, seat)) = seats.next() else {
        let found = "none".to_owned();
        return Err(Error::Setting { what: "engines to train with", found, expected: "at least one" }.into());
    };
    let followers: Vec<_> = seats
        .map(|(engine, seat)| {
            let make = make.clone();
            let started = thread::Builder::new().spawn(move || follow(engine, seat, &*make));
            started.map_err(|error| Error::Unsupported {
                engine: "ranks",
                what: format!("a thread for each: {error}"),
                remedy: "use fewer ranks, or raise the limit of processes or of memory",
            })
        })
        .collect::<Result<_>>()?;
    let outcome = lead(engine, seat);
    let begun = Instant::now();
    // Rank 0 is gone, and the others end; one that a device does not let go is left behind.
    while followers.iter().any(|thread| !thread.is_finished()) && begun.elapsed() < END_PATIENCE {
        thread::sleep(Duration::from_millis(2));
    }
    outcome
}

/// A rank other than 0, from its trainer to the end.
fn follow<E: Engine, D: TrainingData, X: Display + From<Error>>(
    engine: E,
    seat: Seat<E>,
    make: &dyn Fn(E) -> Result<Trainer<E, D>, X>,
) {
    match make(engine) {
        // The trainer has told the others of its own failures.
        Ok(trainer) => drop(trainer.take(seat).and_then(|mut trainer| trainer.follow())),
        Err(error) => seat.rank.fail(format!("{error:#}")),
    }
}
