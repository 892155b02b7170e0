//! A progress bar that only shows where it is worth it, and that leaves nothing on the terminal. In a log it is a line
//! every five minutes.

use std::{
    io::{self, IsTerminal, Write},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{HumanBytes, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use super::{escape, terminal, wrap::shortened};

/// Work that takes less long goes without a bar.
const PATIENCE: Duration = Duration::from_secs(2);

/// How often a log gets a line.
const LOGGED_EVERY: Duration = Duration::from_mins(5);

/// Characters of the bar itself.
const BAR: usize = 16;

/// Columns at the end of the line that stay free: a terminal writes `^C` there, and what is longer than the line would
/// not be cleared.
const FREE: usize = 4;

/// How often the bar is drawn in a second, at most.
const PER_SECOND: u8 = 20;

/// The bar that is on the terminal.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Removes the bar from the terminal, before a line is written there or the process ends.
pub fn clear() {
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

/// A progress bar on stderr. It appears once the work has taken two seconds, on a terminal. Elsewhere a line says every
/// five minutes how far the work is.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    begun: Instant,
    shown: bool,
    /// When the last line was written, or else the work began; nothing where no lines are written.
    logged: Option<Instant>,
}

impl Progress {
    /// A bar that may appear.
    pub(crate) fn new() -> Self {
        let begun = Instant::now();
        Progress { bar: ProgressBar::hidden(), begun, shown: false, logged: Some(begun) }
    }

    /// A bar that never does.
    pub fn hidden() -> Self {
        // As if it were shown already: it stays on its hidden target.
        Progress { bar: ProgressBar::hidden(), begun: Instant::now(), shown: true, logged: None }
    }

    /// `done` of `total` bytes are through.
    pub fn bytes(&mut self, message: &str, done: u64, total: u64) {
        self.update(message, done, total, |done, total| format!("{}/{}", HumanBytes(done), HumanBytes(total)));
    }

    /// `done` of `total` steps are through.
    pub fn steps(&mut self, message: &str, done: u64, total: u64) {
        self.update(message, done, total, |done, total| format!("{done}/{total}"));
    }

    /// Whether a person sees the bar, now or later.
    pub fn can_show(&self) -> bool {
        (!self.shown || !self.bar.is_hidden()) && std::io::stderr().is_terminal()
    }

    fn update(&mut self, message: &str, done: u64, total: u64, count: impl FnOnce(u64, u64) -> String) {
        if !self.shown && self.begun.elapsed() > PATIENCE {
            if let Ok(style) = ProgressStyle::with_template(&format!("{{bar:{BAR}}} {{msg}}")) {
                self.bar.set_style(style.progress_chars("=> "));
            }
            if io::stderr().is_terminal() {
                self.bar.set_draw_target(ProgressDrawTarget::term_like_with_hz(Box::new(Stderr), PER_SECOND));
                *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.bar.clone());
            }
            self.shown = true;
        }
        if self.bar.is_hidden() {
            if self.logged.is_some_and(|last| last.elapsed() >= LOGGED_EVERY) {
                self.logged = Some(Instant::now());
                let text = logged(&count(done, total), &escape::line(message), self.begun.elapsed(), (done, total));
                // Where nobody reads it, the work goes on.
                let _ = writeln!(io::stderr(), "{text}");
            }
            return;
        }
        let left =
            if done > 0 && done < total { format!(" {:#}", HumanDuration(self.bar.eta())) } else { String::new() };
        let text =
            line(&format!("{}{left}", count(done, total)), &escape::line(message), terminal::columns_of_stderr());
        self.bar.set_message(text);
        self.bar.set_length(total);
        self.bar.set_position(done);
    }
}

/// The terminal that stderr is, without the free columns at its end, which a bar's line would otherwise be filled with.
#[derive(Debug)]
struct Stderr;

impl TermLike for Stderr {
    fn width(&self) -> u16 {
        u16::try_from(terminal::columns_of_stderr().saturating_sub(FREE)).unwrap_or(u16::MAX)
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        if n == 0 { Ok(()) } else { self.write_str(&format!("\x1b[{n}A")) }
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        if n == 0 { Ok(()) } else { self.write_str(&format!("\x1b[{n}B")) }
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        if n == 0 { Ok(()) } else { self.write_str(&format!("\x1b[{n}C")) }
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        if n == 0 { Ok(()) } else { self.write_str(&format!("\x1b[{n}D")) }
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.write_str(&format!("{text}\n"))
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        io::stderr().write_all(text.as_bytes())
    }

    fn clear_line(&self) -> io::Result<()> {
        self.write_str("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// A line of a log.
fn logged(count: &str, message: &str, took: Duration, (done, total): (u64, u64)) -> String {
    let left = match done {
        0 => String::new(),
        _ => format!(", about {} left", HumanDuration(took.mul_f64(total.saturating_sub(done) as f64 / done as f64))),
    };
    format!("{message}: {count} after {}{left}", HumanDuration(took))
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

    #[test]
    fn a_line_of_a_log_says_what_is_left() {
        let minutes = Duration::from_mins;
        assert_eq!(
            logged("3/12", "pruning block 1", minutes(3), (3, 12)),
            "pruning block 1: 3/12 after 3 minutes, about 9 minutes left"
        );
        assert_eq!(logged("0/12", "pruning block 1", minutes(3), (0, 12)), "pruning block 1: 0/12 after 3 minutes");
    }

    #[test]
    fn a_log_gets_a_line_when_one_is_due_and_a_quiet_one_none() {
        let mut progress = Progress::new();
        // None on a machine that has just started.
        let Some(due) = progress.begun.checked_sub(LOGGED_EVERY) else { return };
        (progress.begun, progress.logged) = (due, Some(due));
        if io::stderr().is_terminal() {
            return;
        }
        progress.steps("working", 1, 2);
        assert!(progress.logged.is_some_and(|last| last.elapsed() < LOGGED_EVERY));
        let mut quiet = Progress::hidden();
        quiet.begun = due;
        quiet.steps("working", 1, 2);
        assert_eq!(quiet.logged, None);
    }
}
