//! How many elements of a weight are pruned, and among which they compete.

use std::{fmt, str::FromStr};

use crate::{Error, Pattern, Result};

/// How many elements of a weight are pruned, and among which they compete.
///
/// Written `2:4`, `unstructured@0.5` (the whole weight) or `unstructured-rows@0.5` (each row).
///
/// ```
/// use twofour::{Pattern, select::Sparsity};
/// assert_eq!("2:4".parse::<Sparsity>()?, Sparsity::Groups(Pattern::TWO_FOUR));
/// assert_eq!("unstructured-rows@0.6".parse::<Sparsity>()?.to_string(), "unstructured-rows@0.6");
/// assert!("unstructured@1.5".parse::<Sparsity>().is_err());
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sparsity {
    /// N:M along rows: each group of `m` keeps its `n` best.
    Groups(Pattern),
    /// Each row loses this share of its elements, rounded down.
    Rows(f64),
    /// The whole weight loses this share of its elements, rounded down.
    Tensor(f64),
}

impl Sparsity {
    /// Returns the share of elements pruned, before rounding.
    ///
    /// # Errors
    /// [`Error::SparsityLevel`] where it is not from 0 to 1.
    pub fn level(self) -> Result<f64> {
        match self {
            Sparsity::Groups(pattern) => Ok(1.0 - pattern.density()),
            Sparsity::Rows(value) | Sparsity::Tensor(value) => {
                if (0.0..=1.0).contains(&value) {
                    Ok(value)
                } else {
                    Err(Error::SparsityLevel { value })
                }
            }
        }
    }
}

impl fmt::Display for Sparsity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sparsity::Groups(pattern) => pattern.fmt(f),
            Sparsity::Rows(level) => write!(f, "unstructured-rows@{level}"),
            Sparsity::Tensor(level) => write!(f, "unstructured@{level}"),
        }
    }
}

impl FromStr for Sparsity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |reason: String| Error::ParseSparsity { text: text.to_owned(), reason };
        let Some((name, level)) = text.split_once('@') else {
            return match text.parse() {
                Ok(pattern) => Ok(Sparsity::Groups(pattern)),
                Err(Error::ParsePattern { reason, .. }) => Err(bad(reason.to_owned())),
                Err(other) => Err(other),
            };
        };
        let level: f64 = level.parse().map_err(|_| bad(format!("`{level}` is not a number")))?;
        let sparsity = match name {
            "unstructured" => Sparsity::Tensor(level),
            "unstructured-rows" => Sparsity::Rows(level),
            _ => return Err(bad(format!("`{name}` is not a known pattern"))),
        };
        sparsity.level()?;
        Ok(sparsity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_and_nonsense_is_refused() {
        for text in ["2:4", "4:8", "unstructured@0.5", "unstructured-rows@0", "unstructured@1"] {
            assert_eq!(text.parse::<Sparsity>().unwrap().to_string(), text);
        }
        for text in ["", "5:4", "unstructured", "unstructured@", "unstructured@x", "block@0.5", "@0.5"] {
            let error = text.parse::<Sparsity>().unwrap_err().to_string();
            assert!(error.contains("unstructured@0.5"), "{error}");
        }
        for text in ["unstructured@-0.1", "unstructured-rows@1.01", "unstructured@nan", "unstructured@inf"] {
            assert!(matches!(text.parse::<Sparsity>(), Err(Error::SparsityLevel { .. })), "{text}");
        }
        assert_eq!(Sparsity::Groups(Pattern::new(1, 4).unwrap()).level().unwrap(), 0.75);
    }
}
