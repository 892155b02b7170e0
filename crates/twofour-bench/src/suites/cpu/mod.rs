//! The suite `cpu`: 2:4 kernels of the CPU against dense ones.

mod answer;
mod works;

use anyhow::Result;
use clap::Args;
use twofour_cli::{
    exit::Verdict,
    measure::{self, Bandwidth, Message, Request, Single},
    present::{Screen, units},
    threads,
};

use self::{answer::Answer, works::suite};
use crate::output::Output;

pub(super) use works::{WorkOptions, product};

/// Measure 2:4 against the strongest dense GEMMs on this machine's CPU
///
/// Contenders are interleaved in one process, in shuffled order, and the result is the median: this project's 2:4 and
/// dense kernels, and the gemm crate called directly (f32 and f16). Weights are random, and calls rotate through so
/// many copies of them that they come from memory, as in a model. For decode, read bandwidth is measured in the same
/// rounds, with as many bytes as the dense weight has: a dense kernel cannot be faster than that, and the speedup of
/// 2:4 cannot exceed the ratio of the weights' bytes.
///
/// Takes up to 4 GiB of memory, and about two minutes for each number of threads.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour-bench cpu
  twofour-bench cpu --threads 1,2,8 -o cpu.json
  twofour-bench cpu --only 'decode/bf16/*/1' --only prefill --seconds 10
  twofour-bench cpu --shape 11008x4096 --tokens 1,64 --dtype bf16 --json | jq '.rows[]'

Work is named KIND/DTYPE/OUTxIN/TOKENS, as in decode/f32/14336x4096/1.")]
pub(crate) struct Cpu {
    /// Numbers of threads, each measured in a process of its own [default: 1,2]
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = threads::option)]
    threads: Vec<usize>,

    #[command(flatten)]
    works: WorkOptions,

    /// Seconds to spend on each work with all its contenders; at least five rounds are measured in any case
    #[arg(long, default_value_t = 3.0, value_name = "SECONDS")]
    seconds: f64,

    #[command(flatten)]
    output: Output,
}

impl Cpu {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let works = self.works.works(suite, &[1, 16, 512])?;
        let threads = self.threads();
        let budget = measure::time("--seconds", self.seconds)?;
        self.output.expect_writable()?;
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
        let threads: Vec<String> = self.threads.iter().map(usize::to_string).collect();
        let threads = if threads.is_empty() { String::new() } else { format!(" --threads {}", threads.join(",")) };
        format!("twofour-bench cpu{threads}{} --seconds {}", self.works.told(), self.seconds)
    }
}
