//! The `twofour` command: 2:4 sparsity from the shell. As a library it is the base of `twofour-bench`, which shares its
//! output, its exit codes and its way of measuring.
//!
//! | folder or file | holds |
//! |---|---|
//! | `program` | what every program of this project does around its command |
//! | `arguments`, `parse` | the command line |
//! | `commands/` | one file for each command |
//! | [`measure`] | timing dense against 2:4 |
//! | `quickstart/` | training and comparing a small model |
//! | [`present`] | output: tables, units, progress, colours, JSON |
//! | `selection` | choosing tensors of a model |
//! | [`device`] | where to compute, as the value of an option |
//! | [`dtype`], [`weight_format`] | formats of weights: as values of options, and those that are measured |
//! | `tightest` | the tightest N:M pattern of a matrix |
//! | [`interrupt`] | Ctrl-C |
//! | [`threads`] | how many threads compute |
//! | `memory` | whether work fits into the machine's memory |
//! | [`allocator`] | what happens where memory is refused |
//! | `file_size` | what happens where a file becomes too large |
//! | `panics` | which panics are not shown as such |
//! | `hub` | models by their names on the Hugging Face hub |
//! | [`exit`] | exit codes and the error message |

pub mod allocator;
mod arguments;
mod commands;
pub mod device;
pub mod dtype;
pub mod exit;
mod exit_code;
mod file_size;
mod hub;
pub mod interrupt;
pub mod measure;
mod memory;
mod panics;
mod parse;
pub mod present;
mod program;
mod quickstart;
#[cfg(test)]
mod reference;
mod selection;
pub mod threads;
mod tightest;
pub mod weight_format;

use std::process::ExitCode;

pub use self::{parse::arguments, present::Global, program::program};

/// Runs the command of the process's arguments.
pub fn main() -> ExitCode {
    let parse = || {
        let arguments: arguments::Arguments = parse::arguments();
        (arguments.global.clone(), arguments)
    };
    program(parse, |arguments, screen| arguments.command.run(screen))
}
