//! Settings that one training method alone has.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Mistakes, Range, Section};

/// A setting that one training method alone has.
#[derive(Debug, Clone, Copy)]
pub struct OwnSetting {
    /// The key.
    pub key: &'static str,
    /// What it may be.
    pub kind: OwnKind,
    /// The number where a recipe gives none, unless it depends on the run.
    pub default: Option<f64>,
    /// The reason why other methods do not have it.
    pub elsewhere: &'static str,
}

/// What a setting of a method may be.
#[derive(Debug, Clone, Copy)]
pub enum OwnKind {
    /// A number for which the function holds; what it is, in words.
    Number(&'static str, fn(f64) -> bool),
    /// One of these words.
    Word(&'static [&'static str]),
    /// `true` or `false`.
    Flag,
}

/// A value of a setting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum OwnValue {
    /// `true` or `false`.
    Flag(bool),
    /// A number.
    Number(f64),
    /// A word.
    Word(String),
}

/// Values of settings that one method alone has, by their keys.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OwnSettings {
    values: BTreeMap<String, OwnValue>,
}

impl OwnSettings {
    /// The number of a key, where it is given.
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.values.get(key)? {
            OwnValue::Number(number) => Some(*number),
            _ => None,
        }
    }

    /// The word of a key, where it is given.
    pub fn word(&self, key: &str) -> Option<&str> {
        match self.values.get(key)? {
            OwnValue::Word(word) => Some(word),
            _ => None,
        }
    }

    /// Whether a key is given.
    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// Whether none is given.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Gives a key a value, in place of the one that it had.
    pub fn set(&mut self, key: &str, value: OwnValue) {
        self.values.insert(key.to_owned(), value);
    }

    /// These, and for the rest those of `others`.
    #[must_use]
    pub fn over(&self, others: &OwnSettings) -> OwnSettings {
        let mut values = others.values.clone();
        values.extend(self.values.clone());
        OwnSettings { values }
    }

    /// What a section has of the settings.
    pub(crate) fn read<'a>(
        settings: impl Iterator<Item = &'a OwnSetting>,
        section: &mut Section<'_>,
        m: &mut Mistakes,
    ) -> Self {
        let mut own = OwnSettings::default();
        for &OwnSetting { key, kind, .. } in settings {
            let value = match kind {
                OwnKind::Number(words, holds) => section.number(key, Range { words, holds }, m).map(OwnValue::Number),
                OwnKind::Word(words) => {
                    section.word(key, words.iter().copied(), m).map(|word| OwnValue::Word(word.to_owned()))
                }
                OwnKind::Flag => section.boolean(key, m).map(OwnValue::Flag),
            };
            if let Some(value) = value {
                own.set(key, value);
            }
        }
        own
    }
}
