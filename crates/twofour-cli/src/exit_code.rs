//! Exit codes and error messages.

use std::{error::Error, process::ExitCode};

use anstream::eprintln;
use anyhow::Result;

use crate::{
    exit::{Usage, UsageList, Verdict},
    interrupt,
    present::{
        escape,
        style::{ERROR, paint},
    },
};

/// Runs the command, prints an error to stderr and returns the exit code.
pub(crate) fn of(command: impl FnOnce() -> Result<Verdict>) -> ExitCode {
    match command() {
        Ok(Verdict::Yes) => ExitCode::SUCCESS,
        Ok(Verdict::No) => ExitCode::from(1),
        Err(error) if interrupt::is_cause_of(&error) => ExitCode::from(interrupt::EXIT_CODE),
        Err(error) => {
            eprintln!("{} {}", escape::text(&paint(ERROR, "error:")), escape::text(&message(error.as_ref())));
            if let Some(hint) = error.chain().find_map(hint) {
                eprintln!("  {hint}");
            }
            ExitCode::from(if error.is::<Usage>() || error.is::<UsageList>() { 2 } else { 1 })
        }
    }
}

/// Returns the error's message, the items of a list, and the messages of causes that it does not already contain: a
/// line for each, whatever names and paths are in them.
fn message(error: &(dyn Error + 'static)) -> String {
    let mut text = escape::line(&error.to_string());
    for item in error.downcast_ref::<UsageList>().map_or(&[][..], |list| &list.items) {
        text += &format!("\n  {}", escape::line(item));
    }
    let mut source = error.source();
    while let Some(cause) = source {
        let words = escape::line(&cause.to_string());
        if !text.contains(&words) {
            text += &format!("\n  because: {words}");
        }
        source = cause.source();
    }
    text
}

/// Returns the options that answer an error of the library, which names none.
fn hint(error: &(dyn Error + 'static)) -> Option<&'static str> {
    let boxed = || error.downcast_ref::<Box<twofour::Error>>().map(Box::as_ref);
    match error.downcast_ref().or_else(boxed)? {
        twofour::Error::Exists { .. } => Some("--force replaces it"),
        twofour::Error::NegativeZeros { .. } => Some("without --exact they become +0.0"),
        twofour::Error::TooManyKept { .. } => {
            Some("`compress` prunes such weights with --prune and leaves them dense with --keep-dense")
        }
        twofour::Error::AlongColumns => Some("--keep-dense leaves such weights dense, --exclude one of them"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn a_cause_that_is_told_already_is_not_told_again() {
        let io = std::io::Error::other("no such thing");
        let error = twofour::Error::Io { path: "a".into(), action: "opening", source: io };
        let error = anyhow::Error::from(error).context("reading the model");
        assert_eq!(message(error.as_ref()), "reading the model\n  because: a: opening: no such thing");
    }

    #[test]
    fn options_are_told_for_an_error_in_a_tensor_of_a_file() {
        let error = twofour::Error::NegativeZeros { count: 2 }.in_tensor("w").in_file("a");
        let error = anyhow::Error::from(error).context("compressing");
        let hint = error.chain().find_map(hint);
        assert!(hint.is_some_and(|hint| hint.contains("--exact")), "{hint:?}");
        assert!(!message(error.as_ref()).contains("--"));
    }

    #[test]
    fn a_message_is_one_line_whatever_names_are_in_it() {
        let error = anyhow!("c\n  because: d").context("a\nb\x1b[2J");
        assert_eq!(message(error.as_ref()), "a\\nb\\u{1b}[2J\n  because: c\\n  because: d");
        let list = UsageList { heading: "a\nb: 2 mistakes".to_owned(), items: vec!["c\td".to_owned(), "e".to_owned()] };
        assert_eq!(message(&list), "a\\nb: 2 mistakes\n  c\\td\n  e");
    }

    #[test]
    fn the_chain_is_told_from_the_top() {
        let error = Err::<(), _>(anyhow!("third")).context("second").context("first").unwrap_err();
        assert_eq!(message(error.as_ref()), "first\n  because: second\n  because: third");
    }
}
