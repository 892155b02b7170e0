//! Checkpoints: everything that training goes on from, in one file, replaced in one step.
//!
//! The file is safetensors: `model.<name>` for each variable (of a sparse layer its dense master), `optimizer.` and
//! `masks.` for what [`AdamW::state`](crate::optim::AdamW::state) and [`masks`] give; settings and the step are in the
//! metadata. The batches to come depend on seed and step alone, so there is no generator to save.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
};

use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use twofour::file::{Overwrite, PlannedTensor, Reader, StoredDType, Writer};

use super::{TrainConfig, Trainer};
use crate::{
    Error, Result,
    gpt::Config,
    linear::{AnyLinear, check_masks, masks},
};

/// The name of the checkpoint's file in its directory.
pub const CHECKPOINT_FILE: &str = "checkpoint.safetensors";

const STATE_KEY: &str = "twofour.checkpoint";
const MODEL: &str = "model.";
const OPTIMIZER: &str = "optimizer.";
const MASKS: &str = "masks.";

/// What a checkpoint says about itself.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct State {
    model: Config,
    training: TrainConfig,
    step: u64,
    corpus: u64,
    sparse_layers: Vec<String>,
}

impl Trainer {
    fn state(&self) -> State {
        let is_sparse = |linear: &AnyLinear| matches!(linear, AnyLinear::Sparse(_));
        State {
            model: *self.model.config(),
            training: self.config,
            step: self.step,
            corpus: self.corpus.fingerprint(),
            sparse_layers: self
                .model
                .linears()
                .into_iter()
                .filter(|(_, l)| is_sparse(l))
                .map(|(name, _)| name)
                .collect(),
        }
    }

    /// Writes a checkpoint to `directory`, which is made if it does not exist. The one before it stays until the new one is
    /// complete and on the disk: whenever the process is killed, one of the two is there.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn save(&mut self, directory: impl AsRef<Path>) -> Result<()> {
        let directory = directory.as_ref();
        fs::create_dir_all(directory).map_err(io(directory, "creating it"))?;
        // In order, so that the same state gives the same bytes.
        let mut tensors = BTreeMap::new();
        tensors.extend(
            self.model.variables()?.into_iter().map(|(name, var)| (format!("{MODEL}{name}"), var.into_inner())),
        );
        tensors
            .extend(self.optimizer.state()?.into_iter().map(|(name, tensor)| (format!("{OPTIMIZER}{name}"), tensor)));
        tensors.extend(masks(&mut self.model)?.into_iter().map(|(name, tensor)| (format!("{MASKS}{name}"), tensor)));
        let planned: Vec<_> = tensors
            .iter()
            .map(|(name, t)| Ok(PlannedTensor::new(name, stored(t.dtype())?, t.dims())))
            .collect::<Result<_>>()?;
        let state = serde_json::to_string(&self.state()).map_err(|e| Error::State { reason: e.to_string() })?;
        let metadata = BTreeMap::from([(STATE_KEY.to_owned(), state)]);
        let mut writer = Writer::create(directory.join(CHECKPOINT_FILE), Overwrite::Yes, planned, metadata)?;
        for (name, tensor) in &tensors {
            let flat = tensor.flatten_all()?;
            match stored(tensor.dtype())? {
                StoredDType::I64 => writer.write_elements(name, &flat.to_vec1::<i64>()?)?,
                StoredDType::U32 => writer.write_elements(name, &flat.to_vec1::<u32>()?)?,
                _ => writer.write_elements(name, &flat.to_vec1::<f32>()?)?,
            }
        }
        Ok(writer.finish()?)
    }

    /// Goes back to the checkpoint in `directory`: parameters, moments, masks and step. The trainer must have been made as
    /// the one that saved it was: same sizes, same settings, same text, same layers sparse. Training then goes on as if it
    /// had never stopped, bit for bit.
    ///
    /// # Errors
    /// No checkpoint, a damaged one, or [`Error::State`] where it belongs to another run or a tensor does not fit. The
    /// trainer is unchanged then.
    pub fn resume(&mut self, directory: impl AsRef<Path>) -> Result<()> {
        self.resume_from_reader(&Reader::open(directory.as_ref().join(CHECKPOINT_FILE))?)
    }

    /// [`Trainer::resume`], from a checkpoint's file that is open already.
    ///
    /// # Errors
    /// As for [`Trainer::resume`].
    pub fn resume_from_reader(&mut self, reader: &Reader) -> Result<()> {
        let saved = saved_state(reader)?;
        let own = self.state();
        let differing = [
            ("sizes of the model", saved.model == own.model),
            ("training settings", saved.training == own.training),
            ("text", saved.corpus == own.corpus),
            ("sparse layers", saved.sparse_layers == own.sparse_layers),
        ];
        if let Some((what, _)) = differing.iter().find(|(_, same)| !same) {
            let reason = format!("{}: it was saved with other {what}", reader.path().display());
            return Err(Error::State { reason });
        }
        // Everything is read and checked before anything is changed.
        let variables = self.model.variables()?;
        let mut values = vec![];
        for (name, var) in &variables {
            let tensor = read(reader, &format!("{MODEL}{name}"))?;
            if tensor.dims() != var.dims() || tensor.dtype() != var.dtype() {
                let reason = format!(
                    "`{name}` is {:?} {:?}, not {:?} {:?}",
                    tensor.dtype(),
                    tensor.dims(),
                    var.dtype(),
                    var.dims()
                );
                return Err(Error::State { reason });
            }
            values.push(tensor);
        }
        let masks = check_masks(&mut self.model, &read_all(reader, MASKS)?)?;
        self.optimizer.load_state(&read_all(reader, OPTIMIZER)?)?;
        masks.put_back(&mut self.model)?;
        for ((_, var), value) in variables.iter().zip(&values) {
            var.set(value)?;
        }
        self.step = saved.step;
        Ok(())
    }
}

fn saved_state(reader: &Reader) -> Result<State> {
    let fault = |reason| Error::from(twofour::Error::Format { path: reader.path().to_owned(), reason });
    let Some(text) = reader.metadata().get(STATE_KEY) else {
        return Err(fault(format!("its metadata has no `{STATE_KEY}`, so it is no checkpoint")));
    };
    serde_json::from_str(text).map_err(|e| fault(format!("metadata `{STATE_KEY}`: {e}")))
}

fn stored(dtype: DType) -> Result<StoredDType> {
    match dtype {
        DType::F32 => Ok(StoredDType::F32),
        DType::I64 => Ok(StoredDType::I64),
        DType::U32 => Ok(StoredDType::U32),
        found => Err(Error::DType { what: "a tensor of a checkpoint", found, expected: "F32, I64 or U32".to_owned() }),
    }
}

fn read(reader: &Reader, name: &str) -> Result<Tensor> {
    let view = reader.tensor(name)?;
    let shape = view.info.shape.as_slice();
    Ok(match view.info.dtype {
        StoredDType::I64 => Tensor::from_vec(view.to_vec::<i64>()?, shape, &Device::Cpu)?,
        StoredDType::U32 => Tensor::from_vec(view.to_vec::<u32>()?, shape, &Device::Cpu)?,
        _ => Tensor::from_vec(view.to_vec::<f32>()?, shape, &Device::Cpu)?,
    })
}

/// The tensors whose names begin with `prefix`, under the rest of their names.
fn read_all(reader: &Reader, prefix: &str) -> Result<HashMap<String, Tensor>> {
    let names = reader.tensors().filter_map(|info| info.name.strip_prefix(prefix));
    names.map(|name| Ok((name.to_owned(), read(reader, &format!("{prefix}{name}"))?))).collect()
}

fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    let path = PathBuf::from(path);
    move |source| twofour::Error::Io { path, action, source }.into()
}
