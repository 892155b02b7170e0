//! A model that reads and writes text, wherever it comes from and whatever type it computes in.

use std::{fmt, ops::ControlFlow, path::Path};

use half::{bf16, f16};
use twofour::{
    DataType,
    file::{Reader, StoredDType},
    kernel::KernelElement,
};

#[cfg(feature = "cuda")]
use twofour_cuda::Device;

#[cfg(feature = "cuda")]
use super::CudaInference;
use super::{
    Checkpoint, Inference, Perplexity, Sampling, Tokenizer, TransformerConfig, Windows, file, saved::tokenizer_beside,
};
use crate::{Error, Result};

/// What [`LanguageModel`] runs: an [`Inference`] of any type.
pub trait Decoder: fmt::Debug + Send + Sync {
    /// The model's description.
    fn config(&self) -> &TransformerConfig;

    /// [`Inference::weight_bytes`].
    fn weight_bytes(&self) -> usize;

    /// [`Inference::generate`].
    ///
    /// # Errors
    /// As there.
    fn generate(
        &self,
        prompt: &[u32],
        count: usize,
        sampling: Sampling,
        f: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<()>;

    /// [`Inference::perplexity`].
    ///
    /// # Errors
    /// As there.
    fn perplexity(
        &self,
        tokens: &[u32],
        windows: Windows,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Perplexity>;
}

impl<T: KernelElement> Decoder for Inference<T> {
    fn config(&self) -> &TransformerConfig {
        self.config()
    }

    fn weight_bytes(&self) -> usize {
        self.weight_bytes()
    }

    fn generate(
        &self,
        prompt: &[u32],
        count: usize,
        sampling: Sampling,
        f: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<()> {
        self.generate(prompt, count, sampling, f)
    }

    fn perplexity(
        &self,
        tokens: &[u32],
        windows: Windows,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Perplexity> {
        self.perplexity(tokens, windows, progress)
    }
}

/// A model with its tokenizer.
#[derive(Debug)]
pub struct LanguageModel {
    /// The model.
    pub decoder: Box<dyn Decoder>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The type that it computes in.
    pub dtype: DataType,
    /// The token that texts begin with, if the model has one.
    pub begin: Option<u32>,
    /// The tokens that end a text.
    pub end: Vec<u32>,
}

impl LanguageModel {
    /// Loads a model: a [`Checkpoint`]'s directory, a file that [`Gpt::save`](super::Gpt::save) wrote, a directory with such a file, or the file of a
    /// training run's checkpoint. It computes in `dtype`
    /// (f32, bf16, f16), or else in the type of its weights.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`] and of [`Inference::load`]; another type.
    pub fn load(path: impl AsRef<Path>, dtype: Option<DataType>) -> Result<Self> {
        let path = path.as_ref();
        if Checkpoint::is_at(path) {
            let checkpoint = Checkpoint::open(path)?;
            let dtype = dtype.unwrap_or_else(|| checkpoint.dtype());
            let decoder: Box<dyn Decoder> = match dtype {
                DataType::F32 => Box::new(checkpoint.inference::<f32>()?),
                DataType::BF16 => Box::new(checkpoint.inference::<bf16>()?),
                DataType::F16 => Box::new(checkpoint.inference::<f16>()?),
                other => return Err(no_dtype(other)),
            };
            let (begin, end) = (checkpoint.begin(), checkpoint.end().to_vec());
            return Ok(LanguageModel { decoder, tokenizer: checkpoint.tokenizer()?, dtype, begin, end });
        }
        let reader = file::open(path)?;
        let dtype = dtype.unwrap_or_else(|| dtype_of(&reader));
        let decoder: Box<dyn Decoder> = match dtype {
            DataType::F32 => Box::new(Inference::<f32>::from_reader(&reader)?),
            DataType::BF16 => Box::new(Inference::<bf16>::from_reader(&reader)?),
            DataType::F16 => Box::new(Inference::<f16>::from_reader(&reader)?),
            other => return Err(no_dtype(other)),
        };
        let (tokenizer, begin) = of_file(&reader)?;
        Ok(LanguageModel { decoder, tokenizer, dtype, begin, end: vec![] })
    }

    /// Loads a model as [`LanguageModel::load`] does, onto an NVIDIA GPU: its decoder is a [`CudaInference`].
    ///
    /// # Errors
    /// Those of [`LanguageModel::load`] and of [`CudaInference::of_checkpoint`].
    #[cfg(feature = "cuda")]
    pub fn load_on(device: &Device, path: impl AsRef<Path>, dtype: Option<DataType>) -> Result<Self> {
        let path = path.as_ref();
        if Checkpoint::is_at(path) {
            let checkpoint = Checkpoint::open(path)?;
            let dtype = dtype.unwrap_or_else(|| checkpoint.dtype());
            let decoder = Box::new(CudaInference::of_checkpoint(device, &checkpoint, dtype)?);
            let (begin, end) = (checkpoint.begin(), checkpoint.end().to_vec());
            return Ok(LanguageModel { decoder, tokenizer: checkpoint.tokenizer()?, dtype, begin, end });
        }
        let reader = file::open(path)?;
        let dtype = dtype.unwrap_or_else(|| dtype_of(&reader));
        let decoder = Box::new(CudaInference::from_reader(device, &reader, dtype)?);
        let (tokenizer, begin) = of_file(&reader)?;
        Ok(LanguageModel { decoder, tokenizer, dtype, begin, end: vec![] })
    }

    /// The tokens of a prompt; of an empty one, the token that texts begin with.
    ///
    /// # Errors
    /// [`Error::Setting`] for an empty prompt where the model has no such token; those of [`Tokenizer::encode`].
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let tokens = self.tokenizer.encode(text)?;
        match (tokens.is_empty(), self.begin) {
            (false, _) => Ok(tokens),
            (true, Some(begin)) => Ok(vec![begin]),
            (true, None) => Err(Error::Setting {
                what: "the prompt",
                found: "empty".to_owned(),
                expected: "some text: the model has no token that texts begin with",
            }),
        }
    }
}

/// The tokenizer of a model in a file, and the token that its texts begin with.
pub(super) fn of_file(reader: &Reader) -> Result<(Tokenizer, Option<u32>)> {
    let tokenizer = tokenizer_beside(reader.path(), &file::config_of(reader)?)?;
    // A text of bytes may begin anywhere; a line's end is before most texts.
    let begin = matches!(tokenizer, Tokenizer::Bytes).then_some(b'\n'.into());
    Ok((tokenizer, begin))
}

fn no_dtype(found: DataType) -> Error {
    Error::Setting { what: "the type to compute in", found: found.to_string(), expected: "f32, bf16 or f16" }
}

/// The type of a model's weights: that of its largest tensor that is stored as f32, f16 or bf16; f32 where there is none.
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
