//! Every pattern by its name: how many elements of a weight are pruned, and among which they compete.

use std::{fmt, str::FromStr};

use crate::{Error, Pattern, Result};

/// A pattern of any kind: how many elements of a weight are pruned, and among which they compete.
///
/// | written | what is pruned |
/// |---|---|
/// | `2:4` | all but the 2 best of each 4 consecutive elements of a row ([`Pattern`]) |
/// | `64:2:8` | V:N:M: all but 4 of each 8 columns of each 64 rows, and of those 4 all but the 2 best of each row |
/// | `block:64x64@0.8` | 80 % of the blocks of 64 by 64 |
/// | `rows@0.25`, `columns@0.25` | 25 % of the rows, or of the columns |
/// | `unstructured@0.5` | 50 % of the weight's elements |
/// | `unstructured-rows@0.5` | 50 % of each row's elements |
///
/// A share of rows, columns, blocks or elements is rounded down to a whole number of them. The last blocks of a weight
/// have the rows and columns that are left. Blocks, rows and columns are compared by the mean score of their elements,
/// the columns of V:N:M by the sum over the rows. Ties go to the lower index.
///
/// ```
/// use twofour::{Pattern, select::Sparsity};
/// assert_eq!("2:4".parse::<Sparsity>()?, Sparsity::Groups(Pattern::TWO_FOUR));
/// let blocks = Sparsity::Blocks { rows: 64, cols: 64, level: 0.8 };
/// assert_eq!("block:64x64@0.8".parse::<Sparsity>()?, blocks);
/// assert_eq!(blocks.to_string(), "block:64x64@0.8");
/// assert!("unstructured@1.5".parse::<Sparsity>().is_err());
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sparsity {
    /// N:M along rows: each group of `m` keeps its `n` best.
    Groups(Pattern),
    /// V:N:M: each `v` rows keep [`Sparsity::VECTOR_COLUMNS`] of each `m` columns, and each row its `n` best of those
    /// (Castro et al., "VENOM", SC 2023).
    Vectors {
        /// Rows that keep the same columns.
        v: usize,
        /// N of M; N is at most 4, M at least 4.
        pattern: Pattern,
    },
    /// This share of the blocks is pruned.
    Blocks {
        /// Rows of a block.
        rows: usize,
        /// Columns of a block.
        cols: usize,
        /// The share.
        level: f64,
    },
    /// This share of the rows is pruned: output features of a weight `[out, in]`.
    WholeRows(f64),
    /// This share of the columns is pruned: input features of a weight `[out, in]`.
    WholeColumns(f64),
    /// Each row loses this share of its elements.
    EachRow(f64),
    /// The whole weight loses this share of its elements.
    Tensor(f64),
}

impl Sparsity {
    /// The columns that the rows of a V:N:M vector keep of each M.
    pub const VECTOR_COLUMNS: usize = 4;

    /// The share of elements pruned, before rounding.
    ///
    /// # Errors
    /// [`Error::SparsityLevel`] where it is not from 0 to 1; [`Error::Setting`] for blocks or vectors without elements,
    /// and for a V:N:M with N above 4 or M below 4.
    pub fn level(self) -> Result<f64> {
        let setting = |what, value: usize, expected| Err(Error::Setting { what, value: value as f64, expected });
        match self {
            Sparsity::Groups(pattern) => Ok(1.0 - pattern.density()),
            Sparsity::Vectors { v: 0, .. } => setting("V of V:N:M", 0, "at least 1"),
            Sparsity::Vectors { pattern, .. } if pattern.n() > Self::VECTOR_COLUMNS => {
                setting("N of V:N:M", pattern.n(), "at most 4, the columns that are kept of each M")
            }
            Sparsity::Vectors { pattern, .. } if pattern.m() < Self::VECTOR_COLUMNS => {
                setting("M of V:N:M", pattern.m(), "at least 4, the columns that are kept of each M")
            }
            Sparsity::Vectors { pattern, .. } => Ok(1.0 - pattern.density()),
            Sparsity::Blocks { rows, cols, .. } if rows == 0 || cols == 0 => {
                setting("rows or columns of a block", 0, "at least 1")
            }
            Sparsity::Blocks { level: value, .. }
            | Sparsity::WholeRows(value)
            | Sparsity::WholeColumns(value)
            | Sparsity::EachRow(value)
            | Sparsity::Tensor(value) => {
                if (0.0..=1.0).contains(&value) {
                    Ok(value)
                } else {
                    Err(Error::SparsityLevel { value })
                }
            }
        }
    }

    /// The same pattern with another share pruned; N:M and V:N:M, whose share is their own, as they are.
    #[must_use]
    pub fn with_level(self, level: f64) -> Self {
        match self {
            Sparsity::Groups(_) | Sparsity::Vectors { .. } => self,
            Sparsity::Blocks { rows, cols, .. } => Sparsity::Blocks { rows, cols, level },
            Sparsity::WholeRows(_) => Sparsity::WholeRows(level),
            Sparsity::WholeColumns(_) => Sparsity::WholeColumns(level),
            Sparsity::EachRow(_) => Sparsity::EachRow(level),
            Sparsity::Tensor(_) => Sparsity::Tensor(level),
        }
    }

    /// Whether what is kept of a row does not depend on the other rows.
    pub fn is_by_row(self) -> bool {
        matches!(self, Sparsity::Groups(_) | Sparsity::EachRow(_))
    }

    /// Rows and columns of the parts of a `[rows, cols]` weight that are pruned as a whole; `None` where single
    /// elements are.
    pub(crate) fn unit(self, rows: usize, cols: usize) -> Option<[usize; 2]> {
        match self {
            Sparsity::Blocks { rows, cols, .. } => Some([rows, cols]),
            Sparsity::WholeRows(_) => Some([1, cols.max(1)]),
            Sparsity::WholeColumns(_) => Some([rows.max(1), 1]),
            Sparsity::Groups(_) | Sparsity::Vectors { .. } | Sparsity::EachRow(_) | Sparsity::Tensor(_) => None,
        }
    }
}

impl From<Pattern> for Sparsity {
    fn from(pattern: Pattern) -> Self {
        Sparsity::Groups(pattern)
    }
}

impl fmt::Display for Sparsity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sparsity::Groups(pattern) => pattern.fmt(f),
            Sparsity::Vectors { v, pattern } => write!(f, "{v}:{pattern}"),
            Sparsity::Blocks { rows, cols, level } => write!(f, "block:{rows}x{cols}@{level}"),
            Sparsity::WholeRows(level) => write!(f, "rows@{level}"),
            Sparsity::WholeColumns(level) => write!(f, "columns@{level}"),
            Sparsity::EachRow(level) => write!(f, "unstructured-rows@{level}"),
            Sparsity::Tensor(level) => write!(f, "unstructured@{level}"),
        }
    }
}

impl FromStr for Sparsity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |reason: String| Error::ParseSparsity { text: text.to_owned(), reason };
        let count = |part: &str| {
            let is_plain = part.bytes().all(|byte| byte.is_ascii_digit());
            let count = part.parse::<usize>().ok().filter(|_| is_plain);
            count.ok_or_else(|| bad(format!("`{part}` is not a whole number")))
        };
        let groups = |text: &str| match text.parse::<Pattern>() {
            Err(Error::ParsePattern { reason, .. }) => Err(bad(reason.to_owned())),
            other => other,
        };
        let sparsity = match text.split_once('@') {
            Some((name, level)) => {
                // Without the sign of -0.
                let level = 0.0 + level.parse::<f64>().map_err(|_| bad(format!("`{level}` is not a number")))?;
                match name {
                    "unstructured" => Sparsity::Tensor(level),
                    "unstructured-rows" => Sparsity::EachRow(level),
                    "rows" => Sparsity::WholeRows(level),
                    "columns" => Sparsity::WholeColumns(level),
                    _ => {
                        let Some(shape) = name.strip_prefix("block:") else {
                            return Err(bad(format!("`{name}` is not a known pattern")));
                        };
                        let no_shape = || bad(format!("`{shape}` is not the rows and columns of a block, as in 64x64"));
                        let (rows, cols) = shape.split_once('x').ok_or_else(no_shape)?;
                        Sparsity::Blocks { rows: count(rows)?, cols: count(cols)?, level }
                    }
                }
            }
            None if text.matches(':').count() == 2 => {
                let (v, pattern) = text.split_once(':').unwrap_or_default();
                Sparsity::Vectors { v: count(v)?, pattern: groups(pattern)? }
            }
            None if text.starts_with("block:") || ["rows", "columns", "unstructured"].contains(&text) => {
                return Err(bad("the share to prune is missing, as in @0.5".to_owned()));
            }
            None => Sparsity::Groups(groups(text)?),
        };
        match sparsity.level() {
            Err(Error::Setting { what, value, expected }) => {
                Err(bad(format!("{what} is {value} and must be {expected}")))
            }
            other => other.map(|_| sparsity),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_sparsity() -> impl Strategy<Value = Sparsity> {
        let level = || prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0];
        let pattern = (1usize..=32, 0usize..32).prop_map(|(n, extra)| Pattern::new(n, (n + extra).min(32)).unwrap());
        prop_oneof![
            pattern.prop_map(Sparsity::Groups),
            (1usize..1000, 1usize..=4, 4usize..=32)
                .prop_map(|(v, n, m)| Sparsity::Vectors { v, pattern: Pattern::new(n, m).unwrap() }),
            (1usize..1000, 1usize..1000, level()).prop_map(|(rows, cols, level)| Sparsity::Blocks {
                rows,
                cols,
                level
            }),
            level().prop_map(Sparsity::WholeRows),
            level().prop_map(Sparsity::WholeColumns),
            level().prop_map(Sparsity::EachRow),
            level().prop_map(Sparsity::Tensor),
        ]
    }

    proptest! {
        #[test]
        fn every_pattern_is_read_as_it_is_written(sparsity in any_sparsity()) {
            prop_assert_eq!(sparsity.to_string().parse::<Sparsity>().unwrap(), sparsity);
        }

        #[test]
        fn any_text_is_a_pattern_or_an_error(text in "(block:|rows|columns|unstructured)?[0-9x:@.e-]{0,12}") {
            if let Ok(sparsity) = text.parse::<Sparsity>() {
                prop_assert_eq!(sparsity.to_string().parse::<Sparsity>().unwrap(), sparsity);
            }
        }
    }

    #[test]
    fn text_round_trips_and_nonsense_is_refused() {
        for text in [
            "2:4",
            "4:8",
            "16:32",
            "unstructured@0.5",
            "unstructured-rows@0",
            "unstructured@1",
            "64:2:8",
            "1:1:4",
            "block:64x64@0.8",
            "block:1x16@0.25",
            "rows@0.25",
            "columns@0.5",
        ] {
            assert_eq!(text.parse::<Sparsity>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "5:4",
            "unstructured",
            "unstructured@",
            "unstructured@x",
            "block@0.5",
            "@0.5",
            "rows",
            "rows:2@0.5",
            "block:64x64",
            "block:64@0.5",
            "block:0x4@0.5",
            "block:4x0@0.5",
            "block:-1x4@0.5",
            "block:4x4x4@0.5",
            "block:+4x4@0.5",
            "0:2:4",
            "4:5:8",
            "4:1:2",
            "2:2:4:8",
            "+4:2:4",
            "99999999999999999999:2:4",
            "row@0.5",
        ] {
            let error = text.parse::<Sparsity>().unwrap_err().to_string();
            assert!(error.contains("unstructured@0.5") && error.contains("block:64x64@0.8"), "{text}: {error}");
        }
        let outside = ["unstructured@-0.1", "unstructured-rows@1.01", "unstructured@nan", "rows@inf", "block:2x2@2"];
        for text in outside {
            assert!(matches!(text.parse::<Sparsity>(), Err(Error::SparsityLevel { .. })), "{text}");
        }
        assert_eq!(Sparsity::Groups(Pattern::new(1, 4).unwrap()).level().unwrap(), 0.75);
        assert_eq!("64:2:16".parse::<Sparsity>().unwrap().level().unwrap(), 0.875);
        assert_eq!("rows@-0".parse::<Sparsity>().unwrap().to_string(), "rows@0");
    }
}
