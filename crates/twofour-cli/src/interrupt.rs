//! Ctrl-C: nothing half-written, exit code 130.
//!
//! A command that writes nothing ends at once. One that does is [`guard`]ed: the first signal only raises a flag, which the
//! command looks at where it can stop ([`check`], or [`flow`] as a callback's answer), so that temporary files are removed on
//! the way out. A second signal ends the process at once in any case; the files' final
//! names are then still untouched, because they are given in one step.

use std::{
    ops::ControlFlow,
    sync::atomic::{AtomicUsize, Ordering},
};

use anyhow::{Context, Result};

/// What shells report for a process ended by Ctrl-C: 128 + SIGINT.
pub(crate) const EXIT_CODE: u8 = 130;

static GUARDS: AtomicUsize = AtomicUsize::new(0);
static SIGNALS: AtomicUsize = AtomicUsize::new(0);

/// The command was interrupted and has cleaned up.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(crate) struct Interrupted;

/// Catches SIGINT and SIGTERM from now on.
pub(crate) fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        let earlier = SIGNALS.fetch_add(1, Ordering::SeqCst);
        if GUARDS.load(Ordering::SeqCst) == 0 || earlier > 0 {
            std::process::exit(i32::from(EXIT_CODE));
        }
    })
    .context("installing the handler for Ctrl-C")
}

/// While this lives, the first signal waits for the command to stop by itself.
#[must_use = "dropped at once, it guards nothing"]
#[derive(Debug)]
pub(crate) struct Guard(());

/// Begins work that must clean up when interrupted.
pub(crate) fn guard() -> Guard {
    GUARDS.fetch_add(1, Ordering::SeqCst);
    Guard(())
}

impl Drop for Guard {
    fn drop(&mut self) {
        GUARDS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Whether a signal came.
pub(crate) fn requested() -> bool {
    SIGNALS.load(Ordering::SeqCst) > 0
}

/// An error where a signal came.
pub(crate) fn check() -> Result<()> {
    if requested() { Err(Interrupted.into()) } else { Ok(()) }
}

/// The answer of a callback: to break off where a signal came.
pub(crate) fn flow() -> ControlFlow<()> {
    if requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// Whether an error says that a command stopped because of a signal.
pub(crate) fn is_cause_of(error: &anyhow::Error) -> bool {
    error.is::<Interrupted>() || matches!(error.downcast_ref(), Some(twofour::Error::Interrupted))
}
