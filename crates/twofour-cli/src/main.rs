//! The `twofour` command.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: twofour_cli::allocator::EndsWithoutMemory = twofour_cli::allocator::EndsWithoutMemory;

fn main() -> ExitCode {
    twofour_cli::main()
}
