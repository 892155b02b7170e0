//! Benchmarks of twofour, for developers of its kernels: 2:4 against the strongest dense baselines.
//!
//! | folder or file | holds |
//! |---|---|
//! | `suites/` | one file or folder for each suite |
//! | `suites/cuda/` | the suites of a GPU's kernels |
//! | `output` | the file of a suite's JSON |
//! | `load` | what else keeps the machine busy |

mod load;
mod output;
mod suites;

use std::process::ExitCode;

use clap::Parser;
use twofour_cli::{Global, arguments, program};

#[global_allocator]
static ALLOCATOR: twofour_cli::allocator::EndsWithoutMemory = twofour_cli::allocator::EndsWithoutMemory;

/// Measure twofour on this machine: 2:4 against the strongest dense kernels
///
/// Baselines and 2:4 are interleaved in shuffled order, in one process or in one process each; results are medians.
#[derive(Debug, Parser)]
#[command(
    name = "twofour-bench",
    version,
    propagate_version = true,
    infer_subcommands = false,
    arg_required_else_help = true,
    max_term_width = 100
)]
struct Arguments {
    #[command(flatten)]
    global: Global,

    #[command(subcommand)]
    suite: suites::Suites,
}

fn main() -> ExitCode {
    let parse = || {
        let arguments: Arguments = arguments();
        (arguments.global, arguments.suite)
    };
    program(parse, |suite, screen| suite.run(screen))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Arguments;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
