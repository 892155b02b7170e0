//! From compressed weights to dense ones.

use super::{
    super::writer::TensorPlace, CompressedInfo, Item, Kept, Operation, Part, Plan, Planned, PlannedTensor, Reader,
    StoredDType, TensorInfo, ValueFormat, Writer, named, pieces,
};
use crate::{DataType, Element, Error, Result, match_element};

/// Writes every compressed weight as the dense tensor it stands for.
///
/// What [`Compress`](super::Compress) made of a 2:4 model comes back with the same names, dtypes, shapes, metadata and
/// bytes, but for one thing: -0.0 has become +0.0, as that conversion reported. Integers with scales become F32,
/// integers times scales: compressed ones, and [dense ones](Reader::is_dense_int8). Memory holds some rows of a weight
/// for each thread.
///
/// # Errors
/// Those of [`Reader::compressed`], for a weight that is damaged.
#[derive(Debug, Clone, Copy, Default)]
pub struct Decompress;

/// A weight that became dense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MadeDense {
    /// The dtype of its elements, dense.
    pub dtype: DataType,
}

impl Operation for Decompress {
    type Plan = ();
    type Change = MadeDense;

    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<Planned<()>> {
        match item {
            Item::Plain(tensor) => {
                match tensor.name.strip_suffix(".scales").filter(|name| reader.is_dense_int8(name)) {
                    Some(of) => return Ok(Planned::PartOf(of.to_owned())),
                    None if !reader.is_dense_int8(&tensor.name) => return Ok(Planned::Copy(Kept::Dense)),
                    None => plan.tensor(PlannedTensor::new(&tensor.name, StoredDType::F32, tensor.shape.as_slice())),
                }
            }
            Item::Compressed(weight) => {
                plan.tensor(PlannedTensor::new(&weight.name, weight.format.dense(), [weight.rows, weight.cols]))
            }
        };
        Ok(Planned::Change(()))
    }

    fn write(&mut self, reader: &Reader, item: Item<'_>, (): (), writer: &mut Writer) -> Result<MadeDense> {
        match item {
            Item::Plain(tensor) => integers(reader, tensor, writer),
            Item::Compressed(weight) => {
                let place = writer.in_pieces(&weight.name, weight.dense_bytes())?;
                match weight.format {
                    ValueFormat::Plain(dtype) => match_element!(dtype, |T| plain::<T>(reader, weight, place))?,
                    _ => {
                        let put = |first_row: usize, dense: &[f32]| {
                            place.write_at(first_row * weight.cols * size_of::<f32>(), bytemuck::cast_slice(dense))
                        };
                        pieces::in_stored_rows(
                            reader,
                            weight,
                            |row, stored| put(row, &stored.floats()?.to_dense()),
                            |()| (),
                        )?;
                    }
                }
                Ok(MadeDense { dtype: weight.format.dense() })
            }
        }
    }
}

/// Writes the dense elements of a weight without scales.
fn plain<T: Element>(reader: &Reader, weight: &CompressedInfo, place: TensorPlace<'_>) -> Result<()> {
    let write = |first_row: usize, stored: pieces::StoredRows<'_>| {
        let dense = stored.compressed::<T>()?.to_dense();
        place.write_at(first_row * weight.cols * size_of::<T>(), bytemuck::cast_slice(&dense))
    };
    pieces::in_stored_rows(reader, weight, write, |()| ())
}

/// Writes a dense matrix of 8-bit integers as floats.
fn integers(reader: &Reader, tensor: &TensorInfo, writer: &mut Writer) -> Result<MadeDense> {
    let values = reader.tensor(&tensor.name)?.to_vec::<i8>()?;
    let scales = reader.tensor(&Part::Scales.key(&tensor.name))?.to_vec::<f32>()?;
    if let Some(row) = scales.iter().position(|scale| !scale.is_finite()) {
        return Err(named(reader, &tensor.name, Error::Scale { row, scale: 0 }));
    }
    let rows = values.chunks(tensor.shape[1].max(1)).zip(scales);
    let floats: Vec<f32> = rows.flat_map(|(row, scale)| row.iter().map(move |q| f32::from(*q) * scale)).collect();
    writer.write_elements(&tensor.name, &floats)?;
    Ok(MadeDense { dtype: DataType::F32 })
}
