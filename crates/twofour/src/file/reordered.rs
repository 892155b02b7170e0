//! A file whose tensors have their rows or columns in another order.

use std::collections::{BTreeMap, HashMap};

use super::{FileBytes, Source, TensorInfo};
use crate::{Error, Result};

/// Another order of a tensor's rows or of its columns. A vector is a matrix of one column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reorder {
    of_rows: bool,
    /// What comes to each place.
    order: Vec<usize>,
}

impl Reorder {
    /// Row `order[i]` comes to place `i`.
    ///
    /// # Errors
    /// [`Error::Setting`] where `order` has not each of its places once.
    pub fn rows(order: Vec<usize>) -> Result<Self> {
        Self::new(true, order)
    }

    /// Column `order[j]` comes to place `j`.
    ///
    /// # Errors
    /// Those of [`Reorder::rows`].
    pub fn columns(order: Vec<usize>) -> Result<Self> {
        Self::new(false, order)
    }

    fn new(of_rows: bool, order: Vec<usize>) -> Result<Self> {
        let mut is_there = vec![false; order.len()];
        for &place in &order {
            match is_there.get_mut(place) {
                Some(found) if !*found => *found = true,
                _ => {
                    let (what, expected) = ("a place of an order", "each place once");
                    return Err(Error::Setting { what, value: place as f64, expected });
                }
            }
        }
        Ok(Reorder { of_rows, order })
    }

    /// The elements of a tensor of that shape in this order.
    ///
    /// # Errors
    /// [`Error::Length`] for a shape that the order does not fit, and for another number of elements.
    pub fn apply<T: Copy>(&self, shape: &[usize], elements: &[T]) -> Result<Vec<T>> {
        let (rows, cols) = self.matrix(shape)?;
        if elements.len() != rows * cols {
            let what = "elements to be ordered";
            return Err(Error::Length { what, expected: rows * cols, found: elements.len() });
        }
        let row = |row: usize| &elements[row * cols..(row + 1) * cols];
        Ok(match self.of_rows {
            true => self.order.iter().flat_map(|from| row(*from)).copied().collect(),
            false => (0..rows).flat_map(|at| self.order.iter().map(move |from| row(at)[*from])).collect(),
        })
    }

    /// The rows and columns of a tensor that the order fits.
    fn matrix(&self, shape: &[usize]) -> Result<(usize, usize)> {
        let (rows, cols) = match *shape {
            [rows] => (rows, 1),
            [rows, cols] => (rows, cols),
            _ => return Err(Error::Length { what: "dimensions to be ordered", expected: 2, found: shape.len() }),
        };
        let (expected, found) = (if self.of_rows { rows } else { cols }, self.order.len());
        match expected == found {
            true => Ok((rows, cols)),
            false => Err(Error::Length { what: "places of an order", expected, found }),
        }
    }
}

/// A file with some tensors in another order.
#[derive(Debug)]
pub(super) struct Reordered {
    source: Box<dyn Source>,
    orders: HashMap<String, Reorder>,
}

impl Reordered {
    /// The file with those of its tensors in another order that `orders` has, by name. Their elements are whole bytes.
    pub(super) fn new(source: Box<dyn Source>, orders: &HashMap<String, Reorder>) -> Result<Self> {
        let mut own = HashMap::new();
        for tensor in source.tensors() {
            if let Some(order) = orders.get(&tensor.name) {
                order.matrix(&tensor.shape).map_err(|error| error.in_tensor(&tensor.name))?;
                own.insert(tensor.name.clone(), order.clone());
            }
        }
        Ok(Reordered { source, orders: own })
    }
}

impl Source for Reordered {
    fn file(&self) -> &FileBytes {
        self.source.file()
    }

    fn tensors(&self) -> &[TensorInfo] {
        self.source.tensors()
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        self.source.metadata()
    }

    fn read(&self, tensor: &TensorInfo, first: usize, buffer: &mut [u8]) -> Result<()> {
        let Some(reorder) = self.orders.get(&tensor.name) else { return self.source.read(tensor, first, buffer) };
        let (rows, cols) = reorder.matrix(&tensor.shape)?;
        let row_bytes = tensor.bytes / rows.max(1);
        let size = row_bytes / cols.max(1);
        let mut row_of_file = vec![0; if reorder.of_rows { 0 } else { row_bytes }];
        let (mut at, mut rest) = (first, buffer);
        while !rest.is_empty() {
            let (row, inside) = (at / row_bytes, at % row_bytes);
            let (part, others) = rest.split_at_mut((row_bytes - inside).min(rest.len()));
            if reorder.of_rows {
                self.source.read(tensor, reorder.order[row] * row_bytes + inside, part)?;
            } else {
                self.source.read(tensor, row * row_bytes, &mut row_of_file)?;
                for (element, from) in part.chunks_exact_mut(size).zip(&reorder.order[inside / size..]) {
                    element.copy_from_slice(&row_of_file[from * size..][..size]);
                }
            }
            at += part.len();
            rest = others;
        }
        Ok(())
    }

    fn in_memory(&self, tensor: &TensorInfo) -> Option<&[u8]> {
        if self.orders.contains_key(&tensor.name) { None } else { self.source.in_memory(tensor) }
    }

    fn is_safetensors(&self) -> bool {
        self.source.is_safetensors()
    }

    fn described(&self) -> &'static [&'static str] {
        self.source.described()
    }

    fn describe(&self, name: &str) -> Result<Option<Vec<u8>>> {
        self.source.describe(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::{Overwrite, PlannedTensor, Reader, StoredDType, Writer};

    #[test]
    fn a_reader_reads_tensors_in_their_orders_from_any_place_and_leaves_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        let (matrix, vector) = ((0..15).map(|i| i as f32).collect::<Vec<_>>(), [7.0f32, 8.0, 9.0]);
        let plan = vec![
            PlannedTensor::new("rows", StoredDType::F32, [3, 5]),
            PlannedTensor::new("columns", StoredDType::F32, [3, 5]),
            PlannedTensor::new("bias", StoredDType::F32, [3]),
            PlannedTensor::new("other", StoredDType::F32, [3, 5]),
        ];
        let mut writer = Writer::create(&path, Overwrite::No, plan, BTreeMap::new()).unwrap();
        for name in ["rows", "columns", "other"] {
            writer.write_elements(name, &matrix).unwrap();
        }
        writer.write_elements("bias", &vector).unwrap();
        writer.finish().unwrap();
        let (of_rows, of_columns) = (vec![2, 0, 1], vec![4, 2, 0, 1, 3]);
        let orders = HashMap::from([
            ("rows".to_owned(), Reorder::rows(of_rows.clone()).unwrap()),
            ("columns".to_owned(), Reorder::columns(of_columns.clone()).unwrap()),
            ("bias".to_owned(), Reorder::rows(of_rows).unwrap()),
        ]);
        for reader in [Reader::open(&path), Reader::from_bytes(&path, std::fs::read(&path).unwrap())] {
            let reader = reader.unwrap().reordered(&orders).unwrap();
            for name in ["rows", "columns", "bias", "other"] {
                let stored = if name == "bias" { vector.as_slice() } else { &matrix };
                let view = reader.tensor(name).unwrap();
                let expected = match orders.get(name) {
                    Some(order) => order.apply(&view.info.shape, stored).unwrap(),
                    None => stored.to_vec(),
                };
                assert_eq!(*view.elements::<f32>().unwrap(), expected, "{name}");
                assert_eq!(view.to_vec::<f32>().unwrap(), expected, "{name}");
                let bytes: &[u8] = bytemuck::cast_slice(&expected);
                for (first, end) in [(0, bytes.len()), (4, 12), (8, bytes.len())] {
                    let mut part = vec![0; end - first];
                    view.read_into(first, &mut part).unwrap();
                    assert_eq!(part, bytes[first..end], "{name}");
                }
            }
        }
        let columns: Vec<f32> = orders["columns"].apply(&[3, 5], &matrix).unwrap();
        assert_eq!(columns[..5], [4.0, 2.0, 0.0, 1.0, 3.0]);
        assert_eq!(orders["rows"].apply(&[3, 5], &matrix).unwrap()[..5], matrix[10..]);
        for bad in [vec![0, 0], vec![0, 2]] {
            assert!(Reorder::rows(bad).is_err());
        }
        let short = HashMap::from([("rows".to_owned(), Reorder::rows(vec![1, 0]).unwrap())]);
        assert!(Reader::open(&path).unwrap().reordered(&short).is_err());
        let absent = HashMap::from([("absent".to_owned(), Reorder::rows(vec![0]).unwrap())]);
        assert!(matches!(Reader::open(&path).unwrap().reordered(&absent), Err(Error::NoTensor { .. })));
    }
}
