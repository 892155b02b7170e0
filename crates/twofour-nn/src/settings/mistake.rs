//! What is wrong with a recipe, where, and what is expected.

use std::fmt;

/// Where a value of a recipe comes from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Place {
    /// A line of the recipe, counted from 1.
    Line(usize),
    /// An override: `--set KEY=VALUE`.
    Override,
    /// Nowhere: the value is absent.
    Absent,
}

/// One mistake of a recipe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// Where it is.
    pub place: Place,
    /// The dotted key; empty for a syntax error.
    pub key: String,
    /// What was found and what is expected.
    pub problem: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.place {
            Place::Line(line) => write!(f, "line {line}: ")?,
            Place::Override => write!(f, "override: ")?,
            Place::Absent => {}
        }
        match self.key.as_str() {
            "" => write!(f, "{}", self.problem),
            key => write!(f, "{key}: {}", self.problem),
        }
    }
}

/// All mistakes of a recipe.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Mistakes {
    list: Vec<Mistake>,
}

impl Mistakes {
    /// The mistakes, in the order of the recipe's lines.
    pub fn iter(&self) -> impl Iterator<Item = &Mistake> {
        self.list.iter()
    }

    /// Number of mistakes.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn add(&mut self, place: Place, key: impl Into<String>, problem: impl Into<String>) {
        let mistake = Mistake { place, key: key.into(), problem: problem.into() };
        if !self.list.contains(&mistake) {
            self.list.push(mistake);
        }
    }

    /// Whether a key has a mistake already.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.list.iter().any(|mistake| mistake.key == key)
    }

    /// Returns the value if there is no mistake.
    pub(crate) fn or<T>(mut self, value: T) -> Result<T, Mistakes> {
        let line = |mistake: &Mistake| match mistake.place {
            Place::Line(line) => line,
            Place::Override | Place::Absent => usize::MAX,
        };
        self.list.sort_by_key(line);
        if self.list.is_empty() { Ok(value) } else { Err(self) }
    }
}

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} mistake{}", self.list.len(), if self.list.len() == 1 { "" } else { "s" })?;
        let mut separator = ": ";
        for mistake in &self.list {
            write!(f, "{separator}{mistake}")?;
            separator = "; ";
        }
        Ok(())
    }
}

impl std::error::Error for Mistakes {}
