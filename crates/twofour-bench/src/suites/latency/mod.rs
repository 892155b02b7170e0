//! The suite `latency`: single calls of 2:4 layers on the CPU.

mod calls;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use twofour_cli::{
    exit::Verdict,
    measure::{self, Machine, Shape, Work},
    present::{
        Screen,
        style::{self, paint},
        table::Table,
        units,
    },
    threads,
};

use self::calls::{Between, Latencies, LatencyRow};
use super::cpu::{WorkOptions, product};
use crate::{load::warn_if_busy, output::Output};

/// Layers from 0.1 to 50 million elements.
const SHAPES: [Shape; 8] = [
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

/// Time single calls of 2:4 layers on the CPU, with one thread and with several
///
/// Layers of 0.1 to 50 million elements; the numbers of threads are interleaved, back to back and with 30 µs of other
/// work between calls as in a model: the median and the 90th and 99th percentile. Takes about three minutes.
#[derive(Debug, Args)]
#[command(after_help = "Example: twofour-bench latency --threads 2 -o latency.json")]
pub(crate) struct Latency {
    /// The number of threads that is compared with one [default: all]
    #[arg(long, value_name = "COUNT", value_parser = threads::option)]
    threads: Option<usize>,

    #[command(flatten)]
    works: WorkOptions,

    /// Seconds to spend on each layer; at least 300 calls with each number of threads are measured in any case
    #[arg(long, default_value_t = 3.0, value_name = "SECONDS")]
    seconds: f64,

    #[command(flatten)]
    output: Output,
}

impl Latency {
    /// Runs the suite.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let works = self.works.works(|dtypes| product(&SHAPES, dtypes, &[1]), &[1])?;
        let threads = self.threads.unwrap_or_else(threads::of_machine);
        // Half of the time back to back, half with pauses.
        let budget = measure::time("--seconds", self.seconds)? / 2;
        self.output.expect_writable()?;
        let machine = Machine { threads, ..measure::machine()? };
        let mut answer =
            Answer { machine, command: self.told(), load_average: measure::load_average(), rows: Vec::new() };
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
        self.output.write(&answer)?;
        Ok(Verdict::Yes)
    }

    /// Returns the command line, without paths of this machine.
    fn told(&self) -> String {
        let threads = self.threads.map_or(String::new(), |threads| format!(" --threads {threads}"));
        format!("twofour-bench latency{threads}{} --seconds {}", self.works.told(), self.seconds)
    }
}

impl Answer {
    fn tell(&self, screen: &mut Screen) -> Result<()> {
        let Machine { cpu, engine, threads, .. } = &self.machine;
        screen.line(format!("{cpu}, engine {engine}, one thread and {threads}"))?;
        warn_if_busy(screen, self.load_average, &self.machine)?;
        screen.line("")?;
        let mut table = Table::of(["layer", "calls"], ["p50", "p90", "p99", "p50", "p90", "p99", "p50", "p90", "p99"]);
        for pair in self.rows.as_chunks::<2>().0 {
            table.row(cells(pair));
        }
        screen.line(table)?;
        screen.line(paint(
            style::FAINT,
            format!(
                "\nTimes of one call with one thread, with {threads}, and the share of the first that the second \
                 takes. Each number of threads has its turn\n\
                 for 10 ms, then the other. The weight may be in the last-level cache."
            ),
        ))
    }
}

fn cells([one, several]: &[LatencyRow; 2]) -> Vec<String> {
    let of = |row: &LatencyRow| [row.p50_us, row.p90_us, row.p99_us];
    let [out, inputs] = one.shape;
    let work = Work { shape: Shape { out, inputs }, dtype: one.dtype, tokens: one.tokens };
    let mut cells = vec![work.to_string(), one.between.to_string()];
    cells.extend([one, several].into_iter().flat_map(of).map(units::microseconds));
    for (one, several) in of(one).into_iter().zip(of(several)) {
        let good = if several <= one { style::GOOD } else { style::BAD };
        cells.push(paint(good, units::percent(several / one)));
    }
    cells
}
