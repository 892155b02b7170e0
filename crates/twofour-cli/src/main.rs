//! The `twofour` command: 2:4 sparsity from the shell.
//!
//! | folder or file | holds |
//! |---|---|
//! | `arguments`, `parse` | the command line |
//! | `commands/` | one file for each command |
//! | `measure/` | timing dense against 2:4 |
//! | `quickstart/` | training and comparing a small model |
//! | `present/` | output: tables, units, progress, colours, JSON |
//! | `selection` | choosing tensors of a model |
//! | `dtype`, `weight_format` | formats of weights: as values of options, and those that are measured |
//! | `tightest` | the tightest N:M pattern of a matrix |
//! | `interrupt` | Ctrl-C |
//! | `threads` | how many threads compute |
//! | `memory` | whether work fits into the machine's memory |
//! | `allocator` | what happens where memory is refused |
//! | `file_size` | what happens where a file becomes too large |
//! | `panics` | which panics are not shown as such |
//! | `hub` | models by their names on the Hugging Face hub |
//! | `exit` | exit codes and the error message |

mod allocator;
mod arguments;
mod commands;
mod dtype;
mod exit;
mod file_size;
mod hub;
mod interrupt;
mod measure;
mod memory;
mod panics;
mod parse;
mod present;
mod quickstart;
mod selection;
mod threads;
mod tightest;
mod weight_format;

use std::process::ExitCode;

use anyhow::Result;

use exit::Verdict;

#[global_allocator]
static ALLOCATOR: allocator::EndsWithoutMemory = allocator::EndsWithoutMemory;

fn main() -> ExitCode {
    panics::install();
    file_size::expect_errors();
    exit::code(|| threads::with_stack(command)?)
}

fn command() -> Result<Verdict> {
    let arguments = parse::arguments();
    arguments.global.color.apply();
    present::log::start(arguments.global.verbose);
    interrupt::install()?;
    commands::run(arguments)
}
