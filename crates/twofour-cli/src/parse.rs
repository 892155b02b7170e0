//! Reading the command line, and printing what is wrong with it.

use std::{error::Error as _, io::Write as _};

use clap::{
    Parser,
    builder::StyledStr,
    error::{ContextKind, ContextValue, Error},
};

use crate::present::escape;

/// Returns the arguments of this process. Help, the version and errors are printed, and end the process.
pub fn arguments<A: Parser>() -> A {
    A::try_parse().unwrap_or_else(|error| {
        let (code, is_error) = (error.exit_code(), error.use_stderr());
        let text = shown(error);
        // It is no error where nobody reads it.
        let _ = if is_error { write!(anstream::stderr(), "{text}") } else { write!(anstream::stdout(), "{text}") };
        std::process::exit(code)
    })
}

/// What clap prints, with styles of its own; what it repeats of the arguments is escaped.
fn shown(mut error: Error) -> String {
    let repeated: Vec<(ContextKind, ContextValue)> =
        error.context().filter_map(|(kind, value)| Some((kind, escaped(kind, value)?))).collect();
    for (kind, value) in repeated {
        error.insert(kind, value);
    }
    let text = error.render().ansi().to_string();
    match error.source().map(ToString::to_string) {
        // The message of a value's own parser.
        Some(reason) => text.replace(&reason, &escape::line(&reason)),
        None => text,
    }
}

/// The value escaped; none where it repeats no argument.
fn escaped(kind: ContextKind, value: &ContextValue) -> Option<ContextValue> {
    match value {
        // Its lines are clap's.
        _ if kind == ContextKind::Usage => None,
        ContextValue::String(text) => Some(ContextValue::String(escape::line(text))),
        ContextValue::Strings(texts) => {
            Some(ContextValue::Strings(texts.iter().map(|text| escape::line(text)).collect()))
        }
        // Without its styles, which cannot be told from an argument's escape sequences.
        ContextValue::StyledStrs(texts) => {
            let plain = |text: &StyledStr| StyledStr::from(escape::line(&text.to_string()));
            Some(ContextValue::StyledStrs(texts.iter().map(plain).collect()))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::Arguments;

    #[test]
    fn what_clap_repeats_of_the_arguments_is_escaped() {
        const HOSTILE: &str = "a\x1b[2J\u{9b}2J\u{202e}\r\n  error: b";
        let option = format!("--{HOSTILE}");
        let valued = |option: &str| format!("{option}={HOSTILE}");
        for arguments in [
            vec![HOSTILE],
            vec!["check", &option],
            vec!["check", "x", HOSTILE],
            vec!["check", &valued("--pattern")],
            vec!["check", &valued("--axis")],
            vec!["check", &valued("--places")],
            vec!["eval", "m", &valued("--limit")],
            vec!["quantize", "m", "-o", "n", &valued("--group")],
            vec!["train", "r", &valued("--set")],
            vec!["train", "r", &valued("--device")],
            vec!["kernels", &valued("--color")],
            vec![&valued("--quiet")],
        ] {
            let error = Arguments::try_parse_from([&["twofour"], &arguments[..]].concat()).unwrap_err();
            let text = shown(error);
            for hidden in ["\x1b[2J", "\u{9b}", "\u{202e}", "\r", "\n  error: b"] {
                assert!(!text.contains(hidden), "{arguments:?}: {text:?}");
            }
            assert!(text.contains("\\u{9b}2J"), "{arguments:?}: {text:?}");
        }
    }
}
