//! From compressed weights to dense ones.

use std::{ops::ControlFlow, path::Path};

use super::{
    Conversion, Item, Overwrite, Part, Plan, PlannedTensor, Progress, Reader, StoredDType, TensorInfo, ValueFormat,
    Writer, run,
};
use crate::{DataType, Element, Error, Result, match_element};

/// What [`decompress()`] did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DecompressReport {
    /// The weights that were compressed, in order of file and name.
    pub weights: Vec<DecompressedWeight>,
    /// How many tensors were copied as they are.
    pub copied: usize,
}

/// One weight that became dense.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecompressedWeight {
    /// Its name.
    pub name: String,
    /// The dtype of its elements, dense.
    pub dtype: DataType,
    /// Its shape.
    pub shape: [usize; 2],
    /// Bytes that it took compressed.
    pub bytes_before: usize,
    /// Bytes that it takes dense.
    pub bytes_after: usize,
}

/// Writes a model with every compressed weight as the dense tensor it stands for; all else is copied byte for byte.
///
/// What [`compress`](crate::file::compress()) made of a 2:4 model comes back with the same names, dtypes, shapes, metadata and bytes, but
/// for one thing: -0.0 has become +0.0, as that conversion reported. Integers with scales become F32, integers times scales: compressed ones, and
/// [dense ones](Reader::is_dense_int8).
///
/// A sharded input gives a directory with the same file names; see [`crate::file`](mod@crate::file) for what happens on the way.
///
/// # Errors
/// Those of [`Reader::open`] and [`Reader::compressed`]; [`crate::Error::Exists`] where the output exists and may not be
/// replaced; [`crate::Error::Interrupted`] where `progress` breaks off; [`crate::Error::Io`] where the system refuses.
/// Nothing is left then.
pub fn decompress(
    input: impl AsRef<Path>,
    output: impl AsRef<Path>,
    overwrite: Overwrite,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<DecompressReport> {
    let reader = Reader::open(input)?;
    let mut conversion = Decompress { report: DecompressReport::default() };
    run(&mut conversion, &reader, output.as_ref(), overwrite, progress)?;
    Ok(conversion.report)
}

struct Decompress {
    report: DecompressReport,
}

impl Conversion for Decompress {
    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<()> {
        match item {
            Item::Plain(tensor) if is_scales(reader, tensor) => {}
            Item::Plain(tensor) if reader.is_dense_int8(&tensor.name) => {
                let shape = [tensor.shape[0], tensor.shape[1]];
                plan.tensor(PlannedTensor::new(&tensor.name, StoredDType::F32, shape));
                let scales = shape[0] * size_of::<f32>();
                self.report.weights.push(DecompressedWeight {
                    name: tensor.name.clone(),
                    dtype: DataType::F32,
                    shape,
                    bytes_before: tensor.bytes + scales,
                    bytes_after: tensor.bytes * size_of::<f32>(),
                });
            }
            Item::Plain(_) => {
                self.report.copied += 1;
                item.plan_copy(plan);
            }
            Item::Compressed(weight) => {
                let shape = [weight.rows, weight.cols];
                plan.tensor(PlannedTensor::new(&weight.name, weight.format.dense(), shape));
                self.report.weights.push(DecompressedWeight {
                    name: weight.name.clone(),
                    dtype: weight.format.dense(),
                    shape,
                    bytes_before: weight.bytes(),
                    bytes_after: weight.dense_bytes(),
                });
            }
        }
        Ok(())
    }

    fn write(&mut self, reader: &Reader, item: Item<'_>, writer: &mut Writer) -> Result<()> {
        let weight = match item {
            Item::Compressed(weight) => weight,
            Item::Plain(tensor) if is_scales(reader, tensor) => return Ok(()),
            Item::Plain(tensor) if reader.is_dense_int8(&tensor.name) => {
                let values = reader.tensor(&tensor.name)?.to_vec::<i8>()?;
                let scales = reader.tensor(&Part::Scales.key(&tensor.name))?.to_vec::<f32>()?;
                if let Some(row) = scales.iter().position(|scale| !scale.is_finite()) {
                    let error = Error::Scale { row, scale: 0 }.in_tensor(&tensor.name);
                    return Err(error.in_file(reader.path_of(&tensor.name)));
                }
                let rows = values.chunks(tensor.shape[1].max(1)).zip(scales);
                let floats: Vec<f32> =
                    rows.flat_map(|(row, scale)| row.iter().map(move |q| f32::from(*q) * scale)).collect();
                return writer.write_elements(&tensor.name, &floats);
            }
            Item::Plain(_) => return item.write_copy(reader, writer),
        };
        let floats = match weight.format {
            ValueFormat::Int4(_) => reader.int4(&weight.name)?.dequantize(),
            ValueFormat::GroupedI8(_) | ValueFormat::ScaledI8 => reader.int8(&weight.name)?.dequantize(),
            ValueFormat::Plain(dtype) => {
                return match_element!(dtype, |T| dense::<T>(reader, &weight.name, writer));
            }
        };
        writer.write_elements(&weight.name, &floats.to_dense())
    }
}

/// Whether a tensor has the scales of a dense matrix of 8-bit integers.
fn is_scales(reader: &Reader, tensor: &TensorInfo) -> bool {
    tensor.name.strip_suffix(".scales").is_some_and(|name| reader.is_dense_int8(name))
}

fn dense<T: Element>(reader: &Reader, name: &str, writer: &mut Writer) -> Result<()> {
    writer.write_elements(name, &reader.compressed::<T>(name)?.to_dense())
}
