//! A model's file: safetensors, dense or 2:4 compressed layer by layer, with the sizes in the header's metadata.

use std::{collections::BTreeMap, path::Path};

use candle_core::{Device, Tensor, Var};
use half::{bf16, f16};
use twofour::{
    Arithmetic, DataType,
    file::{CompressedInfo, Overwrite, Plan, PlannedTensor, Reader, StoredDType, StoredElement, ValueFormat, Writer},
};

use super::{Config, Gpt, form};
use crate::{
    Error, Result,
    linear::{AnyLinear, CompressedLinear},
    ops::rows,
};

/// The metadata key that holds the [`Config`] as JSON.
const CONFIG_KEY: &str = "twofour.gpt";

impl Gpt {
    /// Writes the model, all of it or nothing: weights in `dtype` (F32, BF16 or F16), sparse layers compressed under their
    /// present mask, everything else dense.
    ///
    /// # Errors
    /// An output that exists already unless `overwrite` allows it; another dtype; layers that are compressed in memory
    /// already (copy the file that they came from); those of writing.
    pub fn save(&self, path: impl AsRef<Path>, overwrite: Overwrite, dtype: DataType) -> Result<()> {
        match dtype {
            DataType::F32 => self.save_as::<f32>(path.as_ref(), overwrite),
            DataType::BF16 => self.save_as::<bf16>(path.as_ref(), overwrite),
            DataType::F16 => self.save_as::<f16>(path.as_ref(), overwrite),
            other => {
                let found = other.to_string();
                Err(Error::Setting { what: "dtype of the model's file", found, expected: "f32, bf16 or f16" })
            }
        }
    }

    fn save_as<T: Arithmetic + StoredElement>(&self, path: &Path, overwrite: Overwrite) -> Result<()> {
        // A sparse layer's weight is written compressed, so its master is not among the plain tensors.
        let sparse: Vec<_> = self
            .linears()
            .into_iter()
            .filter_map(|(name, linear)| match linear {
                AnyLinear::Sparse(sparse) => Some((format!("{name}.weight"), sparse)),
                _ => None,
            })
            .collect();
        if let Some((name, _)) = self.linears().iter().find(|(_, linear)| matches!(linear, AnyLinear::Compressed(_))) {
            let error = Error::WrongForm {
                found: "compressed in memory",
                remedy: "copy the file that it was loaded from, or save the model before compressing it",
            };
            return Err(error.in_layer(name));
        }
        let mut plain = self.variables()?;
        plain.retain(|(name, _)| sparse.iter().all(|(weight, _)| weight != name));

        let mut plan = Plan::new();
        for (name, var) in &plain {
            plan.tensor(PlannedTensor::new(name, T::DTYPE, var.dims()));
        }
        for (name, linear) in &sparse {
            let (outputs, inputs) = linear.weight().dims2()?;
            plan.compressed(CompressedInfo::new(name, T::DTYPE, outputs, inputs)?);
        }
        let config = serde_json::to_string(self.config()).map_err(|e| Error::State { reason: e.to_string() })?;
        let metadata = BTreeMap::from([(CONFIG_KEY.to_owned(), config)]);
        let mut writer = Writer::create(path, overwrite, plan, metadata)?;
        for (name, var) in &plain {
            let values: Vec<T> =
                rows::with_slice(var, "parameter", |v| Ok(v.iter().map(|&v| T::from_f32(v)).collect()))?;
            writer.write_elements(name, &values)?;
        }
        for (name, linear) in &sparse {
            writer.write_compressed(name, &form::compressed::<T>(linear)?)?;
        }
        Ok(writer.finish()?)
    }

    /// Reads a model that [`Gpt::save`] wrote, or that `twofour compress` made of one. Compressed layers come as
    /// [`AnyLinear::Compressed`], for inference; dense ones as f32 variables that can be trained.
    ///
    /// # Errors
    /// A file that is not a model's, lacks a tensor or holds one of another shape; those of reading.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_reader(&Reader::open(path)?)
    }

    /// [`Gpt::load`], from a file that is open already.
    ///
    /// # Errors
    /// As for [`Gpt::load`].
    pub fn from_reader(reader: &Reader) -> Result<Self> {
        let config = config_of(reader)?;
        let compressed = |weight: &str| reader.compressed_weights().any(|info| info.name == weight);
        Gpt::assemble(
            &config,
            |name, shape| Ok(Var::from_tensor(&plain(reader, name, shape)?)?),
            |name, outputs, inputs| {
                let weight = format!("{name}.weight");
                let bias = match name {
                    "head" => None,
                    _ => Some(plain(reader, &format!("{name}.bias"), &[outputs])?),
                };
                if compressed(&weight) {
                    let linear = packed(reader, &weight, (outputs, inputs), bias.as_ref());
                    return linear.map(AnyLinear::from).map_err(|e| e.in_layer(name));
                }
                let weight = Var::from_tensor(&plain(reader, &weight, &[outputs, inputs])?)?;
                let bias = bias.map(|b| Var::from_tensor(&b)).transpose()?;
                Ok(AnyLinear::from(candle_nn::Linear::new(weight.into_inner(), bias.map(Var::into_inner))))
            },
        )
    }
}

fn config_of(reader: &Reader) -> Result<Config> {
    let fault = |reason: String| twofour::Error::Format { path: reader.path().to_owned(), reason };
    let Some(text) = reader.metadata().get(CONFIG_KEY) else {
        let reason = format!("its metadata has no `{CONFIG_KEY}`, so it is no model that this program trained");
        return Err(fault(reason).into());
    };
    let config: Config = serde_json::from_str(text).map_err(|e| fault(format!("metadata `{CONFIG_KEY}`: {e}")))?;
    config.validate()?;
    // Every layer needs tensors: a number of layers that the file cannot hold is refused before anything is made of it.
    if config.layers > reader.tensors().count() {
        let reason =
            format!("metadata `{CONFIG_KEY}` speaks of {} layers, more than the file has tensors", config.layers);
        return Err(fault(reason).into());
    }
    Ok(config)
}

/// A tensor stored as floats, as f32.
fn plain(reader: &Reader, name: &str, shape: &[usize]) -> Result<Tensor> {
    let view = reader.tensor(name)?;
    if view.info.shape != shape {
        let expected = format!("{shape:?} (`{name}`)");
        return Err(Error::Shape { what: "a tensor of the model's file", found: view.info.shape.clone(), expected });
    }
    fn widened<T: Arithmetic + StoredElement>(view: &twofour::file::TensorView<'_>) -> Result<Vec<f32>> {
        Ok(view.elements::<T>()?.iter().map(|v| v.to_f32()).collect())
    }
    let values = match view.info.dtype {
        StoredDType::BF16 => widened::<bf16>(&view)?,
        StoredDType::F16 => widened::<f16>(&view)?,
        _ => widened::<f32>(&view)?,
    };
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// A compressed layer.
fn packed(reader: &Reader, name: &str, dims: (usize, usize), bias: Option<&Tensor>) -> Result<CompressedLinear> {
    let info = reader.compressed_info(name)?;
    if (info.rows, info.cols) != dims {
        let expected = format!("[{}, {}]", dims.0, dims.1);
        return Err(Error::Shape { what: "the compressed weight", found: vec![info.rows, info.cols], expected });
    }
    match info.format {
        ValueFormat::Plain(DataType::F32) => CompressedLinear::new(reader.compressed::<f32>(name)?, bias),
        ValueFormat::Plain(DataType::BF16) => CompressedLinear::new(reader.compressed::<bf16>(name)?, bias),
        ValueFormat::Plain(DataType::F16) => CompressedLinear::new(reader.compressed::<f16>(name)?, bias),
        ValueFormat::ScaledI8 => {
            let scales = reader.scales(name)?.unwrap_or_default();
            CompressedLinear::from_quantized(reader.compressed::<i8>(name)?, scales, bias)
        }
        ValueFormat::Int4(_) => CompressedLinear::new(reader.int4(name)?.dequantize(), bias),
        ValueFormat::Plain(DataType::I8) => {
            let reason = format!("`{name}` is I8 without `{name}.scales`, so its values have no meaning as weights");
            Err(twofour::Error::Format { path: reader.path().to_owned(), reason }.into())
        }
        other => {
            let supported = "f32, f16, bf16, i8 with scales, int4";
            Err(twofour::Error::UnsupportedDType { operation: "inference", dtype: other.dense(), supported }.into())
        }
    }
}
