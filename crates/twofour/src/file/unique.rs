//! JSON objects whose names must not repeat.
//!
//! `serde_json` lets the last of two equal names win. In a file from a stranger that hides a tensor, so it is an error
//! here.

use std::{collections::HashSet, fmt, marker::PhantomData};

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

/// The entries of a JSON object in the order of the text; a repeated name is an error, and an error inside an entry
/// names it.
#[derive(Debug)]
pub(super) struct Unique<V>(pub(super) Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Unique<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(UniqueVisitor(PhantomData))
    }
}

struct UniqueVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for UniqueVisitor<V> {
    type Value = Unique<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut names = Names::default();
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            names.check(&name)?;
            let value = map.next_value().map_err(|e| in_entry(&name, e))?;
            entries.push((name, value));
        }
        Ok(Unique(entries))
    }
}

/// The names seen so far.
#[derive(Default)]
pub(super) struct Names(HashSet<String>);

impl Names {
    /// An error where the name was seen before.
    pub(super) fn check<E: serde::de::Error>(&mut self, name: &str) -> Result<(), E> {
        if self.0.insert(name.to_owned()) { Ok(()) } else { Err(E::custom(format!("{} is named twice", quoted(name)))) }
    }
}

/// The error with the entry's name in front.
pub(super) fn in_entry<E: serde::de::Error>(name: &str, error: E) -> E {
    E::custom(format!("{}: {error}", quoted(name)))
}

/// A name from a file, made safe to print: escaped, and cut where it is absurdly long.
pub(super) fn quoted(name: &str) -> String {
    const LONGEST: usize = 200;
    let mut shown: String = name.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if name.chars().nth(LONGEST).is_some() {
        shown.push('…');
    }
    format!("`{shown}`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_names_and_bad_entries_are_named() {
        let parse = |text: &str| serde_json::from_str::<Unique<u32>>(text);
        assert_eq!(parse(r#"{"b":1,"a":2}"#).unwrap().0, [("b".to_owned(), 1), ("a".to_owned(), 2)]);
        assert!(parse(r#"{"a":1,"\u0061":2}"#).unwrap_err().to_string().contains("`a` is named twice"));
        assert!(parse(r#"{"a":1,"b":-2}"#).unwrap_err().to_string().contains("`b`: invalid value"));
        assert!(parse("[1]").unwrap_err().to_string().contains("an object"));
    }

    #[test]
    fn names_are_safe_to_print() {
        assert_eq!(quoted("a\u{1b}[2J\n"), r"`a\u{1b}[2J\n`");
        assert!(quoted(&"x".repeat(1000)).chars().count() < 210);
    }
}
