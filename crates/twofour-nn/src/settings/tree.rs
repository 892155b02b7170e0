//! A TOML document whose every value knows where it comes from.

use std::collections::BTreeMap;

use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{Mistakes, Override, Place};

/// A value and its place.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) place: Place,
    pub(crate) value: Value,
}

/// A value of TOML.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    Text(String),
    /// `None` below -2^63 and above 2^63 - 1.
    Integer(Option<i64>),
    Float(f64),
    Boolean(bool),
    Date(String),
    List(Vec<Node>),
    Table(BTreeMap<String, Node>),
}

impl Value {
    /// What it is, for a message.
    pub(crate) fn describe(&self) -> String {
        match self {
            Value::Text(text) => format!("{text:?}"),
            Value::Integer(Some(value)) => value.to_string(),
            Value::Integer(None) => "an integer below -2^63 or above 2^63 - 1".to_owned(),
            Value::Float(value) => format!("{value:?}"),
            Value::Boolean(value) => value.to_string(),
            Value::Date(text) => format!("the date {text}"),
            Value::List(_) => "a list".to_owned(),
            Value::Table(_) => "a table".to_owned(),
        }
    }
}

/// Parses a recipe's text and applies the overrides, later ones last. Syntax errors are all reported; the rest is still
/// read.
pub(crate) fn parse(text: &str, overrides: &[Override], mistakes: &mut Mistakes) -> BTreeMap<String, Node> {
    let (document, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let place = error.span().map_or(Place::Absent, |span| Place::Line(line_of(text, span.start)));
        mistakes.add(place, "", error.message());
    }
    let line = |at: usize| Place::Line(line_of(text, at));
    let mut root = table(document.get_ref(), &line);
    for given in overrides {
        let (value, errors) = DeValue::parse_recoverable(&given.value);
        let node = match errors.first() {
            None => node(&value, &|_| Place::Override),
            // A shell leaves no quotes around a word: `--set sparsity.method=fst`.
            Some(_) if !given.value.starts_with(['[', '{', '"', '\'']) => {
                Node { place: Place::Override, value: Value::Text(given.value.clone()) }
            }
            Some(error) => {
                mistakes.add(Place::Override, given.key.join("."), error.message());
                continue;
            }
        };
        insert(&mut root, &given.key, node, &given.key, mistakes);
    }
    root
}

/// The number of the line, from 1, that a byte is in.
fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count()
}

fn table(table: &DeTable<'_>, place: &dyn Fn(usize) -> Place) -> BTreeMap<String, Node> {
    let entries = table.iter().map(|(key, value)| {
        let mut node = node(value, place);
        // A table's own span is that of its first header or key; a value's line is that of its key.
        node.place = place(key.span().start);
        (key.get_ref().to_string(), node)
    });
    entries.collect()
}

fn node(spanned: &Spanned<DeValue<'_>>, place: &dyn Fn(usize) -> Place) -> Node {
    let value = match spanned.get_ref() {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Integer(number) => Value::Integer(i64::from_str_radix(number.as_str(), number.radix()).ok()),
        DeValue::Float(number) => Value::Float(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(value) => Value::Boolean(*value),
        DeValue::Datetime(date) => Value::Date(date.to_string()),
        DeValue::Array(list) => Value::List(list.iter().map(|item| node(item, place)).collect()),
        DeValue::Table(entries) => Value::Table(table(entries, place)),
    };
    Node { place: place(spanned.span().start), value }
}

/// Puts an override's value at the place of its key; tables on the way are added where they are absent.
fn insert(into: &mut BTreeMap<String, Node>, key: &[String], node: Node, whole: &[String], mistakes: &mut Mistakes) {
    let Some((first, rest)) = key.split_first() else { return };
    if rest.is_empty() {
        into.insert(first.clone(), node);
        return;
    }
    let absent = || Node { place: Place::Override, value: Value::Table(BTreeMap::new()) };
    match &mut into.entry(first.clone()).or_insert_with(absent).value {
        Value::Table(entries) => insert(entries, rest, node, whole, mistakes),
        other => {
            let problem = format!("`{first}` is {}, not a table", other.describe());
            mistakes.add(Place::Override, whole.join("."), problem);
        }
    }
}
