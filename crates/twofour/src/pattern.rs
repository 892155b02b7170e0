//! The rule that a mask obeys, and the axis along which it does.

use std::{fmt, str::FromStr};

use crate::{Error, Result};

/// The rule that a mask obeys, written `"2:4"`.
///
/// ```
/// use twofour::Pattern;
/// let pattern: Pattern = "2:4".parse()?;
/// assert_eq!(pattern, Pattern::TWO_FOUR);
/// assert_eq!(pattern.density(), 0.5);
/// assert!("5:4".parse::<Pattern>().is_err());
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pattern {
    n: u8,
    m: u8,
}

impl Pattern {
    /// Two of four: what the tensor cores of NVIDIA GPUs from Ampere on multiply at up to twice the dense rate.
    pub const TWO_FOUR: Pattern = Pattern { n: 2, m: 4 };

    /// The largest group length.
    pub const MAX_M: usize = 64;

    /// At most `n` kept elements in each group of `m` consecutive ones, `1 <= n <= m <= 64`.
    ///
    /// # Errors
    /// [`Error::ParsePattern`] where `n` or `m` is out of range.
    pub fn new(n: usize, m: usize) -> Result<Self> {
        let bad = |reason| Err(Error::ParsePattern { text: format!("{n}:{m}"), reason });
        match (n, m) {
            (_, 0) | (0, _) => bad("neither N nor M may be 0"),
            (_, m) if m > Self::MAX_M => bad("M is larger than 64"),
            (n, m) if n > m => bad("N is larger than M"),
            // Both fit: m <= 64.
            (n, m) => Ok(Pattern { n: n as u8, m: m as u8 }),
        }
    }

    /// How many elements of a group may be kept.
    pub fn n(self) -> usize {
        usize::from(self.n)
    }

    /// Elements in a group.
    pub fn m(self) -> usize {
        usize::from(self.m)
    }

    /// The share of elements that a full mask of this pattern keeps.
    pub fn density(self) -> f64 {
        f64::from(self.n) / f64::from(self.m)
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.n, self.m)
    }
}

impl FromStr for Pattern {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |reason| Error::ParsePattern { text: text.to_owned(), reason };
        let (n, m) = text.split_once(':').ok_or_else(|| bad("there is no colon"))?;
        let number = |s: &str| s.parse::<usize>().map_err(|_| bad("N and M must be whole numbers"));
        Pattern::new(number(n)?, number(m)?)
    }
}

/// The direction in which the groups of a matrix run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Axis {
    /// Groups are consecutive elements of a row: for a Linear weight `[out, in]` the reduction axis, the one that
    /// sparse kernels need.
    Row,
    /// Groups are consecutive elements of a column: what the transposed product (the input gradient) needs.
    Column,
}

impl Axis {
    /// "row" or "column": what a line of groups along this axis is called.
    pub fn line_name(self) -> &'static str {
        match self {
            Axis::Row => "row",
            Axis::Column => "column",
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.line_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips_and_nonsense_is_refused() {
        for text in ["2:4", "1:2", "4:8", "1:1", "64:64"] {
            assert_eq!(text.parse::<Pattern>().unwrap().to_string(), text);
        }
        for text in
            ["", "2", "2:", ":4", "0:4", "2:0", "3:2", "2:65", "-1:4", "2:4:8", "two:four", "99999999999999999999:4"]
        {
            let error = text.parse::<Pattern>().unwrap_err().to_string();
            assert!(error.contains("for example 2:4"), "{error}");
        }
    }
}
