//! `twofour bench`.

mod answer;
mod cpu;
mod cuda;
mod cuda_answer;
mod cuda_shapes;
mod cuda_tables;
mod draw;
mod encoder;
mod generate;
mod grid;
mod image;
mod latency;
mod output;
mod suite;

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::{exit::Verdict, measure, present::Screen};

/// Measure this machine: 2:4 against the strongest dense GEMMs
#[derive(Debug, Args)]
#[command(
    arg_required_else_help = true,
    after_help = "Example: twofour bench cpu --threads 1,2 --only decode -o cpu.json"
)]
pub(crate) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Cpu(cpu::Cpu),
    Cuda(cuda::Cuda),
    Generate(generate::Generate),
    Encoder(encoder::Encoder),
    Draw(draw::Draw),
    /// Measure the request on stdin; started by other commands
    #[command(hide = true)]
    Worker,
    #[command(hide = true)]
    GenerateWorker(generate::GenerateWorker),
}

impl Bench {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        match self.what {
            What::Cpu(cpu) => cpu.run(screen),
            What::Cuda(cuda) => cuda.run(screen),
            What::Generate(generate) => generate.run(screen),
            What::GenerateWorker(worker) => worker.run(),
            What::Encoder(encoder) => encoder.run(screen),
            What::Draw(draw) => draw.run(screen),
            What::Worker => {
                measure::work(std::io::stdin().lock(), std::io::stdout().lock())?;
                Ok(Verdict::Yes)
            }
        }
    }
}
