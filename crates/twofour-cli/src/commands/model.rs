//! The model that a command runs.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use twofour::{DataType, file::Reader};
use twofour_cuda::Device;
use twofour_nn::model::{LanguageModel, SavedModel, is_checkpoint};

use crate::{device::ComputeDevice, dtype::computing, exit::Usage, hub, memory, present::Screen};

/// Checks that a file to convert is a model's, not a checkpoint of training, which has the optimizer's state as well.
///
/// # Errors
/// [`Usage`] with what to do.
pub(crate) fn expect_model(reader: &Reader) -> Result<(), Usage> {
    match is_checkpoint(reader) {
        false => Ok(()),
        true => Err(Usage(format!(
            "{}: a checkpoint of a training run, with the state of its optimizer; name the folder of the run, which \
             has the model once it is finished, or start from the checkpoint with twofour train --set model.from",
            reader.path().display()
        ))),
    }
}

/// Which model, and how it computes.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    /// A checkpoint's directory (config.json, safetensors, tokenizer.json), the folder of `train` or of `quickstart`, a
    /// file of these, a checkpoint of a run (RUN/best, RUN/last), or OWNER/NAME or OWNER/NAME@REVISION on the Hugging
    /// Face hub; dense, pruned or compressed
    model: PathBuf,

    /// What to compute in: f32, bf16 or f16 [default: the type of the weights]
    #[arg(long, value_name = "DTYPE", value_parser = computing())]
    dtype: Option<DataType>,

    /// Where to compute: cpu, cuda, or cuda:NUMBER
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: ComputeDevice,
}

impl ModelArguments {
    /// The arguments with the path of the model on this machine, downloaded where it is a name on the hub.
    pub(crate) fn located(mut self, screen: &Screen) -> Result<Self> {
        self.model = hub::locate(&self.model, screen)?;
        Ok(self)
    }

    /// Opens it, without reading its weights, with the type to compute in.
    pub(crate) fn open(&self) -> Result<(SavedModel, DataType)> {
        let saved = SavedModel::open(&self.model)?;
        let dtype = self.dtype.unwrap_or_else(|| saved.dtype());
        Ok((saved, dtype))
    }

    /// The model's path.
    pub(crate) fn directory(&self) -> &Path {
        &self.model
    }

    /// The type to compute in, where one was given.
    pub(crate) fn dtype(&self) -> Option<DataType> {
        self.dtype
    }

    /// Loads it.
    pub(crate) fn load(&self) -> Result<LanguageModel> {
        let path = SavedModel::locate(&self.model);
        match &self.device {
            ComputeDevice::Cpu => {
                let (saved, dtype) = self.open()?;
                memory::expect_room_for_weights(saved.reader(), dtype)?;
                drop(saved);
                Ok(LanguageModel::load_as(path, self.dtype)?)
            }
            ComputeDevice::Cuda(_) => Ok(LanguageModel::load_on(&Device::open(self.gpu()?)?, path, self.dtype)?),
        }
    }

    /// Where it runs.
    pub(crate) fn device(&self) -> &ComputeDevice {
        &self.device
    }

    /// The GPU that it runs on, if it runs on one.
    pub(crate) fn opened_gpu(&self) -> Result<Option<Device>> {
        match &self.device {
            ComputeDevice::Cpu => Ok(None),
            ComputeDevice::Cuda(_) => Ok(Some(Device::open(self.gpu()?)?)),
        }
    }

    /// The number of the one GPU that it runs on.
    pub(crate) fn gpu(&self) -> Result<usize> {
        match &self.device {
            ComputeDevice::Cuda(numbers) if numbers.len() == 1 => Ok(numbers[0]),
            _ => bail!(Usage("a model runs on one device; name one GPU, as in --device cuda:0".into())),
        }
    }
}
