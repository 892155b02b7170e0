//! Reading a model: one file, or several with an index.

use std::{collections::BTreeMap, path::PathBuf};

use numpy::PyReadwriteArray1;
use pyo3::prelude::*;
use twofour::{
    Element, Result,
    file::{CompressedInfo, Part, Reader},
    match_element,
};

use super::{
    dtype::{self, store},
    errors::exception,
    unlocked,
};

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

    /// (name, dtype, rows, cols, whether they have scales) of the compressed weights.
    fn weights(&self) -> Vec<(String, &'static str, usize, usize, bool)> {
        let weights = self.0.compressed_weights();
        weights.map(|w| (w.name.clone(), dtype::name(w.dtype), w.rows, w.cols, w.scaled)).collect()
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

    /// Reads values and metadata of a compressed weight, after checking every rule of the canonical form.
    fn read_compressed(
        &self,
        py: Python<'_>,
        name: &str,
        mut values: PyReadwriteArray1<'_, u8>,
        mut meta: PyReadwriteArray1<'_, u8>,
    ) -> PyResult<()> {
        let (values, meta) = (values.as_slice_mut()?, meta.as_slice_mut()?);
        let info = self.0.compressed_info(name).map_err(exception)?;
        unlocked(py, || match_element!(info.dtype, |T| read_checked::<T>(&self.0, info, values, meta)))
    }

    /// Reads the scales of a compressed weight's rows.
    fn read_scales(&self, py: Python<'_>, name: &str, mut scales: PyReadwriteArray1<'_, f32>) -> PyResult<()> {
        let scales = scales.as_slice_mut()?;
        unlocked(py, || {
            let bytes = self.0.tensor(&Part::Scales.key(name))?.bytes()?;
            store("array to read into", &bytes, bytemuck::cast_slice_mut(scales))
        })
    }
}

fn read_checked<T: Element>(reader: &Reader, info: &CompressedInfo, values: &mut [u8], meta: &mut [u8]) -> Result<()> {
    let weight = reader.compressed::<T>(&info.name)?;
    store("array of values", weight.values(), values)?;
    store("array of metadata", weight.meta(), meta)
}
