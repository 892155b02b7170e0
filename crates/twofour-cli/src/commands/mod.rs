//! One file for each command.

pub(crate) mod advise;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod compress;
pub(crate) mod convert;
mod converted;
pub(crate) mod decompress;
mod effect;
pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod kernels;
pub(crate) mod man;
pub(crate) mod merge;
pub(crate) mod model;
pub(crate) mod next;
pub(crate) mod output;
mod peft;
pub(crate) mod prune;
pub(crate) mod quantize;
pub(crate) mod quickstart;
pub(crate) mod sensitivity;
pub(crate) mod shrink;
pub(crate) mod tensor;
pub(crate) mod text;
pub(crate) mod train;

use anyhow::Result;

use crate::{
    arguments::{Arguments, Command},
    exit::Verdict,
    measure,
    present::Screen,
};

/// Runs the command of the command line.
pub(crate) fn run(arguments: Arguments, screen: &mut Screen) -> Result<Verdict> {
    match arguments.command {
        Command::Quickstart(command) => command.run(screen),
        Command::Train(command) => command.run(screen),
        Command::Eval(command) => command.run(screen),
        Command::Generate(command) => command.run(screen),
        Command::Check(command) => command.run(screen),

        Command::Advise(command) => command.run(screen),
        Command::Prune(command) => command.run(screen),
        Command::Sensitivity(command) => command.run(screen),
        Command::Shrink(command) => command.run(screen),
        Command::Quantize(command) => command.run(screen),
        Command::Compress(command) => command.run(screen),
        Command::Decompress(command) => command.run(screen),
        Command::Convert(command) => command.run(screen),
        Command::Merge(command) => command.run(screen),
        Command::Inspect(command) => command.run(screen),
        Command::Kernels(command) => command.run(screen),
        Command::Completions(command) => command.run(screen),
        Command::Man(command) => command.run(screen),
        Command::MeasureWorker => measure::work(),
    }
}
