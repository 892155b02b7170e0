//! Writing a model that was trained from a checkpoint as a checkpoint again.

use std::{collections::BTreeMap, fs, path::Path};

use twofour::{
    Arithmetic, DataType,
    file::{self as files, Overwrite, PlannedTensor, Reader, StoredElement, Writer},
};

use super::{CONFIG_FILE, Checkpoint, CheckpointError, StoredParts, tensors::transposed};
use crate::{
    Result,
    engine::Engine,
    model::{Gpt, TrainedModel, families::layout::Layout, file, float::match_float},
};

impl Checkpoint {
    /// Writes a model that [`Checkpoint::model`] made, and that may have been trained since, to a directory that
    /// transformers loads: weights under their original names in one file of `dtype` (f32, bf16 or f16), dense, the
    /// pruned elements of 2:4 layers as zeros; configuration, tokenizer and other files of this directory copied, but
    /// not weights of other formats and not hidden files. `quantization_config` is left out of the configuration: it
    /// describes weights that are compressed.
    ///
    /// # Errors
    /// A file of weights that exists unless `overwrite` allows it, another type, those of writing and of the engine.
    pub fn save<E: Engine>(
        &self,
        (engine, model): (&E, &Gpt<E>),
        directory: impl AsRef<Path>,
        overwrite: Overwrite,
        dtype: DataType,
    ) -> Result<()> {
        let directory = directory.as_ref();
        let weights = (&self.opened.layout, Some(&self.parts()));
        write_weights(weights, (engine, model), directory, overwrite, dtype)?;
        copy_beside((&self.opened.reader, &self.opened.directory), directory, None)
    }
}

/// Copies configuration, tokenizer and other files of a checkpoint's directory. `class` is the model's in transformers,
/// where it is another than the checkpoint's.
pub(super) fn copy_beside(
    (reader, source): (&Reader, &Path),
    directory: &Path,
    class: Option<&'static str>,
) -> Result<()> {
    for relative in files::Beside::of(reader, directory)?.files {
        let (from, to) = (source.join(&relative), directory.join(&relative));
        let parent = to.parent().unwrap_or(directory);
        fs::create_dir_all(parent).map_err(|source| CheckpointError::Io { path: parent.to_owned(), source })?;
        files::expect_replaceable(&to, Overwrite::Yes)?;
        fs::copy(&from, &to).map_err(|source| CheckpointError::Io { path: from, source })?;
    }
    for name in reader.described().iter().filter(|name| **name != CONFIG_FILE) {
        if let Some(text) = reader.beside(name)? {
            files::write_whole(directory.join(name), Overwrite::Yes, &text)?;
        }
    }
    let from = reader.path_beside(CONFIG_FILE);
    let bytes = match reader.described().is_empty() {
        true => fs::read(&from).map_err(|source| CheckpointError::Io { path: from.clone(), source })?,
        false => reader.beside(CONFIG_FILE)?.unwrap_or_default(),
    };
    write_config((&from, &bytes), &directory.join(CONFIG_FILE), class)
}

/// Writes a configuration without what it says of compressed weights, with the name of the model's class where it is
/// another.
fn write_config((from, bytes): (&Path, &[u8]), to: &Path, class: Option<&'static str>) -> Result<()> {
    let not = |reason: String| CheckpointError::NotAConfig { path: from.to_owned(), reason };
    let config: serde_json::Value = serde_json::from_slice(bytes).map_err(|error| not(error.to_string()))?;
    if config.get("quantization_config").is_none() && class.is_none() {
        return Ok(files::write_whole(to, Overwrite::Yes, bytes)?);
    }
    let mut config = config;
    if let Some(fields) = config.as_object_mut() {
        fields.remove("quantization_config");
        if let Some(class) = class {
            fields.insert("architectures".to_owned(), serde_json::json!([class]));
        }
    }
    let text = serde_json::to_vec_pretty(&config).map_err(|error| not(error.to_string()))?;
    Ok(files::write_whole(to, Overwrite::Yes, &text)?)
}

/// Writes a model's weights by a layout's names to `model.safetensors` in a directory, which is made if it does not
/// exist. What a tensor has beyond the model's, which may have the first learned positions alone, is that of the
/// checkpoint that it came from.
pub(super) fn write_weights<E: Engine>(
    (layout, source): (&Layout, Option<&StoredParts<'_>>),
    (engine, model): (&E, &impl TrainedModel<E>),
    directory: &Path,
    overwrite: Overwrite,
    dtype: DataType,
) -> Result<()> {
    fs::create_dir_all(directory).map_err(|source| CheckpointError::Io { path: directory.to_owned(), source })?;
    let path = directory.join("model.safetensors");
    match_float!(dtype, "dtype of the checkpoint", |T| {
        write_as::<T, E, _>((layout, source), (engine, model), &path, overwrite)
    })
}

fn write_as<T: Arithmetic + StoredElement, E: Engine, M: TrainedModel<E>>(
    (layout, source): (&Layout, Option<&StoredParts<'_>>),
    (engine, model): (&E, &M),
    path: &Path,
    overwrite: Overwrite,
) -> Result<()> {
    let mut planned = vec![];
    let mut plan = |name: String, shape: Vec<usize>| planned.push(PlannedTensor::new(name, T::DTYPE, shape));
    for tensor in layout.tensors.values() {
        plan(tensor.name.clone(), tensor.shape.clone());
    }
    for linear in layout.linears.values() {
        for (name, outputs) in &linear.parts {
            plan(format!("{name}.weight"), linear.stored_shape(*outputs).to_vec());
            if linear.has_bias {
                plan(format!("{name}.bias"), vec![*outputs]);
            }
        }
    }
    // transformers asks for the framework that wrote a file.
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut writer = Writer::create(path, overwrite, planned, metadata)?;
    let rounded = |values: &[f32]| -> Vec<T> { values.iter().map(|value| T::from_f32(*value)).collect() };
    for parameter in model.parameters() {
        if let Some(tensor) = layout.tensors.get(parameter.name()) {
            let mut values = engine.read(parameter.master())?;
            if let Some(source) = source.filter(|_| values.len() < tensor.shape.iter().product()) {
                values.extend(source.values(parameter.name())?.into_iter().skip(values.len()).collect::<Vec<_>>());
                values.splice(..0, source.skipped(parameter.name())?);
            }
            let stored: Vec<f32> = values.into_iter().map(|value| value / tensor.factor - tensor.added).collect();
            writer.write_elements(&tensor.name, &rounded(&stored))?;
        }
    }
    for linear in model.linears() {
        let Some(stored) = layout.linears.get(linear.name()) else { continue };
        let weight = match linear.sparse() {
            Some(_) => file::compressed::<T, E>(engine, linear)?.to_dense(),
            None => rounded(&linear.squashed(engine)?),
        };
        let bias = linear.bias().map(|bias| engine.read(bias.master())).transpose()?;
        let mut first = 0;
        for (name, outputs) in &stored.parts {
            let rows = first * stored.inputs..(first + outputs) * stored.inputs;
            let key = format!("{name}.weight");
            let part = layout.as_stored(name, &weight[rows], stored.inputs);
            match stored.is_transposed {
                true => writer.write_elements(&key, &transposed(&part, [*outputs, stored.inputs]))?,
                false => writer.write_elements(&key, &part)?,
            }
            if let Some(bias) = &bias {
                let bias = layout.as_stored(name, &bias[first..first + outputs], 1);
                writer.write_elements(&format!("{name}.bias"), &rounded(&bias))?;
            }
            first += outputs;
        }
    }
    Ok(writer.finish()?)
}
