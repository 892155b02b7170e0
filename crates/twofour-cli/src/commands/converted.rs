//! What a conversion made of each tensor: its size before and after, in JSON and in the rows of a table.

use serde::Serialize;

use crate::present::{
    Screen,
    layers::by_layer,
    table::{Align, Table},
    units,
};

/// A tensor before and after a conversion.
#[derive(Debug, Serialize)]
pub(super) struct Converted<'a> {
    pub(super) name: &'a str,
    /// The dtype in the input; of a weight that was compressed there, that of its dense form.
    pub(super) dtype: &'static str,
    pub(super) shape: &'a [usize],
    pub(super) bytes_before: usize,
    pub(super) bytes_after: usize,
}

impl<'a> AsRef<Converted<'a>> for Converted<'a> {
    fn as_ref(&self) -> &Converted<'a> {
        self
    }
}

/// Tensors that share a row.
pub(super) struct Row<'t, T> {
    /// Name, dtype, shape, bytes before and bytes after.
    pub(super) cells: Vec<String>,
    pub(super) tensors: Vec<&'t T>,
}

/// An empty table for [`rows`] and further columns.
pub(super) fn table(screen: &Screen, further: &[(&'static str, Align)]) -> Table {
    let columns = [
        (if screen.is_detailed() { "tensor" } else { "layers" }, Align::Left),
        ("dtype", Align::Left),
        ("shape", Align::Right),
        ("before", Align::Right),
        ("after", Align::Right),
    ];
    Table::new([&columns, further].concat())
}

/// A row for the layers of each kind that are alike, or with `--verbose` for each tensor.
pub(super) fn rows<'t, 'n: 't, T: AsRef<Converted<'n>>, K: PartialEq>(
    screen: &Screen,
    tensors: &'t [T],
    alike: impl Fn(&T) -> K,
) -> Vec<Row<'t, T>> {
    let key = |t: &'t T| (t.as_ref().name, (t.as_ref().dtype, t.as_ref().shape, alike(t)));
    let row = |(label, tensors): (String, Vec<&'t T>)| {
        let Converted { dtype, shape, .. } = tensors[0].as_ref();
        let [before, after] = bytes(tensors.iter().map(|t| t.as_ref())).map(|sum| units::bytes(sum as u64));
        Row { cells: vec![label, (*dtype).to_owned(), units::shape(shape), before, after], tensors }
    };
    by_layer(tensors, screen.is_detailed(), key).into_iter().map(row).collect()
}

/// Bytes before and after.
pub(super) fn bytes<'t, 'n: 't>(tensors: impl Iterator<Item = &'t Converted<'n>>) -> [usize; 2] {
    tensors.fold([0, 0], |[before, after], t| [before + t.bytes_before, after + t.bytes_after])
}

/// Bytes before and after, in words.
pub(super) fn shrunk(before: usize, after: usize) -> String {
    format!(
        "{} -> {} ({} of it)",
        units::bytes(before as u64),
        units::bytes(after as u64),
        units::percent(after as f64 / before.max(1) as f64)
    )
}
