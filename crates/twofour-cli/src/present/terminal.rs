//! How wide lines may be.

use terminal_size::{Width, terminal_size_of};

/// The width of files, pipes and terminals that do not tell theirs.
const USUAL: usize = 80;

/// A narrower terminal is written to as if it had this many columns: no table fits into fewer.
const LEAST: usize = 40;

/// Columns of the terminal that stdout is, and 80 where it is none.
pub(crate) fn columns() -> usize {
    terminal_size_of(std::io::stdout()).map_or(USUAL, |(Width(columns), _)| usize::from(columns).max(LEAST))
}

/// Columns of the terminal that stderr is, and 80 where it is none.
pub(super) fn columns_of_stderr() -> usize {
    terminal_size_of(std::io::stderr()).map_or(USUAL, |(Width(columns), _)| usize::from(columns).max(LEAST))
}
