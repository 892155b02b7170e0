//! A model's file: safetensors, dense or 2:4 compressed layer by layer, with the sizes in the header's metadata.

use std::{collections::BTreeMap, path::Path};

use half::{bf16, f16};
use twofour::{
    Arithmetic, Compressed, DataType, MatrixRef,
    estimate::{Estimator, estimate},
    file::{
        CompressedInfo, Overwrite, Part, Plan, PlannedTensor, Reader, StoredDType, StoredElement, ValueFormat, Writer,
    },
    layer::MaskRule,
};

#[cfg(doc)]
use super::{Gpt, VitConfig};
use super::{
    GptConfig, TransformerConfig,
    float::match_float,
    run::{CheckpointModel, is_checkpoint},
};
use crate::{
    Error, Result,
    engine::{Engine, SparseLayer as _},
    linear::Linear,
    parameter::Parameter,
};

/// The metadata key that holds a byte-level GPT's [`GptConfig`] as JSON.
pub(super) const GPT_KEY: &str = "twofour.gpt";

/// The metadata key that holds any other decoder's [`TransformerConfig`] as JSON.
pub(super) const DECODER_KEY: &str = "twofour.decoder";

/// The metadata key that holds a vision transformer's [`VitConfig`] as JSON.
pub(super) const VIT_KEY: &str = "twofour.vit";

/// What the file of a model holds.
pub(super) struct SavedParts<'a, E: Engine> {
    /// The linear layers.
    pub(super) linears: Vec<&'a Linear<E>>,
    /// All parameters, those of the linear layers among them.
    pub(super) parameters: Vec<&'a Parameter<E>>,
    /// The model's description by its key.
    pub(super) metadata: BTreeMap<String, String>,
}

impl<E: Engine> SavedParts<'_, E> {
    /// Writes the file, all of it or nothing: weights in `dtype` (F32, BF16 or F16), layers whose masks are 2:4
    /// compressed under them, everything else dense, what masks prune as zeros.
    pub(super) fn write(self, engine: &E, path: &Path, overwrite: Overwrite, dtype: DataType) -> Result<()> {
        match_float!(dtype, "dtype of the model's file", |T| self.write_as::<T>(engine, path, overwrite))
    }

    fn write_as<T: Arithmetic + StoredElement>(self, engine: &E, path: &Path, overwrite: Overwrite) -> Result<()> {
        // A 2:4 layer's weight is written compressed, so its master is not among the plain tensors.
        let (sparse, dense): (Vec<_>, Vec<_>) = self.linears.into_iter().partition(|linear| linear.is_two_of_four());
        let is_plain = |name: &str| sparse.iter().all(|linear| linear.weight().name() != name);
        let plain: Vec<_> = self.parameters.into_iter().filter(|parameter| is_plain(parameter.name())).collect();
        let mut plan = Plan::new();
        for parameter in &plain {
            plan.tensor(PlannedTensor::new(parameter.name(), T::DTYPE, parameter.shape()));
        }
        for linear in &sparse {
            let (name, rows, cols) = (linear.weight().name(), linear.out_features(), linear.in_features());
            plan.compressed(CompressedInfo::new(name, T::DTYPE, rows, cols)?);
        }
        let mut writer = Writer::create(path, overwrite, plan, self.metadata)?;
        for parameter in &plain {
            let linear = dense.iter().find(|linear| linear.weight().name() == parameter.name());
            let values = match linear {
                Some(linear) => linear.squashed(engine)?,
                None => engine.read(parameter.master())?,
            };
            writer.write_elements(parameter.name(), &values.into_iter().map(T::from_f32).collect::<Vec<T>>())?;
        }
        for linear in &sparse {
            writer.write_compressed(linear.weight().name(), &compressed::<T, E>(engine, linear)?)?;
        }
        Ok(writer.finish()?)
    }
}

/// What a layer computes with whose mask is 2:4.
pub(super) fn compressed<T: Arithmetic, E: Engine>(engine: &E, linear: &Linear<E>) -> Result<Compressed<T>> {
    let (rows, cols) = (linear.out_features(), linear.in_features());
    let squashed = linear.squashed(engine)?;
    let matrix = MatrixRef::new(rows, cols, &squashed)?;
    let kept = match linear.sparse() {
        None => squashed,
        Some(sparse) if sparse.settings().rule == MaskRule::SoftThreshold => {
            estimate(matrix, Estimator::SoftThreshold, sparse.scale()?.unwrap_or(1.0))?.to_dense()
        }
        Some(sparse) => sparse.mask()?.apply(matrix)?,
    };
    let kept: Vec<T> = kept.into_iter().map(T::from_f32).collect();
    Ok(Compressed::from_dense(MatrixRef::new(rows, cols, &kept)?)?)
}

/// Whether a file has the description of its own model.
pub(super) fn describes_itself(reader: &Reader) -> bool {
    [GPT_KEY, DECODER_KEY, VIT_KEY].iter().any(|key| reader.metadata().contains_key(*key))
}

/// Opens a model's file: one of [`Gpt::save`], or a checkpoint of training, whose weights are then in memory in f32, as
/// the model computes with them.
///
/// # Errors
/// Those of [`Reader::open`]; a checkpoint that is damaged, or of another model than a decoder.
pub(super) fn open(path: &Path) -> Result<Reader> {
    let reader = Reader::open(path)?;
    if !is_checkpoint(&reader) {
        return Ok(reader);
    }
    let checkpoint = CheckpointModel::<TransformerConfig>::new(reader).map_err(|error| match error {
        Error::State { path, reason } => {
            Error::State { path, reason: format!("{reason}; checkpoints of decoders can be read as a model") }
        }
        other => other,
    })?;
    let fault = |reason: String| Error::State { path: checkpoint.path().to_owned(), reason };
    let config = serde_json::to_string(checkpoint.config()).map_err(|error| fault(error.to_string()))?;
    let tensors =
        checkpoint.parameters().map(|(name, shape)| Ok((name.to_owned(), shape.to_vec(), checkpoint.values(name)?)));
    in_memory(checkpoint.path(), serde_json::json!({ DECODER_KEY: config }), tensors)
}

/// A file of f32 tensors in memory; `path` is what errors name.
///
/// # Errors
/// Those of the tensors; not enough memory.
pub(super) fn in_memory(
    path: &Path,
    metadata: serde_json::Value,
    tensors: impl Iterator<Item = Result<(String, Vec<usize>, Vec<f32>)>>,
) -> Result<Reader> {
    let fault = |reason: String| Error::State { path: path.to_owned(), reason };
    let (mut header, mut data) = (serde_json::Map::new(), Vec::<u8>::new());
    header.insert("__metadata__".to_owned(), metadata);
    for tensor in tensors {
        let (name, shape, values) = tensor?;
        let bytes: &[u8] = bytemuck::cast_slice(&values);
        data.try_reserve(bytes.len()).map_err(|_| fault(format!("no memory for {} bytes", bytes.len())))?;
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name, serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets }));
        data.extend_from_slice(bytes);
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    // Tensors are aligned in memory.
    header.resize(header.len().next_multiple_of(8), b' ');
    let bytes = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    Ok(Reader::from_bytes(path, bytes)?)
}

pub(super) fn config_of(reader: &Reader) -> Result<TransformerConfig> {
    let fault = |reason: String| twofour::Error::Format { path: reader.path().to_owned(), reason };
    let (key, config) = match (reader.metadata().get(GPT_KEY), reader.metadata().get(DECODER_KEY)) {
        (Some(text), _) => {
            let config: GptConfig =
                serde_json::from_str(text).map_err(|e| fault(format!("metadata `{GPT_KEY}`: {e}")))?;
            config.validate()?;
            (GPT_KEY, TransformerConfig::from(&config))
        }
        (None, Some(text)) => {
            let config: TransformerConfig =
                serde_json::from_str(text).map_err(|e| fault(format!("metadata `{DECODER_KEY}`: {e}")))?;
            config.validate()?;
            (DECODER_KEY, config)
        }
        (None, None) if reader.metadata().contains_key(VIT_KEY) => {
            return Err(fault("it is a vision transformer, and a decoder of text is required".to_owned()).into());
        }
        (None, None) => {
            let reason = format!(
                "its metadata has no `{GPT_KEY}` and no `{DECODER_KEY}`, so it does not describe a model that this \
                 program trained; of a checkpoint, name the directory with its config.json"
            );
            return Err(fault(reason).into());
        }
    };
    // Every layer needs tensors: a number of layers that the file cannot hold is refused before anything is made of it.
    if config.layers > reader.tensors().count() {
        let reason = format!("metadata `{key}` speaks of {} layers, more than the file has tensors", config.layers);
        return Err(fault(reason).into());
    }
    Ok(config)
}

pub(super) fn expect_shape(reader: &Reader, name: &str, expected: &[usize], found: &[usize]) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    let reason = format!("`{name}` is {found:?}, not {expected:?}");
    Err(twofour::Error::Format { path: reader.path().to_owned(), reason }.into())
}

/// A tensor, plain or compressed, as dense f32.
pub(super) fn values(reader: &Reader, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
    match *shape {
        [rows, cols] if is_compressed(reader, name) => decompressed(reader, name, [rows, cols]),
        _ => plain(reader, name, shape),
    }
}

/// A tensor stored as floats, as f32.
pub(super) fn plain(reader: &Reader, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
    let view = reader.tensor(name)?;
    expect_shape(reader, name, shape, &view.info.shape)?;
    fn widened<T: Arithmetic + StoredElement>(view: &twofour::file::TensorView<'_>) -> Result<Vec<f32>> {
        Ok(view.elements::<T>()?.iter().map(|v| v.to_f32()).collect())
    }
    if let Some(integers) = dense_int8(reader, name)? {
        return Ok(dequantized(integers));
    }
    match view.info.dtype {
        StoredDType::BF16 => widened::<bf16>(&view),
        StoredDType::F16 => widened::<f16>(&view),
        _ => widened::<f32>(&view),
    }
}

/// Whether the file has a compressed weight of that name.
pub(super) fn is_compressed(reader: &Reader, name: &str) -> bool {
    reader.compressed_weights().any(|info| info.name == name)
}

/// A dense matrix of 8-bit integers and its scales, one for each row: a tensor of I8 beside which `<name>.scales` is
/// F32 `[rows]`. Nothing for another tensor.
pub(super) fn dense_int8(reader: &Reader, name: &str) -> Result<Option<(Vec<i8>, Vec<f32>)>> {
    if !reader.is_dense_int8(name) {
        return Ok(None);
    }
    let values = reader.tensor(name)?.to_vec::<i8>()?;
    let scales = reader.tensor(&Part::Scales.key(name))?.to_vec::<f32>()?;
    match scales.iter().position(|scale| !scale.is_finite()) {
        None => Ok(Some((values, scales))),
        Some(row) => Err(twofour::Error::Scale { row, scale: 0 }.in_tensor(name).in_file(reader.path()).into()),
    }
}

/// The floats that [`dense_int8`] stands for.
pub(super) fn dequantized((values, scales): (Vec<i8>, Vec<f32>)) -> Vec<f32> {
    let cols = values.len() / scales.len().max(1);
    let rows = values.chunks(cols.max(1)).zip(scales);
    rows.flat_map(|(row, scale)| row.iter().map(move |q| f32::from(*q) * scale)).collect()
}

/// How the values of a compressed weight of that shape are stored.
pub(super) fn compressed_format(reader: &Reader, name: &str, shape: [usize; 2]) -> Result<ValueFormat> {
    let info = reader.compressed_info(name)?;
    expect_shape(reader, name, &shape, &[info.rows, info.cols])?;
    Ok(info.format)
}

/// The error for a compressed weight whose values are no weights of a model.
pub(super) fn unsupported(reader: &Reader, name: &str, format: ValueFormat) -> Error {
    if format == ValueFormat::Plain(DataType::I8) {
        let reason = format!("`{name}` is I8 without `{name}.scales`, so its values have no meaning as weights");
        return twofour::Error::Format { path: reader.path().to_owned(), reason }.into();
    }
    let supported = "f32, f16, bf16, i8 with scales, int4";
    twofour::Error::UnsupportedDType { operation: "reading a model", dtype: format.dense(), supported }.into()
}

/// A compressed weight, dense.
fn decompressed(reader: &Reader, name: &str, shape: [usize; 2]) -> Result<Vec<f32>> {
    fn widened<T: Arithmetic>(values: Vec<T>) -> Vec<f32> {
        values.into_iter().map(|value| value.to_f32()).collect()
    }
    Ok(match compressed_format(reader, name, shape)? {
        ValueFormat::Plain(DataType::F32) => reader.compressed::<f32>(name)?.to_dense(),
        ValueFormat::Plain(DataType::BF16) => widened(reader.compressed::<bf16>(name)?.to_dense()),
        ValueFormat::Plain(DataType::F16) => widened(reader.compressed::<f16>(name)?.to_dense()),
        ValueFormat::ScaledI8 | ValueFormat::GroupedI8(_) => reader.int8(name)?.dequantize().to_dense(),
        ValueFormat::Int4(_) => widened(reader.int4(name)?.dequantize().to_dense()),
        other => return Err(unsupported(reader, name, other)),
    })
}

/// The type of a model's weights: that of its largest tensor that is stored as f32, f16 or bf16; f32 where there is
/// none.
pub(super) fn dtype_of(reader: &Reader) -> DataType {
    let float = |dtype: StoredDType| match dtype {
        StoredDType::BF16 => Some(DataType::BF16),
        StoredDType::F16 => Some(DataType::F16),
        StoredDType::F32 => Some(DataType::F32),
        _ => None,
    };
    let floats =
        reader.plain_tensors().filter_map(|tensor| Some((tensor.shape.iter().product(), float(tensor.dtype)?)));
    floats.max_by_key(|(len, _): &(usize, _)| *len).map_or(DataType::F32, |(_, dtype)| dtype)
}
