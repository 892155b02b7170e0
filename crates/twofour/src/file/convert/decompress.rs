//! From compressed weights to dense ones.

use std::{ops::ControlFlow, path::Path};

use super::{
    Conversion, Item, Overwrite, Part, Plan, PlannedTensor, Progress, Reader, StoredDType, ValueFormat, Writer, run,
};
use crate::{DataType, Element, Result, match_element};

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
/// for one thing: -0.0 has become +0.0, as that conversion reported. A scaled I8 weight keeps its scales as the
/// tensor `<name>.scales`. A weight of 4-bit integers, or of 8-bit ones with scales for groups, becomes F32: integers times scales.
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
    fn plan(&mut self, _: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<()> {
        match item {
            Item::Plain(_) => {
                self.report.copied += 1;
                item.plan_copy(plan);
            }
            Item::Compressed(weight) => {
                let shape = [weight.rows, weight.cols];
                plan.tensor(PlannedTensor::new(&weight.name, weight.format.dense(), shape));
                if weight.format == ValueFormat::ScaledI8 {
                    let name = Part::Scales.key(&weight.name);
                    plan.tensor(PlannedTensor::new(name, StoredDType::F32, [weight.rows]));
                }
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
        let Item::Compressed(weight) = item else { return item.write_copy(reader, writer) };
        match weight.format {
            ValueFormat::Int4(_) => {
                return writer.write_elements(&weight.name, &reader.int4(&weight.name)?.dequantize().to_dense());
            }
            ValueFormat::GroupedI8(_) => {
                return writer.write_elements(&weight.name, &reader.int8(&weight.name)?.dequantize().to_dense());
            }
            _ => {}
        }
        match_element!(weight.format.dense(), |T| dense::<T>(reader, &weight.name, writer))?;
        match reader.scales(&weight.name)? {
            Some(scales) => writer.write_elements(&Part::Scales.key(&weight.name), &scales),
            None => Ok(()),
        }
    }
}

fn dense<T: Element>(reader: &Reader, name: &str, writer: &mut Writer) -> Result<()> {
    writer.write_elements(name, &reader.compressed::<T>(name)?.to_dense())
}
