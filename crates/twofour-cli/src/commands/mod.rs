//! One file for each command.

pub(crate) mod advise;
pub(crate) mod bench;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod compress;
mod converted;
pub(crate) mod decompress;
mod effect;
pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod kernels;
pub(crate) mod man;
pub(crate) mod model;
pub(crate) mod next;
pub(crate) mod output;
pub(crate) mod prune;
pub(crate) mod quantize;
pub(crate) mod quickstart;
pub(crate) mod tensor;
pub(crate) mod text;
pub(crate) mod train;

use anyhow::Result;

use crate::{
    arguments::{Arguments, Command},
    exit::Verdict,
    present::Screen,
    threads,
};

/// Runs the command of the command line.
pub(crate) fn run(arguments: Arguments) -> Result<Verdict> {
    let mut screen = Screen::new(&arguments.global);
    threads::start(&screen)?;
    match arguments.command {
        Command::Quickstart(command) => command.run(&mut screen),
        Command::Train(command) => command.run(&mut screen),
        Command::Eval(command) => command.run(&mut screen),
        Command::Generate(command) => command.run(&mut screen),
        Command::Check(command) => command.run(&mut screen),

        Command::Advise(command) => command.run(&mut screen),
        Command::Prune(command) => command.run(&mut screen),
        Command::Quantize(command) => command.run(&mut screen),
        Command::Compress(command) => command.run(&mut screen),
        Command::Decompress(command) => command.run(&mut screen),
        Command::Inspect(command) => command.run(&mut screen),
        Command::Bench(command) => command.run(&mut screen),
        Command::Kernels(command) => command.run(&mut screen),
        Command::Completions(command) => command.run(&mut screen),
        Command::Man(command) => command.run(&mut screen),
    }
}
