//! Tables of text, as wide as the terminal at most.

use std::fmt;

use super::{
    escape,
    style::{self, STRONG, paint},
    terminal,
    wrap::wrapped,
};

/// Which side of its column a cell keeps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Spaces between columns.
const GAP: usize = 2;

/// Words are wrapped in no less.
const MIN_WORDS: usize = 16;

/// Rows of cells under a heading, in columns as wide as their widest cell.
///
/// Where that is wider than the terminal, words are wrapped: those of headings, then those of the columns of words; a
/// name in the first column is put on a line of its own. What still does not fit follows in further blocks, whose rows
/// begin with the words of the first columns again. A column without any cell is left out.
#[derive(Debug)]
pub struct Table {
    columns: Vec<Column>,
    rows: Vec<Row>,
}

#[derive(Debug)]
struct Column {
    name: String,
    align: Align,
}

#[derive(Debug)]
struct Row {
    cells: Vec<Cell>,
    /// Words in the place of the other cells.
    note: Option<Cell>,
}

/// A text, and the marks of its style before and after it.
#[derive(Debug, Default, Clone)]
struct Cell {
    text: String,
    style: [String; 2],
}

impl Cell {
    /// A cell is one line, whatever its text holds.
    fn of(painted: &str) -> Self {
        let line = escape::line(painted);
        let is_text = |character: &char| !style::is_mark(*character);
        let before = line.chars().take_while(|character| !is_text(character)).collect();
        let after = line.chars().rev().take_while(|character| !is_text(character)).collect();
        Cell { text: line.chars().filter(is_text).collect(), style: [before, after] }
    }

    fn width(&self) -> usize {
        self.text.chars().count()
    }

    fn painted(&self, line: &str) -> String {
        let [before, after] = &self.style;
        format!("{before}{line}{after}")
    }
}

impl Table {
    /// An empty table.
    pub fn new<N: Into<String>>(columns: impl IntoIterator<Item = (N, Align)>) -> Self {
        let columns = columns.into_iter().map(|(name, align)| Column { name: name.into(), align }).collect();
        Table { columns, rows: Vec::new() }
    }

    /// An empty table with columns of words, and behind them columns of numbers.
    pub fn of<W: Into<String>, N: Into<String>>(
        words: impl IntoIterator<Item = W>,
        numbers: impl IntoIterator<Item = N>,
    ) -> Self {
        let words = words.into_iter().map(|name| (name.into(), Align::Left));
        Self::new(words.chain(numbers.into_iter().map(|name| (name.into(), Align::Right))))
    }

    /// Adds a row; cells that are missing are empty. Cells may be painted.
    pub fn row(&mut self, cells: impl Into<Vec<String>>) {
        self.rows.push(Row { cells: cells.into().iter().map(|cell| Cell::of(cell)).collect(), note: None });
    }

    /// Adds a row with a note in the place of the cells that are missing.
    pub fn row_with_note(&mut self, cells: impl Into<Vec<String>>, note: &str) {
        self.row(cells);
        if let Some(row) = self.rows.last_mut() {
            row.note = Some(Cell::of(note));
        }
    }

    /// The table in lines of at most `limit` characters, if that is possible.
    fn within(&self, limit: usize) -> String {
        let has_cells =
            |column: &usize| self.rows.iter().any(|row| row.cells.get(*column).is_some_and(|c| c.width() > 0));
        let shown: Vec<usize> = (0..self.columns.len()).filter(|c| self.rows.is_empty() || has_cells(c)).collect();
        let is_words = |column: &&usize| self.columns[**column].align == Align::Left;
        let keys: Vec<usize> = shown.iter().take_while(is_words).copied().collect();
        let mut blocks = Vec::new();
        let mut rest = shown.as_slice();
        while !rest.is_empty() {
            let repeated = if blocks.is_empty() { &[][..] } else { &keys[..] };
            let with = |count: usize| [repeated, &rest[..count]].concat();
            // At least one column is in each block.
            let count = (1..=rest.len()).rev().find(|count| self.least(&with(*count)) <= limit).unwrap_or(1);
            let columns = with(count);
            rest = &rest[count..];
            blocks.push(self.block(&columns, rest.is_empty(), limit));
        }
        blocks.join("\n\n")
    }

    /// Characters that the columns take at least.
    fn least(&self, columns: &[usize]) -> usize {
        let widths = columns.iter().map(|column| self.bounds(*column)[0]).sum::<usize>();
        widths + GAP * columns.len().saturating_sub(1)
    }

    /// The least and the most characters of a column.
    fn bounds(&self, column: usize) -> [usize; 2] {
        let Column { name, align } = &self.columns[column];
        let cells = self.rows.iter().filter_map(|row| row.cells.get(column)).map(Cell::width).max().unwrap_or(0);
        let word = name.split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
        let least = match align {
            Align::Left => cells.min(MIN_WORDS).max(word),
            Align::Right => cells.max(word),
        };
        [least, cells.max(name.chars().count())]
    }

    /// Rows of some of the columns, the last of the table or not, in lines of at most `limit` characters.
    fn block(&self, columns: &[usize], is_last: bool, limit: usize) -> String {
        let bounds: Vec<[usize; 2]> = columns.iter().map(|column| self.bounds(*column)).collect();
        let mut widths: Vec<usize> = bounds.iter().map(|[_, most]| *most).collect();
        let gaps = GAP * columns.len().saturating_sub(1);
        // Where the last note begins.
        let noted = self.rows.iter().filter(|row| row.note.is_some());
        let starts = noted.filter_map(|row| columns.iter().position(|column| *column >= row.cells.len()));
        let start = starts.max().unwrap_or(0);
        let is_too_wide = |widths: &[usize]| {
            let before_note = widths[..start].iter().map(|width| width + GAP).sum::<usize>();
            widths.iter().sum::<usize>() + gaps > limit || start > 0 && before_note + MIN_WORDS > limit
        };
        while is_too_wide(&widths) {
            // Where a word of a heading can be wrapped no number is; of words the longest are wrapped first.
            let shrinkable = (0..widths.len()).filter(|i| widths[*i] > bounds[*i][0]);
            let heading = |i: &usize| (self.columns[columns[*i]].align == Align::Right, widths[*i]);
            let Some(widest) = shrinkable.max_by_key(heading) else { break };
            widths[widest] -= 1;
        }
        let mut lines = Vec::new();
        let heading: Vec<Cell> = columns.iter().map(|c| Cell::of(&paint(STRONG, &self.columns[*c].name))).collect();
        self.lines(&mut lines, columns, &widths, &heading, None, limit);
        for row in &self.rows {
            let cells: Vec<Cell> = columns.iter().map(|c| row.cells.get(*c).cloned().unwrap_or_default()).collect();
            // The note begins at the first column that the row has no cell for.
            let begin = columns.iter().position(|column| *column >= row.cells.len());
            let begin = begin.or(is_last.then_some(columns.len()));
            let note = begin.zip(row.note.as_ref());
            self.lines(&mut lines, columns, &widths, &cells, note, limit);
        }
        lines.join("\n")
    }

    /// Adds the lines of a row.
    fn lines(
        &self,
        lines: &mut Vec<String>,
        columns: &[usize],
        widths: &[usize],
        cells: &[Cell],
        note: Option<(usize, &Cell)>,
        limit: usize,
    ) {
        let count = note.map_or(cells.len(), |(at, _)| at);
        let mut parts: Vec<(usize, Align, &Cell)> =
            (0..count).map(|i| (widths[i], self.columns[columns[i]].align, &cells[i])).collect();
        if let Some((at, note)) = note {
            let begin = widths[..at].iter().map(|width| width + GAP).sum::<usize>();
            parts.push((limit.saturating_sub(begin).max(MIN_WORDS), Align::Left, note));
        }
        let mut wrapped: Vec<Vec<String>> = parts.iter().map(|(width, _, cell)| wrapped(&cell.text, *width)).collect();
        // A name stays whole, where a line has room for it.
        if let (Some((_, Align::Left, name)), Some(first)) = (parts.first(), wrapped.first_mut())
            && first.len() > 1
            && name.width() <= limit
        {
            lines.push(name.painted(&name.text));
            first.clear();
        }
        let height = wrapped.iter().map(Vec::len).max().unwrap_or(0);
        for line in 0..height {
            let mut text = String::new();
            for ((width, align, cell), of_cell) in parts.iter().zip(&wrapped) {
                let part = of_cell.get(line).map_or("", String::as_str);
                let gap = " ".repeat(width.saturating_sub(part.chars().count()));
                let part = if part.is_empty() { String::new() } else { cell.painted(part) };
                text += &match align {
                    Align::Left => format!("{part}{gap}  "),
                    Align::Right => format!("{gap}{part}  "),
                };
            }
            lines.push(text.trim_end().to_owned());
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.within(terminal::columns()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::present::style::GOOD;

    fn plain(table: &Table, limit: usize) -> String {
        anstream::adapter::strip_str(&escape::text(&table.within(limit))).to_string()
    }

    #[test]
    fn columns_line_up_whatever_the_colors() {
        let mut table = Table::of(["name"], ["n"]);
        table.row([paint(GOOD, "ab"), "100".to_owned()]);
        table.row(["abcdef".to_owned(), "7".to_owned()]);
        assert_eq!(plain(&table, 80), "name      n\nab      100\nabcdef    7");
        assert!(table.within(80).contains(&paint(GOOD, "ab")));
    }

    #[test]
    fn words_are_wrapped_and_numbers_are_not() {
        let mut table = Table::new([
            ("layers", Align::Left),
            ("dtype", Align::Left),
            ("size in memory", Align::Right),
            ("", Align::Left),
        ]);
        let name = "model.layers.*.self_attn.q_proj.weight (32)";
        table.row([name.to_owned(), "BF16".to_owned(), "32.0 MiB".to_owned(), paint(GOOD, "2:4 compressed, 56 dense")]);
        let expected = "\
layers                 dtype   size in
                                memory
model.layers.*.self_attn.q_proj.weight (32)
                       BF16   32.0 MiB  2:4 compressed, 56
                                        dense";
        assert_eq!(plain(&table, 60), expected);
        for limit in 48..120 {
            assert!(plain(&table, limit).lines().all(|line| line.chars().count() <= limit), "{limit}");
        }
    }

    #[test]
    fn a_note_takes_the_place_of_missing_cells() {
        let mut table = Table::of(["layers"], ["density", "kept L1"]);
        table.row(["up".to_owned(), "100.0 %".to_owned(), "71.0 %".to_owned()]);
        table.row_with_note(["embed".to_owned()], "kept: embedding, which is not pruned");
        let expected =
            "layers  density  kept L1\nup      100.0 %   71.0 %\nembed   kept: embedding, which is not\n        pruned";
        assert_eq!(plain(&table, 40), expected);
    }

    #[test]
    fn long_names_leave_room_for_notes() {
        let mut table = Table::of(["layers"], ["density"]);
        table.row(["model.layers.*.self_attn.q_proj.weight".to_owned(), "1 %".to_owned()]);
        table.row_with_note(["model.embed_tokens.weight".to_owned()], "kept: not named *.weight");
        let text = plain(&table, 50);
        assert!(text.lines().all(|line| line.chars().count() <= 50), "{text}");
    }

    #[test]
    fn what_does_not_fit_follows_in_a_block_of_its_own_and_empty_columns_are_left_out() {
        let names: Vec<String> = (0..12).map(|i| format!("number {i}")).collect();
        let mut table = Table::new(
            [("model".to_owned(), Align::Left), ("empty".to_owned(), Align::Right)]
                .into_iter()
                .chain(names.iter().map(|name| (name.clone(), Align::Right))),
        );
        let mut cells = vec!["vit-l".to_owned(), String::new()];
        cells.extend((0..12).map(|i| format!("{i}23.45 ms")));
        table.row(cells);
        let text = plain(&table, 80);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert_eq!(text.matches("vit-l").count(), 2, "{text}");
        assert!((0..12).all(|i| text.contains(&format!("{i}23.45 ms"))) && !text.contains("empty"), "{text}");
    }

    #[test]
    fn a_cell_is_one_line() {
        let mut table = Table::of(["name"], ["n"]);
        table.row(["a\nb\x1b[2J".to_owned(), "1".to_owned()]);
        let text = anstream::adapter::strip_str(&escape::text(&table.to_string())).to_string();
        assert_eq!(text, "name           n\na\\nb\\u{1b}[2J  1");
    }
}
