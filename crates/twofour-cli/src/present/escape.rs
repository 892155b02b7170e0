//! What must not reach a terminal from files, paths and models: characters that steer it, or that change the order of
//! what is read.

use std::path::Path;

use super::style;

/// Returns whether a character steers a terminal or reorders text: controls of ASCII and of Latin-1, line separators,
/// marks and overrides of direction.
pub(super) fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{061C}' | '\u{200E}' | '\u{200F}' | '\u{2028}'..='\u{202E}' | '\u{2066}'..='\u{2069}')
}

/// Returns the text for a terminal: hidden characters, but for line breaks and tabs, as Rust writes them (`\u{1b}`),
/// and marks of styles as the terminal's.
pub(crate) fn text(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        match style::of_mark(character) {
            Some(style) => shown += &style,
            None if is_hidden(character) && !matches!(character, '\n' | '\t') => {
                shown.extend(character.escape_default())
            }
            None => shown.push(character),
        }
    }
    shown
}

/// Returns the text for one line, as in a cell of a table: every hidden character escaped; marks of styles stay.
pub(crate) fn line(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        if is_hidden(character) { shown.extend(character.escape_default()) } else { shown.push(character) }
    }
    shown
}

/// Returns the path for a line: what is not UTF-8 in it as replacement characters.
pub fn path(path: &Path) -> String {
    line(&path.display().to_string())
}

/// Returns JSON whose strings hold no hidden character raw. JSON itself only asks that for those below U+0020.
pub(crate) fn json(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for character in text.chars() {
        // Outside strings JSON has line breaks and spaces only.
        if is_hidden(character) && character != '\n' {
            shown += &format!("\\u{:04x}", u32::from(character));
        } else {
            shown.push(character);
        }
    }
    shown
}

/// Bytes of generated text, which come in pieces that may end inside a character.
#[derive(Debug, Default)]
pub(crate) struct Stream {
    /// The begun character.
    rest: Vec<u8>,
}

impl Stream {
    /// Returns the text of the bytes so far for a terminal; what is not UTF-8 is a replacement character.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        self.rest.extend_from_slice(bytes);
        let mut shown = String::new();
        let mut taken = 0;
        for chunk in self.rest.utf8_chunks() {
            shown += &text(chunk.valid());
            taken += chunk.valid().len();
            let invalid = chunk.invalid();
            let is_begun = taken + invalid.len() == self.rest.len() && is_begun(invalid);
            if invalid.is_empty() || is_begun {
                break;
            }
            shown.push(char::REPLACEMENT_CHARACTER);
            taken += invalid.len();
        }
        self.rest.drain(..taken);
        shown
    }
}

/// Whether more bytes may make a character of these.
fn is_begun(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::present::style::{GOOD, paint};

    #[test]
    fn what_steers_a_terminal_is_shown_and_not_done() {
        let hostile = "a\x1b[31m\x07\u{9b}2J\u{7f}\u{202e}\r\n\tb";
        assert_eq!(text(hostile), "a\\u{1b}[31m\\u{7}\\u{9b}2J\\u{7f}\\u{202e}\\r\n\tb");
        assert_eq!(line(hostile), "a\\u{1b}[31m\\u{7}\\u{9b}2J\\u{7f}\\u{202e}\\r\\n\\tb");
        assert_eq!(text("Größe 2:4 – 名前 😀"), "Größe 2:4 – 名前 😀");
    }

    #[test]
    fn styles_of_our_own_reach_the_terminal() {
        let shown = text(&format!("{} {}", paint(GOOD, "yes"), "\x1b[32mno"));
        assert_eq!(shown, format!("{GOOD}yes{GOOD:#} \\u{{1b}}[32mno"));
    }

    #[test]
    fn json_keeps_its_meaning() {
        let value = serde_json::json!({"a\u{7f}": "\u{9b}\u{202e}\x1b\n"});
        let shown = json(&serde_json::to_string_pretty(&value).unwrap());
        assert!(shown.chars().all(|c| c == '\n' || !is_hidden(c)), "{shown}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }

    #[test]
    fn characters_in_pieces_are_put_together_again() {
        let mut stream = Stream::default();
        let told: String = "\u{9b}é名😀".bytes().map(|byte| stream.push(&[byte])).collect();
        assert_eq!(told, "\\u{9b}é名😀");
        assert_eq!(stream.push(b"\xc3"), "");
        assert_eq!(stream.push(b"\n"), "\u{fffd}\n");
        assert_eq!(stream.push(b"\x9b2J\xff\xf0\x9f"), "\u{fffd}2J\u{fffd}");
        assert_eq!(stream.push(b"\x98\x80."), "😀.");
    }
}
