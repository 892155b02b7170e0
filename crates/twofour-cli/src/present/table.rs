//! Tables of text.

use std::fmt;

use super::{
    escape,
    style::{self, STRONG, paint},
};

/// Which side of its column a cell keeps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows of cells under a heading, in columns as wide as their widest cell.
#[derive(Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table.
    pub(crate) fn new(columns: impl Into<Vec<(&'static str, Align)>>) -> Self {
        Table { columns: columns.into(), rows: Vec::new() }
    }

    /// Adds a row; cells that are missing are empty. Cells may hold colours; each is one line, whatever its text holds.
    pub(crate) fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(cells.into().iter().map(|cell| escape::line(cell)).collect());
    }
}

/// Columns that the text takes on a terminal: its characters without marks of styles.
fn width(text: &str) -> usize {
    text.chars().filter(|character| !style::is_mark(*character)).count()
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|i| {
                let cells = self.rows.iter().filter_map(|row| row.get(i)).map(|cell| width(cell));
                cells.chain([self.columns[i].0.chars().count()]).max().unwrap_or(0)
            })
            .collect();
        let line = |cells: &mut dyn Iterator<Item = String>| {
            let mut text = String::new();
            for ((cell, &(_, align)), &column) in cells.zip(&self.columns).zip(&widths) {
                let gap = " ".repeat(column.saturating_sub(width(&cell)));
                text += &match align {
                    Align::Left => format!("{cell}{gap}  "),
                    Align::Right => format!("{gap}{cell}  "),
                };
            }
            text.truncate(text.trim_end().len());
            text
        };
        write!(f, "{}", line(&mut self.columns.iter().map(|(name, _)| paint(STRONG, name))))?;
        for row in &self.rows {
            write!(f, "\n{}", line(&mut row.iter().cloned()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::present::style::GOOD;

    #[test]
    fn columns_line_up_whatever_the_colours() {
        let mut table = Table::new([("name", Align::Left), ("n", Align::Right)]);
        table.row([paint(GOOD, "ab"), "100".to_owned()]);
        table.row(["abcdef".to_owned(), "7".to_owned()]);
        let text = anstream::adapter::strip_str(&escape::text(&table.to_string())).to_string();
        assert_eq!(text, "name      n\nab      100\nabcdef    7");
    }

    #[test]
    fn a_cell_is_one_line() {
        let mut table = Table::new([("name", Align::Left), ("n", Align::Right)]);
        table.row(["a\nb\x1b[2J".to_owned(), "1".to_owned()]);
        let text = anstream::adapter::strip_str(&escape::text(&table.to_string())).to_string();
        assert_eq!(text, "name            n\na\\nb\\u{1b}[2J  1");
    }
}
