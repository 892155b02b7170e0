//! A progress bar that only shows where it is worth it, and that leaves nothing on the terminal.

use std::{
    io::IsTerminal,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::{escape, terminal, wrap::shortened};

/// Work that takes less long goes without a bar.
const PATIENCE: Duration = Duration::from_secs(2);

/// Characters of the bar itself.
const BAR: usize = 16;

/// Columns at the end of the line that stay free: a terminal writes `^C` there, and what is longer than the line would not be cleared.
const FREE: usize = 4;

/// The bar that is on the terminal.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Removes the bar from the terminal, before a line is written there or the process ends.
pub(crate) fn clear() {
    if let Some(bar) = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).take() {
        bar.finish_and_clear();
    }
}

/// Calls a function that writes to the terminal, without the bar there.
pub(super) fn without<T>(write: impl FnOnce() -> T) -> T {
    let bar = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

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
        self.update(message, done, total, |done, total| format!("{}/{}", HumanBytes(done), HumanBytes(total)));
    }

    /// `done` of `total` steps are through.
    pub(crate) fn steps(&mut self, message: &str, done: u64, total: u64) {
        self.update(message, done, total, |done, total| format!("{done}/{total}"));
    }

    /// Whether a person sees the bar, now or later.
    pub(crate) fn can_show(&self) -> bool {
        (!self.shown || !self.bar.is_hidden()) && std::io::stderr().is_terminal()
    }

    fn update(&mut self, message: &str, done: u64, total: u64, count: impl FnOnce(u64, u64) -> String) {
        if !self.shown && self.begun.elapsed() > PATIENCE {
            if let Ok(style) = ProgressStyle::with_template(&format!("{{bar:{BAR}}} {{msg}}")) {
                self.bar.set_style(style.progress_chars("=> "));
            }
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.shown = true;
            *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.bar.clone());
        }
        if self.bar.is_hidden() {
            return;
        }
        self.bar.set_length(total);
        self.bar.set_position(done);
        let left =
            if done > 0 && done < total { format!(" {:#}", HumanDuration(self.bar.eta())) } else { String::new() };
        let text =
            line(&format!("{}{left}", count(done, total)), &escape::line(message), terminal::columns_of_stderr());
        self.bar.set_message(text);
    }
}

/// What stands behind the bar on a line of so many columns.
fn line(count: &str, message: &str, columns: usize) -> String {
    let room = columns.saturating_sub(BAR + 1 + FREE);
    let words = room.saturating_sub(count.chars().count() + 1);
    shortened(&format!("{count} {}", shortened(message, words)), room)
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        if !self.bar.is_hidden() {
            SHOWN.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_leaves_columns_free_at_its_end() {
        let message = "writing model.layers.12.self_attn.q_proj.weight of a model with long names";
        for columns in [20, 40, 80, 81, 200] {
            let text = line("1.24 GiB/2.15 GiB 12s", message, columns);
            assert!(BAR + 1 + text.chars().count() + FREE <= columns.max(BAR + 1 + FREE + 1), "{columns}: {text}");
        }
        assert_eq!(line("3/10", "short", 80), "3/10 short");
    }
}
