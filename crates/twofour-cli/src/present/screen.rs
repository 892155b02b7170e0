//! Where a command's output goes.

use std::io::{self, ErrorKind, Write};

use anstream::eprintln;
use anyhow::{Context, Result};
use serde::Serialize;

use super::{
    Global, escape,
    progress::{self, Progress},
    style::{self, paint},
    terminal,
    wrap::wrapped,
};

/// A command's output: text for people, or JSON for scripts, on stdout; warnings and progress on stderr.
///
/// When the reader of stdout exits (`| head`), the rest is dropped silently and the command continues to its verdict.
#[derive(Debug)]
pub struct Screen {
    quiet: bool,
    json: bool,
    detailed: bool,
    closed: bool,
    stream: escape::Stream,
}

impl Screen {
    /// Returns the screen for the options.
    pub fn new(global: &Global) -> Self {
        let Global { quiet, json, verbose, .. } = *global;
        Screen { quiet, json, detailed: verbose > 0, closed: false, stream: escape::Stream::default() }
    }

    /// Prints text of this program for people and a line break; names, paths and values in it are escaped by
    /// `escape::line` or [`escape::path`], which leave no line break of theirs. Nothing with `--quiet` or `--json`.
    pub fn line(&mut self, text: impl std::fmt::Display) -> Result<()> {
        if self.quiet || self.json { Ok(()) } else { self.styled(&escape::text(&format!("{text}\n"))) }
    }

    /// Prints an explanation of what stands above it, in lines that fit the terminal; nothing with `--quiet` or
    /// `--json`.
    pub fn note(&mut self, text: &str) -> Result<()> {
        let lines = text.lines().flat_map(|line| wrapped(line, terminal::columns()));
        lines.map(|line| paint(style::FAINT, line)).try_for_each(|line| self.line(line))
    }

    /// Prints the commands that may follow this one; nothing with `--quiet` or `--json`.
    pub fn next(&mut self, commands: &[String]) -> Result<()> {
        let heading = |i: usize| if i == 0 { "\nNext: " } else { "      " };
        commands.iter().enumerate().try_for_each(|(i, command)| self.line(format!("{}{command}", heading(i))))
    }

    /// Prints the JSON answer, if `--json` is given.
    pub fn json(&mut self, answer: &impl Serialize) -> Result<()> {
        if !self.json {
            return Ok(());
        }
        let text = serde_json::to_string_pretty(answer).context("writing JSON")?;
        self.raw(format!("{}\n", escape::json(&text)).as_bytes())
    }

    /// Returns whether the answer is JSON.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// Returns whether `--verbose` asks for every detail.
    pub fn is_detailed(&self) -> bool {
        self.detailed
    }

    /// Returns whether the reader of stdout has exited.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Prints bytes of generated text, of which a model may have made anything, as a terminal may show them; nothing
    /// with `--json`.
    pub fn stream(&mut self, bytes: &[u8]) -> Result<()> {
        if self.json {
            return Ok(());
        }
        let text = self.stream.push(bytes);
        self.raw(text.as_bytes())
    }

    /// Prints text, where stdout is no terminal without its colors.
    fn styled(&mut self, text: &str) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        let mut stdout = anstream::stdout().lock();
        self.settle(stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()))
    }

    /// Prints bytes as they are, escape sequences too, without waiting for a line's end.
    pub fn raw(&mut self, bytes: &[u8]) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        let mut stdout = io::stdout().lock();
        self.settle(stdout.write_all(bytes).and_then(|()| stdout.flush()))
    }

    fn settle(&mut self, result: io::Result<()>) -> Result<()> {
        match result {
            Err(e) if e.kind() == ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(())
            }
            result => result.context("writing to stdout"),
        }
    }

    /// Warns on stderr; not with `--quiet`.
    pub fn warn(&self, text: impl std::fmt::Display) {
        if !self.quiet {
            let text = escape::line(&format!("{} {text}", paint(style::WARNING, "warning:")));
            let text = escape::text(&text);
            progress::without(|| eprintln!("{text}"));
        }
    }

    /// A progress bar on stderr, which shows after two seconds if a person is there to see it.
    pub fn progress(&self) -> Progress {
        if self.quiet { Progress::hidden() } else { Progress::new() }
    }
}
