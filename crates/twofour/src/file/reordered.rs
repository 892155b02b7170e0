//! A file whose tensors have their rows or columns in another order, or some of them alone.

use std::collections::{BTreeMap, HashMap};

use super::{FileBytes, Source, TensorInfo};
use crate::{Error, Result};

/// Another order of a tensor's rows or of its columns, of all of them or of some. A vector is a matrix of one column.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reorder {
    of_rows: bool,
    /// The rows or columns that are stored.
    stored: usize,
    /// What comes to each place.
    order: Vec<usize>,
}

impl Reorder {
    /// Row `order[i]` comes to place `i`.
    ///
    /// # Errors
    /// [`Error::Setting`] where `order` has not each of its places once.
    pub fn rows(order: Vec<usize>) -> Result<Self> {
        Self::new(true, order.len(), order)
    }

    /// Column `order[j]` comes to place `j`.
    ///
    /// # Errors
    /// Those of [`Reorder::rows`].
    pub fn columns(order: Vec<usize>) -> Result<Self> {
        Self::new(false, order.len(), order)
    }

    /// Of a tensor of `stored` rows those of `kept` alone: row `kept[i]` comes to place `i`.
    ///
    /// # Errors
    /// [`Error::Setting`] where `kept` has a row twice, or one that is not stored.
    pub fn kept_rows(stored: usize, kept: Vec<usize>) -> Result<Self> {
        Self::new(true, stored, kept)
    }

    /// Of a tensor of `stored` columns those of `kept` alone: column `kept[j]` comes to place `j`.
    ///
    /// # Errors
    /// Those of [`Reorder::kept_rows`].
    pub fn kept_columns(stored: usize, kept: Vec<usize>) -> Result<Self> {
        Self::new(false, stored, kept)
    }

    fn new(of_rows: bool, stored: usize, order: Vec<usize>) -> Result<Self> {
        let mut is_there = vec![false; stored];
        for &place in &order {
            match is_there.get_mut(place) {
                Some(found) if !*found => *found = true,
                _ => {
                    let (what, expected) = ("a place of an order", "one that is stored, once");
                    return Err(Error::Setting { what, value: place as f64, expected });
                }
            }
        }
        Ok(Reorder { of_rows, stored, order })
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
        let (expected, found) = (if self.of_rows { rows } else { cols }, self.stored);
        match expected == found {
            true => Ok((rows, cols)),
            false => Err(Error::Length { what: "places of an order", expected, found }),
        }
    }

    /// What a tensor that the order fits becomes.
    fn applied(&self, tensor: &TensorInfo) -> Result<TensorInfo> {
        let mut shape = tensor.shape.clone();
        if let Some(places) = shape.get_mut(usize::from(!self.of_rows)) {
            *places = self.order.len();
        }
        let Some(bytes) = tensor.dtype.bytes(&shape) else { return Err(Error::TooLarge { shape }) };
        Ok(TensorInfo { bytes, shape, ..tensor.clone() })
    }
}

/// A file with some tensors in another order.
#[derive(Debug)]
pub(super) struct Reordered {
    source: Box<dyn Source>,
    tensors: Vec<TensorInfo>,
    /// By name, each with the tensor as it is stored.
    orders: HashMap<String, (Reorder, TensorInfo)>,
}

impl Reordered {
    /// The file with those of its tensors in another order that `orders` has, by name. Their elements are whole bytes.
    pub(super) fn new(source: Box<dyn Source>, orders: &HashMap<String, Reorder>) -> Result<Self> {
        let (mut own, mut tensors) = (HashMap::new(), source.tensors().to_vec());
        for tensor in &mut tensors {
            let Some(order) = orders.get(&tensor.name) else { continue };
            order.matrix(&tensor.shape).map_err(|error| error.in_tensor(&tensor.name))?;
            let applied = order.applied(tensor)?;
            let stored = std::mem::replace(tensor, applied);
            own.insert(stored.name.clone(), (order.clone(), stored));
        }
        Ok(Reordered { source, tensors, orders: own })
    }
}

impl Source for Reordered {
    fn file(&self) -> &FileBytes {
        self.source.file()
    }

    fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        self.source.metadata()
    }

    fn read(&self, tensor: &TensorInfo, first: usize, buffer: &mut [u8]) -> Result<()> {
        let Some((reorder, stored)) = self.orders.get(&tensor.name) else {
            return self.source.read(tensor, first, buffer);
        };
        let (rows, cols) = reorder.matrix(&stored.shape)?;
        let stored_row = stored.bytes / rows.max(1);
        let size = stored_row / cols.max(1);
        let row_bytes = if reorder.of_rows { stored_row } else { size * reorder.order.len() };
        let mut row_of_file = vec![0; if reorder.of_rows { 0 } else { stored_row }];
        let (mut at, mut rest) = (first, buffer);
        while !rest.is_empty() {
            let (row, inside) = (at / row_bytes, at % row_bytes);
            let (part, others) = rest.split_at_mut((row_bytes - inside).min(rest.len()));
            if reorder.of_rows {
                self.source.read(stored, reorder.order[row] * stored_row + inside, part)?;
            } else {
                self.source.read(stored, row * stored_row, &mut row_of_file)?;
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

    fn below(&self) -> Option<&dyn Source> {
        Some(&*self.source)
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
        let shrunk = HashMap::from([
            ("rows".to_owned(), Reorder::kept_rows(3, vec![2]).unwrap()),
            ("columns".to_owned(), Reorder::kept_columns(5, vec![1, 4]).unwrap()),
            ("bias".to_owned(), Reorder::kept_rows(3, vec![0, 2]).unwrap()),
        ]);
        let reader = Reader::open(&path).unwrap().reordered(&shrunk).unwrap();
        for (name, shape, expected) in [
            ("rows", vec![1, 5], matrix[10..].to_vec()),
            ("columns", vec![3, 2], vec![1.0, 4.0, 6.0, 9.0, 11.0, 14.0]),
            ("bias", vec![2], vec![7.0, 9.0]),
            ("other", vec![3, 5], matrix.clone()),
        ] {
            let view = reader.tensor(name).unwrap();
            assert_eq!((&view.info.shape, view.info.bytes), (&shape, 4 * expected.len()), "{name}");
            assert_eq!(*view.elements::<f32>().unwrap(), expected, "{name}");
            let mut last = vec![0; 4];
            view.read_into(4 * expected.len() - 4, &mut last).unwrap();
            assert_eq!(last, expected[expected.len() - 1].to_le_bytes(), "{name}");
        }
        assert!(Reorder::kept_rows(3, vec![3]).is_err() && Reorder::kept_columns(3, vec![1, 1]).is_err());
        let short = HashMap::from([("rows".to_owned(), Reorder::rows(vec![1, 0]).unwrap())]);
        assert!(Reader::open(&path).unwrap().reordered(&short).is_err());
        let absent = HashMap::from([("absent".to_owned(), Reorder::rows(vec![0]).unwrap())]);
        assert!(matches!(Reader::open(&path).unwrap().reordered(&absent), Err(Error::NoTensor { .. })));
    }
}
