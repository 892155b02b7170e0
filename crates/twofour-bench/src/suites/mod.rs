//! The suites: each is a command of `twofour-bench`.

mod blocks;
mod cpu;
mod cuda;
mod draw;
mod encoder;
mod generate;
mod latency;

use anyhow::Result;
use twofour_cli::{exit::Verdict, measure, present::Screen};

/// Declares the commands of suites, which are types with a method `run`.
macro_rules! suites {
    (
        $(#[$attribute:meta])*
        $name:ident { $($suite:ident($options:ty),)* } hidden { $($hidden:ident($command:ty),)* }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, clap::Subcommand)]
        pub(crate) enum $name {
            $($suite($options),)*
            $(#[command(hide = true)] $hidden($command),)*
        }

        impl $name {
            /// Runs the suite.
            pub(crate) fn run(
                self,
                screen: &mut twofour_cli::present::Screen,
            ) -> anyhow::Result<twofour_cli::exit::Verdict> {
                match self {
                    $($name::$suite(suite) => suite.run(screen),)*
                    $($name::$hidden(command) => command.run(screen),)*
                }
            }
        }
    };
}
use suites;

suites! {
    /// What is measured.
    Suites {
        Cpu(cpu::Cpu),
        Blocks(blocks::Blocks),
        Latency(latency::Latency),
        Cuda(cuda::Cuda),
        Generate(generate::Generate),
        Encoder(encoder::Encoder),
        Draw(draw::Draw),
    } hidden {
        GenerateWorker(generate::GenerateWorker),
        MeasureWorker(MeasureWorker),
    }
}

/// Measure the request on stdin; started by other commands
#[derive(Debug, clap::Args)]
pub(crate) struct MeasureWorker {}

impl MeasureWorker {
    fn run(self, _: &mut Screen) -> Result<Verdict> {
        measure::work()
    }
}
