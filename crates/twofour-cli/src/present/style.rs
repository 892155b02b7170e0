//! Colours: few, with a meaning, and only where a person looks.

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;

/// An error.
pub(crate) const ERROR: Style = AnsiColor::Red.on_default().bold();
/// A warning: the work is done, and there is something to know.
pub(crate) const WARNING: Style = AnsiColor::Yellow.on_default().bold();
/// As it should be.
pub(crate) const GOOD: Style = AnsiColor::Green.on_default();
/// Not as it should be.
pub(crate) const BAD: Style = AnsiColor::Red.on_default();
/// Less important than the rest.
pub(crate) const FAINT: Style = Style::new().dimmed();
/// A heading.
pub(crate) const STRONG: Style = Style::new().bold();

/// When to use colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum ColorChoice {
    /// On a terminal, unless NO_COLOR is set.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

impl ColorChoice {
    /// Makes this the choice for all output to come.
    pub(crate) fn apply(self) {
        match self {
            ColorChoice::Auto => anstream::ColorChoice::Auto,
            ColorChoice::Always => anstream::ColorChoice::Always,
            ColorChoice::Never => anstream::ColorChoice::Never,
        }
        .write_global();
    }
}

/// The text in a style.
pub(crate) fn paint(style: Style, text: impl std::fmt::Display) -> String {
    format!("{style}{text}{style:#}")
}
