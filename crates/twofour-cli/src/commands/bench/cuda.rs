//! `twofour bench cuda`.

use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::output::Output;
use crate::{
    exit::Verdict,
    measure::cuda::{self, Gpu, PruneRow},
    present::{
        Screen,
        table::{Align, Table},
        units,
    },
};

/// Measure the kernels of a GPU
///
/// Device time by events, contenders by turns, random weights, and the second-level cache flushed before each run; medians count.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour bench cuda --suite prune
  twofour bench cuda --suite prune --rounds 100 -o prune.json

Suites:
  prune   choosing a transposable mask and compressing W and its transpose from one read, beside a plain copy of as many bytes")]
pub(super) struct Cuda {
    /// What to measure
    #[arg(long, value_enum, value_name = "SUITE", default_value_t = Suite::Prune)]
    suite: Suite,

    /// Number of the device
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    device: usize,

    /// Runs of each contender that count
    #[arg(long, default_value_t = 30, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(5..=10_000))]
    rounds: u32,

    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// Prune and compress both ways
    Prune,
}

/// The answer; `bench/readme_tables.py` reads its JSON.
#[derive(Debug, Serialize)]
struct Answer {
    machine: Gpu,
    command: String,
    rows: Vec<PruneRow>,
}

impl Cuda {
    /// Runs the command.
    pub(super) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        self.output.expect_writable()?;
        let device = twofour_cuda::Device::open(self.device)?;
        let mut answer = Answer { machine: cuda::gpu(&device)?, command: self.told(), rows: Vec::new() };
        let mut progress = screen.progress();
        match self.suite {
            Suite::Prune => {
                let works = cuda::PRUNE_SHAPES;
                for (done, shape) in works.into_iter().enumerate() {
                    progress.steps(&format!("prune [{}, {}]", shape.0, shape.1), done as u64, works.len() as u64);
                    answer.rows.extend(cuda::prune(&device, shape, self.rounds)?);
                }
            }
        }
        drop(progress);
        answer.tell(screen)?;
        screen.json(&answer)?;
        self.output.write(&answer)?;
        Ok(Verdict::Yes)
    }

    /// The command as one would type it again.
    fn told(&self) -> String {
        let suite = match self.suite {
            Suite::Prune => "prune",
        };
        format!("twofour bench cuda --suite {suite} --device {} --rounds {}", self.device, self.rounds)
    }
}

impl Answer {
    fn tell(&self, screen: &mut Screen) -> Result<()> {
        let Gpu { gpu, architecture, .. } = &self.machine;
        screen.line(format!("{gpu}, {architecture}\n"))?;
        let mut table = Table::new([
            ("weight", Align::Left),
            ("dtype", Align::Left),
            ("contender", Align::Left),
            ("kernel", Align::Left),
            ("time", Align::Right),
            ("TB/s", Align::Right),
        ]);
        for row in &self.rows {
            table.row([
                format!("[{}, {}]", row.shape[0], row.shape[1]),
                row.dtype.into(),
                row.contender.into(),
                row.kernel.into(),
                units::time(Duration::from_secs_f64(row.us * 1e-6)),
                format!("{:.2}", row.gb_per_s / 1e3),
            ]);
        }
        screen.line(table)?;
        screen.line("\nMedians. TB/s: of the bytes that must be read and written, whatever the kernel does.")
    }
}
