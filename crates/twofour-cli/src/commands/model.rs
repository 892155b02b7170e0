//! The model that a command runs.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use twofour::DataType;
use twofour_cuda::Device;
use twofour_nn::model::{Checkpoint, LanguageModel};

use super::train::TrainDevice;
use crate::{dtype::computing, exit::Usage};

/// Which model, and how it computes.
#[derive(Debug, Args)]
pub(crate) struct ModelArguments {
    /// A checkpoint's directory (config.json, safetensors, tokenizer.json), the folder of `train` or of `quickstart`, or a file of these; dense, pruned or compressed
    model: PathBuf,

    /// What to compute in: f32, bf16 or f16 [default: the type of the weights]
    #[arg(long, value_name = "DTYPE", value_parser = computing())]
    dtype: Option<DataType>,

    /// Where to compute: cpu, cuda, or cuda:NUMBER
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: TrainDevice,
}

impl ModelArguments {
    /// Loads it.
    pub(crate) fn load(&self) -> Result<LanguageModel> {
        let of_folder = ["sparse.safetensors", "model.safetensors"].map(|name| self.model.join(name));
        let path = match Checkpoint::is_at(&self.model) {
            true => None,
            false => of_folder.into_iter().find(|file| file.exists()),
        };
        let path = path.as_ref().unwrap_or(&self.model);
        match &self.device {
            TrainDevice::Cpu => Ok(LanguageModel::load(path, self.dtype)?),
            TrainDevice::Cuda(numbers) => match numbers.as_slice() {
                [number] => Ok(LanguageModel::load_on(&Device::open(*number)?, path, self.dtype)?),
                _ => bail!(Usage("a model runs on one device; name one GPU, as in --device cuda:0".into())),
            },
        }
    }
}
