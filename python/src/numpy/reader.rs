//! Reading a model: one file, or several with an index.

use std::{collections::BTreeMap, path::PathBuf};

use numpy::PyReadwriteArray1;
use pyo3::prelude::*;
use twofour::{
    DataType, Element, Result,
    file::{CompressedInfo, Reader, ValueFormat},
    match_element,
};

use super::{
    dtype::{self, store},
    errors::exception,
    int8, unlocked,
};
use crate::names;

/// A model on disk, whose headers are checked.
#[pyclass(frozen)]
pub(super) struct FileReader(Reader);

#[pymethods]
impl FileReader {
    /// Opens a file, an index, or a folder that holds either.
    #[new]
    fn new(path: PathBuf) -> PyResult<Self> {
        Reader::open(path).map(FileReader).map_err(exception)
    }

    /// (name, safetensors dtype, shape) of the tensors that are no parts of compressed weights.
    fn tensors(&self) -> Vec<(String, &'static str, Vec<usize>)> {
        self.0.plain_tensors().map(|t| (t.name.clone(), t.dtype.name(), t.shape.clone())).collect()
    }

    /// (name, dtype, rows, cols, group size of the scales) of the compressed weights; -1 stands for a scale for each
    /// row, `None` for no scales.
    fn weights(&self) -> Vec<(String, &'static str, usize, usize, Option<i64>)> {
        let described = |w: &CompressedInfo| {
            let (dtype, group_size) = match w.format {
                ValueFormat::Int4(granularity) => (names::INT4, Some(names::group_size(granularity))),
                ValueFormat::ScaledI8 => (dtype::name(DataType::I8), Some(names::PER_ROW)),
                ValueFormat::GroupedI8(granularity) => {
                    (dtype::name(DataType::I8), Some(names::group_size(granularity)))
                }
                other => (dtype::name(other.dense()), None),
            };
            (w.name.clone(), dtype, w.rows, w.cols, group_size)
        };
        self.0.compressed_weights().map(described).collect()
    }

    /// The metadata of the header.
    fn metadata(&self) -> BTreeMap<String, String> {
        self.0.metadata().clone()
    }

    /// Reads the bytes of a tensor into `out`.
    fn read(&self, py: Python<'_>, name: &str, mut out: PyReadwriteArray1<'_, u8>) -> PyResult<()> {
        let out = out.as_slice_mut()?;
        unlocked(py, || store("array to read into", &self.0.tensor(name)?.bytes()?, out))
    }

    /// Reads values, metadata and, where it has them, scales of a compressed weight, after checking every rule of the
    /// canonical form.
    #[pyo3(signature = (name, values, meta, scales=None))]
    fn read_compressed(
        &self,
        py: Python<'_>,
        name: &str,
        mut values: PyReadwriteArray1<'_, u8>,
        mut meta: PyReadwriteArray1<'_, u8>,
        mut scales: Option<PyReadwriteArray1<'_, u8>>,
    ) -> PyResult<()> {
        let (values, meta) = (values.as_slice_mut()?, meta.as_slice_mut()?);
        let scales = match &mut scales {
            Some(scales) => scales.as_slice_mut()?,
            None => &mut [],
        };
        let info = self.0.compressed_info(name).map_err(exception)?;
        unlocked(py, || match info.format {
            ValueFormat::Int4(_) => {
                let weight = self.0.int4(name)?;
                store("array of values", &weight.packed_values(), values)?;
                store("array of metadata", weight.weight().meta(), meta)?;
                store("array of scales", weight.scales(), scales)
            }
            ValueFormat::ScaledI8 | ValueFormat::GroupedI8(_) => {
                int8::store_parts(&self.0.int8(name)?, values, meta, scales)
            }
            other => {
                match_element!(other.dense(), |T| read_checked::<T>(&self.0, info, values, meta))
            }
        })
    }
}

fn read_checked<T: Element>(reader: &Reader, info: &CompressedInfo, values: &mut [u8], meta: &mut [u8]) -> Result<()> {
    let weight = reader.compressed::<T>(&info.name)?;
    store("array of values", weight.values(), values)?;
    store("array of metadata", weight.meta(), meta)
}
