//! Colors: few, with a meaning, and only where a person looks.

use anstyle::{AnsiColor, Style};
use clap::ValueEnum;

/// An error.
pub const ERROR: Style = AnsiColor::Red.on_default().bold();
/// A warning: the work is done, and there is something to know.
pub const WARNING: Style = AnsiColor::Yellow.on_default().bold();
/// As it should be.
pub const GOOD: Style = AnsiColor::Green.on_default();
/// Not as it should be.
pub const BAD: Style = AnsiColor::Red.on_default();
/// Less important than the rest.
pub const FAINT: Style = Style::new().dimmed();
/// A heading.
pub const STRONG: Style = Style::new().bold();

/// When to use colors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum ColorChoice {
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
    pub fn apply(self) {
        match self {
            ColorChoice::Auto => anstream::ColorChoice::Auto,
            ColorChoice::Always => anstream::ColorChoice::Always,
            ColorChoice::Never => anstream::ColorChoice::Never,
        }
        .write_global();
    }
}

/// The styles that text can be painted in. Each has a mark, a character that Unicode gives no meaning: so what is not
/// painted here has no style.
const PAINTS: [Style; 6] = [ERROR, WARNING, GOOD, BAD, FAINT, STRONG];

/// The mark of the first of [`PAINTS`]; those of the others follow.
const FIRST_MARK: char = '\u{FDD0}';

/// The mark of a style's end.
const END_MARK: char = '\u{FDEF}';

/// The text in one of the styles of this module, between marks that `escape::text` turns into the terminal's.
pub fn paint(style: Style, text: impl std::fmt::Display) -> String {
    let mark = PAINTS.iter().zip(FIRST_MARK..END_MARK).find(|(paint, _)| **paint == style);
    match mark {
        Some((_, mark)) => format!("{mark}{text}{END_MARK}"),
        None => text.to_string(),
    }
}

/// The terminal's sequence for a mark; none for another character.
pub(super) fn of_mark(character: char) -> Option<String> {
    if character == END_MARK {
        return Some(format!("{:#}", ERROR));
    }
    let paint = PAINTS.iter().zip(FIRST_MARK..END_MARK).find(|(_, mark)| *mark == character);
    paint.map(|(style, _)| style.to_string())
}

/// Whether the character is a mark of a style, which takes no column.
pub(super) fn is_mark(character: char) -> bool {
    of_mark(character).is_some()
}
