//! Writing a model that was trained from a checkpoint as a checkpoint again.

use std::{collections::BTreeMap, fs, path::Path};

use half::{bf16, f16};
use twofour::{
    Arithmetic, DataType,
    file::{Overwrite, PlannedTensor, StoredElement, Writer},
};

use super::{Checkpoint, CheckpointError};
use crate::{
    Error, Result,
    engine::Engine,
    model::{Gpt, file},
};

impl Checkpoint {
    /// Writes a model that [`Checkpoint::model`] made, and that may have been trained since, to a directory that transformers loads: weights under their original names in
    /// one file of `dtype` (f32, bf16 or f16), dense, the pruned elements of 2:4 layers as zeros; configuration, tokenizer and other files of this directory copied.
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
        let io = |source| CheckpointError::Io { path: directory.to_owned(), source };
        fs::create_dir_all(directory).map_err(io)?;
        match dtype {
            DataType::F32 => self.write_weights::<f32, E>((engine, model), directory, overwrite)?,
            DataType::BF16 => self.write_weights::<bf16, E>((engine, model), directory, overwrite)?,
            DataType::F16 => self.write_weights::<f16, E>((engine, model), directory, overwrite)?,
            other => {
                let found = other.to_string();
                return Err(Error::Setting { what: "dtype of the checkpoint", found, expected: "f32, bf16 or f16" });
            }
        }
        for entry in fs::read_dir(&self.directory).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let name = path.file_name().unwrap_or_default().to_owned();
            let is_weight = name.to_string_lossy().contains(".safetensors");
            if path.is_file() && !is_weight && path != directory.join(&name) {
                fs::copy(&path, directory.join(&name)).map_err(|source| CheckpointError::Io { path, source })?;
            }
        }
        Ok(())
    }

    fn write_weights<T: Arithmetic + StoredElement, E: Engine>(
        &self,
        (engine, model): (&E, &Gpt<E>),
        directory: &Path,
        overwrite: Overwrite,
    ) -> Result<()> {
        let mut planned = vec![];
        let mut plan = |name: String, shape: Vec<usize>| planned.push(PlannedTensor::new(name, T::DTYPE, shape));
        for tensor in self.layout.tensors.values() {
            plan(tensor.name.clone(), tensor.shape.clone());
        }
        for linear in self.layout.linears.values() {
            for (name, outputs) in &linear.parts {
                plan(format!("{name}.weight"), linear.stored_shape(*outputs).to_vec());
                if linear.has_bias {
                    plan(format!("{name}.bias"), vec![*outputs]);
                }
            }
        }
        // transformers asks for the framework that wrote a file.
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        let mut writer = Writer::create(directory.join("model.safetensors"), overwrite, planned, metadata)?;
        let rounded = |values: &[f32]| -> Vec<T> { values.iter().map(|value| T::from_f32(*value)).collect() };
        for parameter in model.parameters() {
            if let Some(tensor) = self.layout.tensors.get(parameter.name()) {
                writer.write_elements(&tensor.name, &rounded(&engine.read(parameter.master())?))?;
            }
        }
        for linear in model.linears() {
            let Some(stored) = self.layout.linears.get(linear.name()) else { continue };
            let weight = match linear.sparse() {
                Some(_) => file::compressed::<T, E>(engine, linear)?.to_dense(),
                None => rounded(&engine.read(linear.weight().master())?),
            };
            let bias = linear.bias().map(|bias| engine.read(bias.master())).transpose()?;
            let mut first = 0;
            for (name, outputs) in &stored.parts {
                let rows = first * stored.inputs..(first + outputs) * stored.inputs;
                writer.write_elements(&format!("{name}.weight"), &weight[rows])?;
                if let Some(bias) = &bias {
                    writer.write_elements(&format!("{name}.bias"), &rounded(&bias[first..first + outputs]))?;
                }
                first += outputs;
            }
        }
        Ok(writer.finish()?)
    }
}
