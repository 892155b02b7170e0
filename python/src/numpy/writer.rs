//! Writing a file tensor by tensor.

use std::{collections::BTreeMap, path::PathBuf};

use numpy::PyReadonlyArray1;
use pyo3::{exceptions::PyValueError, prelude::*};
use twofour::{
    Element, Result,
    file::{CompressedInfo, Overwrite, Part, Plan, PlannedTensor, StoredDType, Writer},
    match_element,
};

use super::{compression::parts, dtype, errors::exception, unlocked};

/// A file in the making. It appears under its name, complete, when it is finished; one that is dropped before leaves nothing.
#[pyclass]
pub(super) struct FileWriter {
    writer: Option<Writer>,
    weights: BTreeMap<String, CompressedInfo>,
}

#[pymethods]
impl FileWriter {
    /// Plans a file: `tensors` as (name, safetensors dtype, shape) and `weights`, which are compressed, as (name, dtype, rows, cols, whether
    /// they have scales).
    #[new]
    fn new(
        path: PathBuf,
        overwrite: bool,
        tensors: Vec<(String, String, Vec<usize>)>,
        weights: Vec<(String, String, usize, usize, bool)>,
        metadata: BTreeMap<String, String>,
    ) -> PyResult<Self> {
        let mut plan = Plan::new();
        for (name, dtype, shape) in tensors {
            let stored = StoredDType::from_name(&dtype)
                .ok_or_else(|| PyValueError::new_err(format!("tensor `{name}`: safetensors has no dtype {dtype}")))?;
            plan.tensor(PlannedTensor::new(name, stored, shape));
        }
        let mut planned = BTreeMap::new();
        for (name, dtype, rows, cols, scaled) in weights {
            let info = CompressedInfo::new(&name, dtype::named(&dtype)?, rows, cols)
                .map_err(|e| exception(e.in_tensor(&name)))?;
            let info = if scaled { info.with_scales().map_err(exception)? } else { info };
            plan.compressed(info.clone());
            planned.insert(name, info);
        }
        let overwrite = if overwrite { Overwrite::Yes } else { Overwrite::No };
        let writer = Writer::create(path, overwrite, plan, metadata).map_err(exception)?;
        Ok(FileWriter { writer: Some(writer), weights: planned })
    }

    /// Writes the bytes of one tensor.
    fn write(&mut self, py: Python<'_>, name: &str, bytes: PyReadonlyArray1<'_, u8>) -> PyResult<()> {
        let bytes = bytes.as_slice()?;
        let writer = open(&mut self.writer)?;
        unlocked(py, || writer.write(name, bytes))
    }

    /// Writes values and metadata of a compressed weight, after checking every rule of the canonical form.
    fn write_compressed(
        &mut self,
        py: Python<'_>,
        name: &str,
        values: PyReadonlyArray1<'_, u8>,
        meta: PyReadonlyArray1<'_, u8>,
    ) -> PyResult<()> {
        let (values, meta) = (values.as_slice()?, meta.as_slice()?);
        let info = self.weights.get(name);
        let info =
            info.ok_or_else(|| PyValueError::new_err(format!("weight `{name}` is not among the planned ones")))?;
        let writer = open(&mut self.writer)?;
        unlocked(py, || match_element!(info.dtype, |T| write_checked::<T>(writer, info, values, meta)))
    }

    /// Writes the scales of a compressed weight's rows.
    fn write_scales(&mut self, py: Python<'_>, name: &str, scales: PyReadonlyArray1<'_, f32>) -> PyResult<()> {
        let scales = scales.as_slice()?;
        let writer = open(&mut self.writer)?;
        unlocked(py, || writer.write_elements(&Part::Scales.key(name), scales))
    }

    /// Brings the file to the disk and gives it its name.
    fn finish(&mut self, py: Python<'_>) -> PyResult<()> {
        open(&mut self.writer)?;
        match self.writer.take() {
            Some(writer) => unlocked(py, || writer.finish()),
            None => Ok(()),
        }
    }
}

fn open(writer: &mut Option<Writer>) -> PyResult<&mut Writer> {
    writer.as_mut().ok_or_else(|| PyValueError::new_err("the file is finished already"))
}

fn write_checked<T: Element>(writer: &mut Writer, info: &CompressedInfo, values: &[u8], meta: &[u8]) -> Result<()> {
    let weight = parts::<T>(values, meta, info.rows, info.cols).map_err(|e| e.in_tensor(&info.name))?;
    writer.write_compressed(&info.name, &weight)
}
