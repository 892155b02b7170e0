//! What every program of this project does around its command.

use std::process::ExitCode;

use anyhow::Result;

use crate::{
    exit::Verdict,
    exit_code, file_size, interrupt, panics,
    present::{Global, Screen, log},
    threads,
};

/// Parses the arguments, sets up colours, the log, Ctrl-C and threads as the options say, runs the command, and returns
/// the exit code. An error is printed to stderr.
pub fn program<A>(
    parse: impl FnOnce() -> (Global, A) + Send,
    run: impl FnOnce(A, &mut Screen) -> Result<Verdict> + Send,
) -> ExitCode {
    let command = move || {
        let (global, arguments) = parse();
        global.color.apply();
        log::start(global.verbose);
        interrupt::install()?;
        let mut screen = Screen::new(&global);
        threads::start(&screen)?;
        run(arguments, &mut screen)
    };
    panics::install();
    file_size::expect_errors();
    exit_code::of(|| threads::with_stack(command)?)
}
