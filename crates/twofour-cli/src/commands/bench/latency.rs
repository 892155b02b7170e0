//! `twofour bench cpu --suite latency`.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::{answer::warn_if_busy, output::Output};
use crate::{
    exit::Verdict,
    measure::{self, Between, Latencies, LatencyRow, Machine, Shape, Work},
    present::{
        Screen,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
    weight_format::WeightFormat,
};

/// Layers from 0.1 to 50 million elements.
pub(super) const SHAPES: [Shape; 8] = [
    Shape { out: 256, inputs: 384 },
    Shape { out: 512, inputs: 512 },
    Shape { out: 1536, inputs: 384 },
    Shape { out: 768, inputs: 768 },
    Shape { out: 1024, inputs: 1024 },
    Shape { out: 3072, inputs: 768 },
    Shape { out: 4096, inputs: 4096 },
    Shape { out: 4096, inputs: 12288 },
];

/// The answer.
#[derive(Debug, Serialize)]
struct Answer {
    machine: Machine,
    command: String,
    /// Over the minute before the measurement; null where the operating system does not tell.
    load_average: Option<f64>,
    rows: Vec<LatencyRow>,
}

/// Measures, and shows and writes what was found.
pub(super) fn run(
    works: &[Work],
    threads: usize,
    budget: Duration,
    command: String,
    output: &Output,
    screen: &mut Screen,
) -> Result<Verdict> {
    let machine = Machine { threads, ..measure::machine()? };
    let mut answer = Answer { machine, command, load_average: measure::load_average(), rows: Vec::new() };
    let latencies = Latencies::new(threads)?;
    let mut progress = screen.progress();
    for (done, &work) in works.iter().enumerate() {
        progress.steps(&work.to_string(), done as u64, works.len() as u64);
        for between in Between::ALL {
            let rows = latencies.measure(work, between, budget)?;
            tracing::info!(?rows, "measured");
            answer.rows.extend(rows);
        }
    }
    drop(progress);
    answer.tell(screen)?;
    screen.json(&answer)?;
    output.write(&answer)?;
    Ok(Verdict::Yes)
}

impl Answer {
    fn tell(&self, screen: &mut Screen) -> Result<()> {
        let Machine { cpu, engine, threads, .. } = &self.machine;
        screen.line(format!("{cpu}, engine {engine}, one thread and {threads}"))?;
        warn_if_busy(screen, self.load_average, &self.machine)?;
        screen.line("")?;
        let mut table = Table::new([
            ("layer", Align::Left),
            ("calls", Align::Left),
            ("p50", Align::Right),
            ("p90", Align::Right),
            ("p99", Align::Right),
            ("p50", Align::Right),
            ("p90", Align::Right),
            ("p99", Align::Right),
            ("p50", Align::Right),
            ("p90", Align::Right),
            ("p99", Align::Right),
        ]);
        for pair in self.rows.as_chunks::<2>().0 {
            table.row(cells(pair));
        }
        screen.line(table)?;
        screen.line(paint(
            style::FAINT,
            format!(
                "\nTimes of one call with one thread, with {threads}, and the share of the first that the second takes. Each number of threads has its turn\n\
                 for 10 ms, then the other. The weight may be in the last-level cache."
            ),
        ))
    }
}

fn cells([one, several]: &[LatencyRow; 2]) -> Vec<String> {
    let time = |us: f64| units::time(Duration::from_secs_f64(us * 1e-6));
    let of = |row: &LatencyRow| [row.p50_us, row.p90_us, row.p99_us];
    let [out, inputs] = one.shape;
    let work = Work { shape: Shape { out, inputs }, dtype: one.dtype, tokens: one.tokens };
    let mut cells = vec![work.to_string(), one.between.to_string()];
    cells.extend([one, several].into_iter().flat_map(of).map(time));
    for (one, several) in of(one).into_iter().zip(of(several)) {
        let good = if several <= one { style::GOOD } else { style::BAD };
        cells.push(paint(good, units::percent(several / one)));
    }
    cells
}

/// The works of this suite.
pub(super) fn works(dtypes: &[WeightFormat]) -> Vec<Work> {
    super::suite::product(&SHAPES, dtypes, &[1])
}
