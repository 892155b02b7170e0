//! Writing a file tensor by tensor.

use std::{collections::BTreeMap, path::PathBuf};

use numpy::PyReadonlyArray1;
use pyo3::{exceptions::PyValueError, prelude::*};
use twofour::{
    DataType, Element, Error, Result,
    file::{CompressedInfo, Overwrite, Plan, PlannedTensor, StoredDType, ValueFormat, Writer},
    int4::Granularity,
    match_element,
};

use super::{compression::parts, dtype, errors::exception, int4, int8, unlocked};
use crate::names;

/// A file in the making. It appears under its name, complete, when it is finished; one that is dropped before leaves
/// nothing.
#[pyclass]
pub(super) struct FileWriter {
    writer: Option<Writer>,
    weights: BTreeMap<String, CompressedInfo>,
}

#[pymethods]
impl FileWriter {
    /// Plans a file: `tensors` as (name, safetensors dtype, shape) and `weights`, which are compressed, as (name,
    /// dtype, rows, cols, group size of the scales): `None` without scales, -1 for a scale for each row.
    #[new]
    fn new(
        path: PathBuf,
        overwrite: bool,
        tensors: Vec<(String, String, Vec<usize>)>,
        weights: Vec<(String, String, usize, usize, Option<i64>)>,
        metadata: BTreeMap<String, String>,
    ) -> PyResult<Self> {
        let mut plan = Plan::new();
        for (name, dtype, shape) in tensors {
            let stored = StoredDType::from_name(&dtype)
                .ok_or_else(|| PyValueError::new_err(format!("tensor `{name}`: safetensors has no dtype {dtype}")))?;
            plan.tensor(PlannedTensor::new(name, stored, shape));
        }
        let mut planned = BTreeMap::new();
        for (name, dtype, rows, cols, group_size) in weights {
            let named = |e: Error| exception(e.in_tensor(&name));
            let info = if dtype == names::INT4 {
                let granularity = int4::granularity(group_size.unwrap_or(names::PER_ROW))?;
                CompressedInfo::int4(&name, granularity, rows, cols).map_err(named)?
            } else {
                match (dtype::named(&dtype)?, group_size) {
                    (DataType::I8, Some(size)) => {
                        CompressedInfo::int8(&name, int4::granularity(size)?, rows, cols).map_err(named)?
                    }
                    (dtype, None) => CompressedInfo::new(&name, dtype, rows, cols).map_err(named)?,
                    (dtype, Some(_)) => CompressedInfo::new(&name, dtype, rows, cols)
                        .map_err(named)?
                        .with_scales()
                        .map_err(exception)?,
                }
            };
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

    /// Writes values, metadata and, where they were planned, scales of a compressed weight, after checking every rule
    /// of the canonical form.
    #[pyo3(signature = (name, values, meta, scales=None))]
    fn write_compressed(
        &mut self,
        py: Python<'_>,
        name: &str,
        values: PyReadonlyArray1<'_, u8>,
        meta: PyReadonlyArray1<'_, u8>,
        scales: Option<PyReadonlyArray1<'_, u8>>,
    ) -> PyResult<()> {
        let (values, meta) = (values.as_slice()?, meta.as_slice()?);
        let scales = match &scales {
            Some(scales) => scales.as_slice()?,
            None => &[],
        };
        let info = self.weights.get(name);
        let info =
            info.ok_or_else(|| PyValueError::new_err(format!("weight `{name}` is not among the planned ones")))?;
        let writer = open(&mut self.writer)?;
        unlocked(py, || match info.format {
            ValueFormat::Int4(granularity) => {
                let weight = int4::weight(info.rows, info.cols, granularity, values, meta, scales);
                writer.write_int4(name, &weight.map_err(|e| e.in_tensor(name))?)
            }
            ValueFormat::ScaledI8 | ValueFormat::GroupedI8(_) => {
                let granularity = match info.format {
                    ValueFormat::GroupedI8(granularity) => granularity,
                    _ => Granularity::Row,
                };
                let weight = int8::weight(info.rows, info.cols, granularity, values, meta, scales);
                writer.write_int8(name, &weight.map_err(|e| e.in_tensor(name))?)
            }
            other => {
                match_element!(other.dense(), |T| write_checked::<T>(writer, info, values, meta))
            }
        })
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
