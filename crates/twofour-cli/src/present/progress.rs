//! A progress bar that only shows where it is worth it.

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::escape;

/// Work that takes less long goes without a bar.
const PATIENCE: Duration = Duration::from_secs(2);

/// A progress bar on stderr. It appears once the work has taken two seconds, and only on a terminal.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    begun: Instant,
    shown: bool,
}

impl Progress {
    /// A bar that may appear.
    pub(crate) fn new() -> Self {
        Progress { bar: ProgressBar::hidden(), begun: Instant::now(), shown: false }
    }

    /// A bar that never does.
    pub(crate) fn hidden() -> Self {
        // As if it were shown already: it stays on its hidden target.
        Progress { bar: ProgressBar::hidden(), begun: Instant::now(), shown: true }
    }

    /// `done` of `total` bytes are through.
    pub(crate) fn bytes(&mut self, message: &str, done: u64, total: u64) {
        self.update(message, done, total, "{bar:32} {bytes}/{total_bytes} {eta:>4} {msg}");
    }

    /// `done` of `total` steps are through.
    pub(crate) fn steps(&mut self, message: &str, done: u64, total: u64) {
        self.update(message, done, total, "{bar:32} {pos}/{len} {eta:>4} {msg}");
    }

    /// Whether a person sees the bar, now or later.
    pub(crate) fn can_show(&self) -> bool {
        (!self.shown || !self.bar.is_hidden()) && std::io::stderr().is_terminal()
    }

    fn update(&mut self, message: &str, done: u64, total: u64, template: &str) {
        if !self.shown && self.begun.elapsed() > PATIENCE {
            if let Ok(style) = ProgressStyle::with_template(template) {
                self.bar.set_style(style.progress_chars("=> "));
            }
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.shown = true;
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
        self.bar.set_message(escape::line(message));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
