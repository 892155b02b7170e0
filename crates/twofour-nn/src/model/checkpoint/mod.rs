//! Checkpoints as Hugging Face's transformers has them: a directory with `config.json`, safetensors (one file, or shards with an index) and `tokenizer.json`.
//!
//! Weights may be f32, f16 or bf16, dense or [compressed](twofour::file), or dense 8-bit integers beside their scales. Every tensor that the configuration requires must be there in its shape, and every other
//! tensor is an error, but for these, which are ignored: `rotary_emb.inv_freq` and GPT-2's `attn.bias` and `attn.masked_bias`, which older versions stored and
//! which follow from the configuration, `lm_head.weight` where `tie_word_embeddings` says that the head is the embedding, unless it has the embedding's shape and other values, and
//! heads for other tasks, whose names begin with `score.`, `classifier.`, `qa_outputs.` or `v_head.`. A decoder may be stored without a head that scores tokens, as embedding and
//! reward models are: its layers can be run one by one ([`Calibration`](super::Calibration)), but text cannot be scored or generated.
//!
//! | `model_type` | beside the sizes |
//! |---|---|
//! | `llama` | rotary positions with llama3 scaling, biases, tied embeddings |
//! | `mistral` | sliding windows |
//! | `qwen2` | biases of queries, keys and values |
//! | `qwen3` | norms of queries and keys |
//! | `gpt2` | learned positions, transposed weights, GELU by tanh |
//!
//! [`EncoderCheckpoint`] reads `bert`, and [`ImageCheckpoint`] `vit`, `dinov2`, `sam` and `sam_vision_model`.

mod bert;
mod error;
mod fields;
mod gpt2;
mod image;
#[cfg(test)]
mod integer_tests;
mod layout;
mod llama;
mod new;
mod place;
mod save;
mod tensors;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use twofour::{
    DataType,
    file::{Reader, StoredElement},
    kernel::KernelElement,
};

pub use self::{
    bert::EncoderCheckpoint,
    error::CheckpointError,
    image::ImageCheckpoint,
    new::{is_llama, save_llama},
};
pub(crate) use self::{
    bert::{MASKED_TRANSFORM, OWN_DECODER},
    layout::{Layout, StoredLinear},
    tensors::StoredParts,
};
use self::{fields::Fields, llama::Family};
use super::{
    Gpt, Inference, Tokenizer,
    config::{ModelOutput, TransformerConfig},
    language::dtype_of,
};
use crate::{Result, engine::Engine};

const CONFIG_FILE: &str = "config.json";
/// The model's name for the linear layer that scores tokens.
const HEAD: &str = "head";

/// The table of tokens of a decoder whose head is not the same.
const EMBEDDING: &str = "embedding.weight";
const GENERATION_FILE: &str = "generation_config.json";

/// A checkpoint directory whose configuration and headers were read and checked. Weights are read when a model is made of it.
#[derive(Debug)]
pub struct Checkpoint {
    directory: PathBuf,
    config: TransformerConfig,
    reader: Reader,
    layout: Layout,
    begin: Option<u32>,
    end: Vec<u32>,
}

/// What `model_type` says in a directory's configuration.
pub(crate) fn model_type(directory: &Path) -> Result<Option<String>> {
    Ok(place::fields_of(directory)?.text_if("model_type")?.map(str::to_owned))
}

/// Whether a head is stored that is not the embedding: it is used then, whatever the configuration says of tying, as in transformers 5.
fn has_own_head(reader: &Reader) -> Result<bool> {
    if reader.compressed_info("lm_head.weight").is_ok() {
        return Ok(true);
    }
    let Some(head) = reader.tensors().find(|tensor| tensor.name == "lm_head.weight") else { return Ok(false) };
    let is_embedding = |name: &str| name.ends_with("embed_tokens.weight") || name.ends_with("wte.weight");
    let Some(embedding) = reader.tensors().find(|tensor| is_embedding(&tensor.name)) else { return Ok(false) };
    if head.shape != embedding.shape {
        return Ok(false);
    }
    Ok(head.dtype != embedding.dtype
        || *reader.tensor(&head.name)?.bytes()? != *reader.tensor(&embedding.name)?.bytes()?)
}

/// What the names of heads for other tasks than scoring tokens begin with.
const TASK_HEADS: [&str; 4] = ["score.", "classifier.", "qa_outputs.", "v_head."];

/// Whether a decoder is stored with a head that scores tokens. The embedding of a classifier is none, even where the configuration ties it to one.
fn has_head(reader: &Reader, tied: bool) -> bool {
    let is_stored = reader.tensors().any(|tensor| tensor.name == "lm_head.weight");
    let has_task_head = || {
        let mut names = reader.tensors().map(|tensor| &tensor.name);
        names.any(|name| TASK_HEADS.iter().any(|beginning| name.starts_with(beginning)))
    };
    is_stored || reader.compressed_info("lm_head.weight").is_ok() || tied && !has_task_head()
}

impl Checkpoint {
    /// Whether a path is meant as a checkpoint: a directory with a configuration, or a file of weights or an index in one. A file that describes its own model, as
    /// [`Gpt::save`] writes it, is none.
    pub fn is_at(path: impl AsRef<Path>) -> bool {
        place::is_checkpoint(path.as_ref())
    }

    /// Opens a directory, or one file of weights or index in it.
    ///
    /// # Errors
    /// [`CheckpointError`] for a configuration that is damaged, of another family, or has a field that is not supported, for sizes that [`TransformerConfig::validate`]
    /// refuses, and for tensors that do not fit it; those of [`Reader::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let directory = place::directory_of(path);
        let fields = place::fields_of(path)?;
        let family = match fields.text_if("model_type")? {
            Some("llama") => Some(Family::Llama),
            Some("mistral") => Some(Family::Mistral),
            Some("qwen2") => Some(Family::Qwen2),
            Some("qwen3") => Some(Family::Qwen3),
            Some("gpt2") => None,
            other => {
                let found = other.map_or("absent".to_owned(), |name| format!("`{name}`"));
                let supported = "llama, mistral, qwen2, qwen3 and gpt2";
                let path = fields.path().to_owned();
                return Err(CheckpointError::UnsupportedModel { path, found, supported }.into());
            }
        };
        let mut config = match family {
            Some(family) => llama::config(&fields, family)?,
            None => gpt2::config(&fields)?,
        };
        config.validate().map_err(|error| fields.not_valid(&error))?;
        let reader = place::reader_of(path, &fields)?;
        let has_head = has_head(&reader, config.is_tied());
        if let ModelOutput::Vocabulary { tied, .. } = &mut config.output {
            *tied = *tied && has_head && !has_own_head(&reader)?;
        }
        // Every layer needs tensors: a number of layers that the files cannot hold is refused before anything is made of it.
        if config.layers > reader.tensors().count() {
            let field = if family.is_some() { "num_hidden_layers" } else { "n_layer" };
            return Err(fields.unsupported(field, "the files have fewer tensors than that").into());
        }
        let is_prefix = |prefix: &&'static str| reader.tensors().any(|tensor| tensor.name.starts_with(prefix));
        let prefix = |of: &[&'static str]| of.iter().copied().find(is_prefix).unwrap_or_default();
        let mut layout = match family {
            Some(_) => llama::layout(&config, prefix(&["model.", "transformer."])),
            None => gpt2::layout(&config, prefix(&["transformer."])),
        };
        layout.ignored_beginnings.extend(TASK_HEADS);
        if !has_head {
            layout.linears.remove(HEAD);
        }
        layout.check(&reader)?;
        // What ends a text is first of all what generation was set up for.
        let generation = directory.join(GENERATION_FILE);
        let generation = if generation.is_file() { Some(Fields::read(&generation)?) } else { None };
        let tokens = |field: &str| -> Result<Vec<u32>> {
            let own = generation.as_ref().map(|fields| fields.tokens(field)).transpose()?.unwrap_or_default();
            Ok(if own.is_empty() { fields.tokens(field)? } else { own })
        };
        let (begin, end) = (tokens("bos_token_id")?.first().copied(), tokens("eos_token_id")?);
        Ok(Checkpoint { directory, config, reader, layout, begin, end })
    }

    /// The model's description.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// The files of weights.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// The token that texts begin with, if the model has one.
    pub fn begin(&self) -> Option<u32> {
        self.begin
    }

    /// The tokens that end a text.
    pub fn end(&self) -> &[u32] {
        &self.end
    }

    /// The type of the weights: that of the largest tensor that is stored dense as f32, f16 or bf16; f32 where there is none.
    pub fn dtype(&self) -> DataType {
        dtype_of(&self.reader)
    }

    /// Reads the tokenizer.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`](crate::text::TextError::Tokenizer) where there is none, or a damaged one.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::read(&self.directory.join("tokenizer.json"))
    }

    /// Checks that the model has a head that scores tokens.
    ///
    /// # Errors
    /// [`CheckpointError::NoHead`].
    pub fn expect_head(&self) -> Result<()> {
        match self.layout.linears.contains_key(HEAD) {
            true => Ok(()),
            false => Err(CheckpointError::NoHead { path: self.reader.path().to_owned() }.into()),
        }
    }

    /// Reads and packs the weights for inference on the CPU. Weights that are compressed, and dense ones that are 2:4, go to the 2:4 kernels.
    ///
    /// # Errors
    /// Those of [`Checkpoint::expect_head`]; [`CheckpointError::DType`]; those of reading and packing.
    pub fn inference<T: KernelElement + StoredElement>(&self) -> Result<Inference<T>> {
        self.expect_head()?;
        Inference::build(self.config.clone(), &self.parts())
    }

    /// [`Checkpoint::inference`] for the hidden states: in a model without a head the embedding is in its place.
    pub(crate) fn body<T: KernelElement + StoredElement>(&self) -> Result<Inference<T>> {
        let Some(table) = self.layout.tensors.get(EMBEDDING).filter(|_| !self.layout.linears.contains_key(HEAD)) else {
            return self.inference();
        };
        let (mut layout, mut config) = (self.layout.clone(), self.config.clone());
        let name = table.name.strip_suffix(".weight").unwrap_or(&table.name).to_owned();
        let (parts, inputs) = (vec![(name, config.vocabulary())], config.width);
        layout.linear(HEAD, StoredLinear { parts, inputs, has_bias: false, is_transposed: false });
        if let ModelOutput::Vocabulary { tied, .. } = &mut config.output {
            *tied = true;
        }
        Inference::build(config, &StoredParts::new(&self.reader, &layout, true))
    }

    /// The directory of tokenizer and configuration.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Reads the weights into a model that trains, on any engine; compressed ones are decompressed.
    ///
    /// # Errors
    /// Those of [`Checkpoint::expect_head`]. What engines do not support: learned positions, sliding windows below the context, norms of queries and keys. Those of reading, and of the engine's memory.
    pub fn model<E: Engine>(&self, engine: &E) -> Result<Gpt<E>> {
        self.expect_head()?;
        let parts = self.parts();
        Gpt::build(engine, &self.config, |name, _| parts.values(name))
    }

    pub(crate) fn parts(&self) -> StoredParts<'_> {
        StoredParts::new(&self.reader, &self.layout, self.config.is_tied())
    }

    /// The names of the weights that make up a linear layer of the model, and whether they are stored as `[in_features, out_features]`.
    pub(crate) fn stored(&self, linear: &str) -> Option<(Vec<String>, bool)> {
        let is_transposed = self.layout.linears.get(linear)?.is_transposed;
        Some((self.parts().weights_of(linear), is_transposed))
    }
}
