//! Reading typed values out of a recipe's tables, with every mistake noted.

use std::{collections::BTreeMap, fmt::Display, str::FromStr};

use super::{
    Mistakes, Place,
    near::{near, suggestion},
    tree::{Node, Value},
};

/// A choice among names.
pub(crate) trait Named: Copy + 'static {
    /// All choices with their names.
    const ALL: &'static [(&'static str, Self)];
}

/// The name of a choice.
pub(crate) fn name_of<T: Named + PartialEq>(value: T) -> &'static str {
    T::ALL.iter().find(|(_, choice)| *choice == value).map_or("", |(name, _)| name)
}

/// A choice in files by its name.
pub(crate) mod named {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use super::{Named, name_of};

    pub(crate) fn serialize<T: Named + PartialEq, S: Serializer>(value: &T, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(name_of(*value))
    }

    pub(crate) fn deserialize<'de, T: Named, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
        let name = String::deserialize(from)?;
        T::ALL.iter().find(|(known, _)| *known == name).map(|(_, value)| *value).ok_or_else(|| {
            let names: Vec<&str> = T::ALL.iter().map(|(name, _)| *name).collect();
            D::Error::custom(format!("found {name:?}, expected one of {}", names.join(", ")))
        })
    }
}

/// An optional choice in files by its name.
pub(crate) mod named_option {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::{Named, name_of};

    #[derive(Deserialize)]
    #[serde(bound = "T: Named")]
    struct Present<T: Named>(#[serde(with = "super::named")] T);

    pub(crate) fn serialize<T: Named + PartialEq, S: Serializer>(value: &Option<T>, to: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => to.serialize_some(name_of(*value)),
            None => to.serialize_none(),
        }
    }

    pub(crate) fn deserialize<'de, T: Named, D: Deserializer<'de>>(from: D) -> Result<Option<T>, D::Error> {
        Ok(Option::<Present<T>>::deserialize(from)?.map(|Present(value)| value))
    }
}

/// A range of numbers, in words and as a test.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Range {
    pub(crate) words: &'static str,
    pub(crate) holds: fn(f64) -> bool,
}

/// A section of the recipe while it is read.
#[derive(Debug)]
pub(crate) struct Section<'a> {
    name: &'static str,
    place: Place,
    entries: Option<&'a BTreeMap<String, Node>>,
    known: Vec<&'static str>,
    /// Keys of the file that count as absent.
    ignored: &'static [&'static str],
}

impl<'a> Section<'a> {
    /// The section of the name; one that is absent has no entries.
    pub(crate) fn new(root: &'a BTreeMap<String, Node>, name: &'static str, mistakes: &mut Mistakes) -> Self {
        let node = root.get(name);
        let entries = match node.map(|node| &node.value) {
            None => None,
            Some(Value::Table(entries)) => Some(entries),
            Some(other) => {
                let place = node.map_or(Place::Absent, |node| node.place.clone());
                mistakes.add(place, name, format!("found {}, expected a section, [{name}]", other.describe()));
                None
            }
        };
        let place = node.map_or(Place::Absent, |node| node.place.clone());
        Self::of(name, place, entries)
    }

    fn of(name: &'static str, place: Place, entries: Option<&'a BTreeMap<String, Node>>) -> Self {
        Section { name, place, entries, known: vec![], ignored: &[] }
    }

    /// The name, as in `sparsity.override`.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// The place of the section; of one inside another that is absent, that of the other.
    pub(crate) fn own_place(&self) -> Place {
        self.place.clone()
    }

    /// The place of a key, or of its section where it is absent.
    pub(crate) fn place(&self, key: &str) -> Place {
        self.node(key).map_or(Place::Absent, |node| node.place.clone())
    }

    /// Ignores these keys where the recipe's file gives them; overrides stay.
    pub(crate) fn ignore_in_file(&mut self, keys: &'static [&'static str]) {
        self.ignored = keys;
    }

    fn node(&self, key: &str) -> Option<&'a Node> {
        let node = self.entries?.get(key)?;
        (node.place == Place::Override || !self.ignored.contains(&key)).then_some(node)
    }

    fn take(&mut self, key: &'static str) -> Option<&'a Node> {
        self.known.push(key);
        self.node(key)
    }

    pub(crate) fn path(&self, key: &str) -> String {
        format!("{}.{key}", self.name)
    }

    fn wrong(&self, key: &str, node: &Node, expected: &str, mistakes: &mut Mistakes) {
        let problem = format!("found {}, expected {expected}", node.value.describe());
        mistakes.add(node.place.clone(), self.path(key), problem);
    }

    /// Notes that a key is absent; returns the substitute with which checking goes on.
    pub(crate) fn required<T>(&self, key: &str, what: &str, value: Option<T>, substitute: T, m: &mut Mistakes) -> T {
        value.unwrap_or_else(|| {
            if self.place(key) == Place::Absent {
                m.add(self.place.clone(), self.path(key), format!("is missing: {what}"));
            }
            substitute
        })
    }

    /// A whole number within bounds.
    pub(crate) fn integer(&mut self, key: &'static str, least: u64, most: u64, m: &mut Mistakes) -> Option<u64> {
        let node = self.take(key)?;
        let value = match node.value {
            Value::Integer(Some(value)) => u64::try_from(value).ok().filter(|value| (least..=most).contains(value)),
            _ => None,
        };
        if value.is_none() {
            self.wrong(key, node, &format!("a whole number from {least} to {most}"), m);
        }
        value
    }

    /// A size from 1 up.
    pub(crate) fn size(&mut self, key: &'static str, m: &mut Mistakes) -> Option<usize> {
        self.integer(key, 1, super::LARGEST, m).map(|size| size as usize)
    }

    /// A number within a range.
    pub(crate) fn number(&mut self, key: &'static str, range: Range, m: &mut Mistakes) -> Option<f64> {
        let node = self.take(key)?;
        let value = match node.value {
            Value::Integer(Some(value)) => Some(value as f64),
            Value::Float(value) => Some(value),
            _ => None,
        };
        let value = value.filter(|value| value.is_finite() && (range.holds)(*value));
        if value.is_none() {
            self.wrong(key, node, range.words, m);
        }
        value
    }

    /// A number within a range, or the word, which is `None`.
    pub(crate) fn number_or(
        &mut self,
        key: &'static str,
        range: Range,
        word: &str,
        m: &mut Mistakes,
    ) -> Option<Option<f64>> {
        let node = self.node(key);
        let Some(Value::Text(text)) = node.map(|node| &node.value) else { return self.number(key, range, m).map(Some) };
        self.known.push(key);
        if text == word {
            return Some(None);
        }
        let place = self.place(key);
        let near = if near(text, [word], 1).is_empty() { String::new() } else { format!("; did you mean `{word}`?") };
        m.add(place, self.path(key), format!("found {text:?}, expected {} or \"{word}\"{near}", range.words));
        None
    }

    /// A list of numbers within a range, at least one.
    pub(crate) fn numbers(&mut self, key: &'static str, range: Range, m: &mut Mistakes) -> Option<Vec<f64>> {
        let node = self.take(key)?;
        let number = |node: &Node| match node.value {
            Value::Integer(Some(value)) => Some(value as f64),
            Value::Float(value) => Some(value),
            _ => None,
        };
        let valid = |item: &Node| number(item).filter(|value| value.is_finite() && (range.holds)(*value));
        match &node.value {
            Value::List(items) if !items.is_empty() => self.each(key, items, range.words, valid, m),
            _ => {
                self.wrong(key, node, &format!("a list of at least one number, each {}", range.words), m);
                None
            }
        }
    }

    /// The values of a list's elements. The first element that has none is noted with its number.
    fn each<T>(
        &self,
        key: &str,
        items: &[Node],
        expected: &str,
        value: impl Fn(&Node) -> Option<T>,
        m: &mut Mistakes,
    ) -> Option<Vec<T>> {
        let mut values = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            let Some(value) = value(item) else {
                let (found, number) = (item.value.describe(), index + 1);
                let problem = format!("found {found} as element {number} of the list, expected {expected}");
                m.add(item.place.clone(), self.path(key), problem);
                return None;
            };
            values.push(value);
        }
        Some(values)
    }

    /// A list of so many whole numbers within bounds. `what` says what they are.
    pub(crate) fn integers(
        &mut self,
        key: &'static str,
        (least, most): (u64, u64),
        (what, count): (&str, usize),
        m: &mut Mistakes,
    ) -> Option<Vec<u64>> {
        let node = self.take(key)?;
        let number = |node: &Node| match node.value {
            Value::Integer(Some(value)) => u64::try_from(value).ok().filter(|value| (least..=most).contains(value)),
            _ => None,
        };
        let problem = match &node.value {
            Value::List(items) if items.len() == count => {
                let expected = format!("a whole number from {least} to {most}");
                return self.each(key, items, &expected, number, m);
            }
            Value::List(items) => format!("found a list of {}", items.len()),
            other => format!("found {}", other.describe()),
        };
        let problem = format!("{problem}, expected {what}: a list of {count} whole numbers from {least} to {most}");
        m.add(node.place.clone(), self.path(key), problem);
        None
    }

    /// `true` or `false`.
    pub(crate) fn boolean(&mut self, key: &'static str, m: &mut Mistakes) -> Option<bool> {
        let node = self.take(key)?;
        let Value::Boolean(value) = node.value else {
            self.wrong(key, node, "true or false", m);
            return None;
        };
        Some(value)
    }

    /// A section inside this one, `[name]`; one that is absent has no entries.
    pub(crate) fn table(&mut self, key: &'static str, name: &'static str, m: &mut Mistakes) -> Section<'a> {
        let absent = Section::of(name, self.place.clone(), None);
        let Some(node) = self.take(key) else { return absent };
        match &node.value {
            Value::Table(entries) => Section::of(name, node.place.clone(), Some(entries)),
            _ => {
                self.wrong(key, node, &format!("a section, [{name}]"), m);
                absent
            }
        }
    }

    /// Whether the recipe has the section.
    pub(crate) fn is_present(&self) -> bool {
        self.entries.is_some()
    }

    /// The sections of a list of tables, `[[name]]`.
    pub(crate) fn tables(&mut self, key: &'static str, name: &'static str, m: &mut Mistakes) -> Vec<Section<'a>> {
        let Some(node) = self.take(key) else { return vec![] };
        let items = match &node.value {
            Value::List(items) => items.as_slice(),
            _ => std::slice::from_ref(node),
        };
        let mut sections = vec![];
        for item in items {
            match &item.value {
                Value::Table(entries) => {
                    sections.push(Section::of(name, item.place.clone(), Some(entries)));
                }
                _ => self.wrong(key, item, &format!("tables, [[{name}]]"), m),
            }
        }
        sections
    }

    /// One of the choices.
    pub(crate) fn choice<T: Named>(&mut self, key: &'static str, m: &mut Mistakes) -> Option<T> {
        let name = self.word(key, T::ALL.iter().map(|(name, _)| *name), m)?;
        T::ALL.iter().find(|(known, _)| *known == name).map(|(_, value)| *value)
    }

    /// One of some words.
    pub(crate) fn word(
        &mut self,
        key: &'static str,
        names: impl Iterator<Item = &'static str> + Clone,
        m: &mut Mistakes,
    ) -> Option<&'static str> {
        let node = self.take(key)?;
        let Value::Text(text) = &node.value else {
            let list: Vec<_> = names.map(|name| format!("\"{name}\"")).collect();
            self.wrong(key, node, &list.join(", "), m);
            return None;
        };
        let found = names.clone().find(|name| name == text);
        if found.is_none() {
            m.add(node.place.clone(), self.path(key), format!("found {text:?}; {}", suggestion(text, names)));
        }
        found
    }

    /// Text that is read as a value; `expected` says what it is.
    pub(crate) fn parsed<T: FromStr<Err: Display>>(
        &mut self,
        key: &'static str,
        expected: &str,
        m: &mut Mistakes,
    ) -> Option<T> {
        let node = self.take(key)?;
        let Value::Text(text) = &node.value else {
            self.wrong(key, node, expected, m);
            return None;
        };
        match text.parse() {
            Ok(value) => Some(value),
            Err(error) => {
                m.add(node.place.clone(), self.path(key), error.to_string());
                None
            }
        }
    }

    /// A list of texts, or one text, with their places.
    pub(crate) fn texts(&mut self, key: &'static str, m: &mut Mistakes) -> Option<Vec<(String, Place)>> {
        let node = self.take(key)?;
        let items = match &node.value {
            Value::List(items) => items.as_slice(),
            _ => std::slice::from_ref(node),
        };
        let mut texts = Vec::new();
        for item in items {
            match &item.value {
                Value::Text(text) if !text.is_empty() && !text.contains('\0') => {
                    texts.push((text.clone(), item.place.clone()));
                }
                _ => self.wrong(key, item, "text, or a list of texts", m),
            }
        }
        Some(texts)
    }

    /// Whether there is such a key, which then counts as known.
    pub(crate) fn skip(&mut self, key: &'static str) -> bool {
        self.take(key).is_some()
    }

    /// One text with its place.
    pub(crate) fn text(&mut self, key: &'static str, m: &mut Mistakes) -> Option<(String, Place)> {
        let node = self.take(key)?;
        match &node.value {
            Value::Text(text) if !text.is_empty() && !text.contains('\0') => Some((text.clone(), node.place.clone())),
            _ => {
                self.wrong(key, node, "text", m);
                None
            }
        }
    }

    /// Notes the keys that nothing has asked for.
    pub(crate) fn end(self, mistakes: &mut Mistakes) {
        for (key, node) in self.entries.into_iter().flatten() {
            if !self.known.contains(&key.as_str()) {
                let problem = format!("unknown key; {}", suggestion(key, self.known.iter().copied()));
                mistakes.add(node.place.clone(), format!("{}.{key}", self.name), problem);
            }
        }
    }
}
