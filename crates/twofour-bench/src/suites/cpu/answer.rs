//! The results of the suite `cpu`, as JSON and as a table.

use anyhow::Result;
use serde::Serialize;

use twofour_cli::{
    measure::{self, Machine, Outcome, ReadBandwidth, Row, Who},
    present::{
        Screen,
        style::{self, paint},
        table::Table,
        units,
    },
};

use crate::load::warn_if_busy;

/// The answer; `bench/tables/readme_tables.py` reads its JSON.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    machine: Machine,
    command: String,
    /// Over the minute before the measurement; null where the operating system does not tell.
    load_average: Option<f64>,
    /// One for each number of threads.
    pub(super) read_bandwidth: Vec<ReadBandwidth>,
    pub(super) rows: Vec<Row>,
}

impl Answer {
    /// Nothing measured yet.
    pub(super) fn new(command: String, threads: usize) -> Result<Self> {
        let machine = Machine { threads, ..measure::machine()? };
        let load_average = measure::load_average();
        Ok(Answer { machine, command, load_average, read_bandwidth: Vec::new(), rows: Vec::new() })
    }

    /// Prints the table.
    pub(super) fn tell(&self, screen: &mut Screen) -> Result<()> {
        let Machine { cpu, engine, .. } = &self.machine;
        screen.line(format!("{cpu}, engine {engine}"))?;
        for ReadBandwidth { threads, gb_per_s, variant, .. } in &self.read_bandwidth {
            let with = units::plural(*threads, "thread");
            screen.line(format!("read bandwidth, {with}: {gb_per_s:.1} GB/s ({variant})"))?;
        }
        warn_if_busy(screen, self.load_average, &self.machine)?;
        screen.line("")?;
        let mut table = Table::of(
            ["work"],
            ["threads", "2:4", "dense", "gemm", "speed-up", "limit", "of limit", "dense reads", "over f32", "over i8"],
        );
        for rows in self.rows.chunk_by(|a, b| a.what() == b.what() && a.threads == b.threads) {
            if let Some(outcome) = Outcome::of(rows) {
                table.row(cells(rows, outcome));
            }
        }
        screen.line(table)?;
        screen.line(paint(
            style::FAINT,
            "\nMedians. Speed-up: the fastest dense baseline's time divided by that of 2:4. Limit: bytes of the dense \
             weight divided by those of 2:4.\n\
             Dense reads: this project's dense kernel's share of the read bandwidth in the same rounds.\n\
             Over f32, over i8: the time of the 2:4 GEMM in f32, or in i8, divided by that in this dtype.",
        ))
    }
}

fn cells(rows: &[Row], outcome: Outcome<'_>) -> Vec<String> {
    let Outcome { sparse, best_dense } = outcome;
    let of = |who: Who| rows.iter().find(|row| row.contender == who);
    let time = |who: Who| match of(who) {
        Some(row) => {
            let time = units::microseconds(row.median_us);
            if row.contender == best_dense.contender { paint(style::STRONG, time) } else { time }
        }
        None => String::new(),
    };
    let speed_up = outcome.speed_up();
    let good = if speed_up > 1.0 { style::GOOD } else { style::BAD };
    let mut cells = vec![sparse.what().to_string(), sparse.threads.to_string()];
    cells.extend([Who::Sparse, Who::Dense, Who::Gemm].map(time));
    cells.push(paint(good, units::factor(speed_up)));
    // The bytes are no limit where the GEMM is compute-bound.
    cells.extend(match of(Who::Dense).and_then(|dense| dense.read_share) {
        Some(read) => {
            [units::factor(sparse.byte_limit), units::percent(speed_up / sparse.byte_limit), units::percent(read)]
        }
        None => Default::default(),
    });
    for who in [Who::SparseF32, Who::SparseI8] {
        cells.push(of(who).map_or_else(String::new, |other| units::factor(other.median_us / sparse.median_us)));
    }
    cells
}
