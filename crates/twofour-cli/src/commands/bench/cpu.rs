//! `twofour bench cpu`.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};

use super::{
    answer::Answer,
    latency,
    output::Output,
    suite::{DTYPES, only, product, suite},
};
use crate::{
    dtype,
    exit::{Usage, Verdict},
    measure::{self, Bandwidth, Message, Request, Shape, Single, Work},
    present::{Screen, units},
    threads,
    weight_format::WeightFormat,
};

/// Measure 2:4 against the strongest dense GEMMs on this machine's CPU
///
/// Contenders are interleaved in one process, in shuffled order, and the result is the median: this project's 2:4 and dense kernels, and the
/// gemm crate called directly (f32 and f16). Weights are random, and calls rotate through so many copies of them that they come from memory,
/// as in a model. For decode, read bandwidth is measured in the same rounds, with as many bytes as the dense weight has: a dense kernel cannot be
/// faster than that, and the speedup of 2:4 cannot exceed the ratio of the weights' bytes.
///
/// Takes up to 4 GiB of memory, and about two minutes for each number of threads.
///
/// The suite `latency` instead times single calls of 2:4 layers of 0.1 to 50 million elements, interleaving one thread and several, back to back and
/// with 30 µs of other work between calls as in a model: the median and the 90th and 99th percentile. Takes about three minutes.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour bench cpu
  twofour bench cpu --threads 1,2,8 -o cpu.json
  twofour bench cpu --only 'decode/bf16/*/1' --only prefill --seconds 10
  twofour bench cpu --suite latency --threads 2 -o latency.json
  twofour bench cpu --shape 11008x4096 --tokens 1,64 --dtype bf16 --json | jq '.rows[]'

Work is named KIND/DTYPE/OUTxIN/TOKENS, as in decode/f32/14336x4096/1.")]
pub(super) struct Cpu {
    /// What to measure
    #[arg(long, value_enum, value_name = "SUITE", default_value_t = Suite::Speedup)]
    suite: Suite,

    /// Numbers of threads, each measured in a process of its own [default: 1,2]; for latency, the largest is compared with one thread
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = threads::option)]
    threads: Vec<usize>,

    /// Measure only work whose name matches, as in `decode` or `prefill/bf16/**`
    #[arg(long, value_delimiter = ',', value_name = "GLOB")]
    only: Vec<String>,

    /// Dtypes of the weight; int4 is interleaved with 2:4 and dense int8 [default: f32,bf16,i8]
    #[arg(long, value_parser = dtype::on_cpu(), value_delimiter = ',', value_name = "LIST")]
    dtype: Vec<WeightFormat>,

    /// Measure layers of this shape instead of the suite's; may be repeated
    #[arg(long, value_name = "OUTxIN")]
    shape: Vec<Shape>,

    /// Numbers of tokens to multiply at once by the given shapes [default: 1,16,512; for latency 1]
    #[arg(long, value_delimiter = ',', value_name = "LIST", requires = "shape", value_parser = clap::value_parser!(u32).range(1..=65536))]
    tokens: Vec<u32>,

    /// Seconds to spend on each work with all its contenders; at least five rounds, for latency 300 calls with each number of threads, are measured in any case
    #[arg(long, default_value_t = 3.0, value_name = "SECONDS")]
    seconds: f64,

    #[command(flatten)]
    output: Output,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// 2:4 against the strongest dense GEMMs
    Speedup,
    /// Single calls with one thread and with several
    Latency,
}

impl Cpu {
    /// Runs the command.
    pub(super) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let works = self.works()?;
        let threads = self.threads();
        let budget = match Duration::try_from_secs_f64(self.seconds) {
            Ok(budget) => budget,
            Err(e) => bail!(Usage(format!("--seconds {}: {e}", self.seconds))),
        };
        self.output.expect_writable()?;
        if self.suite == Suite::Latency {
            // Half of the time back to back, half with pauses.
            let most = *threads.last().unwrap_or(&1);
            return latency::run(&works, most, budget / 2, self.told(), &self.output, screen);
        }
        let mut answer = Answer::new(self.told(), *threads.iter().max().unwrap_or(&1))?;
        let all = (works.len() * threads.len()) as u64;
        let request = Request { bandwidth: Bandwidth::Beside, single: Single::Beside, ..Request::new(works, budget) };
        let mut progress = screen.progress();
        let mut done = 0;
        for threads in threads {
            let with = units::plural(threads, "thread");
            progress.steps(&format!("reading memory, {with}"), done, all);
            measure::measure(threads, &request, &mut |message| {
                match message {
                    Message::Bandwidth(bandwidth) => answer.read_bandwidth.push(bandwidth),
                    Message::Begun(work) => progress.steps(&format!("{work}, {with}"), done, all),
                    Message::Done { rows, .. } => {
                        tracing::info!(?rows, "measured");
                        answer.rows.extend(rows);
                        done += 1;
                    }
                    Message::Arithmetic(_) | Message::Failed(_) => {}
                }
                Ok(())
            })?;
        }
        drop(progress);
        answer.tell(screen)?;
        screen.json(&answer)?;
        self.output.write(&answer)?;
        Ok(Verdict::Yes)
    }

    fn works(&self) -> Result<Vec<Work>> {
        let dtypes = if self.dtype.is_empty() { &DTYPES[..] } else { &self.dtype };
        let tokens: Vec<usize> = self.tokens.iter().map(|&tokens| tokens as usize).collect();
        let works = match (self.shape.as_slice(), tokens.as_slice()) {
            ([], _) if self.suite == Suite::Latency => latency::works(dtypes),
            ([], _) => suite(dtypes),
            (shapes, []) if self.suite == Suite::Latency => product(shapes, dtypes, &[1]),
            (shapes, []) => product(shapes, dtypes, &[1, 16, 512]),
            (shapes, tokens) => product(shapes, dtypes, tokens),
        };
        only(works, &self.only)
    }

    /// Returns the numbers of threads to measure with, at most as many as the machine has.
    fn threads(&self) -> Vec<usize> {
        if self.threads.is_empty() {
            return [1, 2].into_iter().filter(|number| *number <= threads::of_machine()).collect();
        }
        let mut threads = self.threads.clone();
        threads.sort_unstable();
        threads.dedup();
        threads
    }

    /// Returns the command line, without paths of this machine.
    fn told(&self) -> String {
        fn list<T: ToString>(list: &[T]) -> String {
            list.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
        }
        let mut command = "twofour bench cpu".to_owned();
        let mut add = |option: &str, value: String| {
            if !value.is_empty() {
                command += &format!(" {option} {value}");
            }
        };
        if self.suite == Suite::Latency {
            add("--suite", "latency".to_owned());
        }
        add("--threads", list(&self.threads));
        self.only.iter().for_each(|pattern| add("--only", format!("'{pattern}'")));
        add("--dtype", list(&self.dtype));
        self.shape.iter().for_each(|shape| add("--shape", shape.to_string()));
        add("--tokens", list(&self.tokens));
        add("--seconds", self.seconds.to_string());
        command
    }
}
