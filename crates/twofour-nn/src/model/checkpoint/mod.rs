//! Checkpoints as Hugging Face's transformers has them: a directory with `config.json`, safetensors (one file, or
//! shards with an index) and `tokenizer.json`; or a GGUF file of llama.cpp, whose metadata tell the same.
//!
//! Weights may be f32, f16 or bf16, dense or [compressed](twofour::file), or dense 8-bit integers beside their scales.
//! Every tensor that the configuration requires must be there in its shape, and every other tensor is an error, but for
//! these, which are ignored: `rotary_emb.inv_freq` and GPT-2's `attn.bias` and `attn.masked_bias`, which older versions
//! stored and which follow from the configuration, `lm_head.weight` where `tie_word_embeddings` says that the head is
//! the embedding, unless it has the embedding's shape and other values, and heads for other tasks, whose names begin
//! with `score.`, `classifier.`, `qa_outputs.` or `v_head.`. A decoder may be stored without a head that scores tokens,
//! as embedding and reward models are: its layers can be run one by one ([`Calibration`](super::Calibration)), but text
//! cannot be scored or generated.
//!
//! | `model_type` | beside the sizes |
//! |---|---|
//! | `llama` | rotary positions with linear, dynamic, YaRN's or llama3's scaling, biases, tied embeddings |
//! | `mistral` | sliding windows |
//! | `qwen2` | biases of queries, keys and values |
//! | `qwen3` | norms of queries and keys |
//! | `mixtral`, `qwen2_moe`, `qwen3_moe` | experts |
//! | `gpt_oss` | experts with biases and a bounded gate, sinks of attention |
//! | `deepseek_v2`, `deepseek_v3` | keys and values of latents, experts in groups beside a shared one |
//! | `phi3` | queries, keys and values in one tensor, gate and up in another, LongRoPE |
//! | `phi` | blocks side by side behind one norm, a part of each head rotated |
//! | `gpt2` | learned positions, transposed weights, GELU by tanh |
//! | `opt` | learned positions behind two that no token has, a narrower table of tokens |
//! | `bloom`, `mpt` | positions by distance (ALiBi), as `falcon` may have them |
//! | `stablelm`, `starcoder2` | layer norms |
//! | `smollm3` | layers in which nothing is rotated |
//! | `granite` | factors of embeddings, scores and outputs of blocks |
//! | `gpt_neox`, `falcon` | blocks side by side, a part of each head rotated |
//! | `gemma` | scaled embeddings, gains less one |
//! | `gemma2` | norms around blocks, scaled embeddings, bounded scores, windows in every other layer |
//! | `gemma3_text` | as `gemma2`, norms of queries and keys, another rotation in windows |
//! | `llava`, `llava_next`, `qwen2_vl`, `qwen2_5_vl` | the language part alone |
//!
//! [`EncoderCheckpoint`] reads `bert`, and [`ImageCheckpoint`] `vit`, `dinov2`, `sam` and `sam_vision_model`.

mod bert;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(test)]
mod gguf_tests;
mod image;
#[cfg(test)]
mod integer_tests;
mod new;
mod opened;
mod place;
mod save;
mod tensors;
#[cfg(test)]
mod tests;

use std::path::Path;

use twofour::{
    DataType,
    file::{Reader, StoredElement},
    kernel::KernelElement,
};

pub(crate) use self::tensors::StoredParts;
pub use self::{
    bert::EncoderCheckpoint,
    image::ImageCheckpoint,
    new::{is_llama, save_llama},
    tensors::Replace,
};
pub(super) use self::{opened::Opened, place::locate};
use super::{
    CheckpointError, Gpt, Inference, Tokenizer,
    config::{ModelOutput, TransformerConfig},
    families::{Family, Kind, fields::Fields, layout::StoredLinear},
};
use crate::{Result, engine::Engine};

pub(super) const CONFIG_FILE: &str = "config.json";
/// The model's name for the linear layer that scores tokens.
const HEAD: &str = "head";

/// The table of tokens of a decoder whose head is not the same.
const EMBEDDING: &str = "embedding.weight";
const GENERATION_FILE: &str = "generation_config.json";
const TOKENIZER_FILE: &str = "tokenizer.json";

/// A part of a linear layer, as a model on disk has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredRows {
    /// The name of its weight, without `.weight`.
    pub module: String,
    /// For each of its output features, which one of the layer it is.
    pub rows: Vec<usize>,
    /// Whether its weight is stored as `[in_features, out_features]`.
    pub is_transposed: bool,
}

/// A checkpoint directory whose configuration and headers were read and checked. Weights are read when a model is made
/// of it.
#[derive(Debug)]
pub struct Checkpoint {
    opened: Opened,
    begin: Option<u32>,
    end: Vec<u32>,
}

/// The kind of the model that a directory's configuration describes; none for an unsupported family.
pub(crate) fn kind(directory: &Path) -> Result<Option<Kind>> {
    let fields = place::fields_of(directory)?;
    Ok(fields.text_if("model_type")?.and_then(Family::named).map(|family| family.kind))
}

impl Checkpoint {
    /// Returns true for a directory with config.json, for a weight file that contains its configuration (GGUF), and for
    /// a weight file or an index beside a config.json, unless it describes itself, as [`Gpt::save`] writes.
    pub fn is_at(path: impl AsRef<Path>) -> bool {
        place::is_checkpoint(path.as_ref())
    }

    /// Opens a directory, or one file of weights or index in it.
    ///
    /// # Errors
    /// [`CheckpointError`] for a configuration that is damaged, of another family, or has a field that is not
    /// supported, for sizes that [`TransformerConfig::validate`] refuses, and for tensors that do not fit it; those of
    /// [`Reader::open`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (opened, fields) = Opened::new(path, Kind::Decoder)?;
        // What ends a text is first of all what generation was set up for.
        let generation = match opened.reader.beside(GENERATION_FILE)? {
            Some(text) => Some(Fields::parse(&opened.reader.path_beside(GENERATION_FILE), &text)?),
            None => None,
        };
        let tokens = |field: &str| -> Result<Vec<u32>> {
            let own = generation.as_ref().map(|fields| fields.tokens(field)).transpose()?.unwrap_or_default();
            Ok(if own.is_empty() { fields.tokens(field)? } else { own })
        };
        let (begin, end) = (tokens("bos_token_id")?.first().copied(), tokens("eos_token_id")?);
        Ok(Checkpoint { opened, begin, end })
    }

    /// The model's description.
    pub fn config(&self) -> &TransformerConfig {
        &self.opened.config
    }

    /// The files of weights.
    pub fn reader(&self) -> &Reader {
        &self.opened.reader
    }

    /// The token that texts begin with, if the model has one.
    pub fn begin(&self) -> Option<u32> {
        self.begin
    }

    /// The tokens that end a text.
    pub fn end(&self) -> &[u32] {
        &self.end
    }

    /// The type of the weights: that of the largest tensor that is stored dense as f32, f16 or bf16; f32 where there is
    /// none.
    pub fn dtype(&self) -> DataType {
        self.opened.dtype()
    }

    /// Reads the tokenizer.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`](crate::text::TextError::Tokenizer) where there is none, or a damaged one.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        self.opened.tokenizer()
    }

    /// Checks that the model has a head that scores tokens.
    ///
    /// # Errors
    /// [`CheckpointError::NoHead`].
    pub fn expect_head(&self) -> Result<()> {
        match self.opened.layout.linears.contains_key(HEAD) {
            true => Ok(()),
            false => Err(CheckpointError::NoHead { path: self.opened.reader.path().to_owned() }.into()),
        }
    }

    /// Reads and packs the weights for inference on the CPU. Weights that are compressed, and dense ones that are 2:4,
    /// go to the 2:4 kernels.
    ///
    /// # Errors
    /// Those of [`Checkpoint::expect_head`]; [`CheckpointError::DType`]; those of reading and packing.
    pub fn inference<T: KernelElement + StoredElement>(&self) -> Result<Inference<T>> {
        self.expect_head()?;
        Inference::build(self.opened.config.clone(), &self.parts())
    }

    /// [`Checkpoint::inference`] with other weights in place of those that `replace` returns.
    ///
    /// # Errors
    /// Those of [`Checkpoint::inference`]; a replaced weight of another length.
    pub fn inference_with<T: KernelElement + StoredElement>(&self, replace: Replace<'_>) -> Result<Inference<T>> {
        self.expect_head()?;
        Inference::build(self.opened.config.clone(), &self.parts().replacing(Some(replace)))
    }

    /// [`Checkpoint::inference`] for the hidden states: in a model without a head the embedding is in its place.
    pub(crate) fn body<T: KernelElement + StoredElement>(&self) -> Result<Inference<T>> {
        self.with_body(|config, parts| Inference::build(config.clone(), parts))
    }

    fn with_body<M>(&self, read: impl FnOnce(&TransformerConfig, &StoredParts<'_>) -> Result<M>) -> Result<M> {
        let Some(table) =
            self.opened.layout.tensors.get(EMBEDDING).filter(|_| !self.opened.layout.linears.contains_key(HEAD))
        else {
            self.expect_head()?;
            return read(&self.opened.config, &self.parts());
        };
        let (mut layout, mut config) = (self.opened.layout.clone(), self.opened.config.clone());
        let name = table.name.strip_suffix(".weight").unwrap_or(&table.name).to_owned();
        let (parts, inputs) = (vec![(name, config.vocabulary())], config.table_width());
        layout.linear(HEAD, StoredLinear { parts, inputs, has_bias: false, is_transposed: false });
        if let ModelOutput::Vocabulary { tied, .. } = &mut config.output {
            *tied = true;
        }
        read(&config, &StoredParts::new(&self.opened.reader, &layout, true))
    }

    /// The directory of tokenizer and configuration.
    pub(crate) fn directory(&self) -> &Path {
        &self.opened.directory
    }

    /// Reads the weights into a model that trains, on any engine; compressed ones are decompressed.
    ///
    /// # Errors
    /// Those of [`Checkpoint::expect_head`]. Those of reading, and of the engine's memory.
    pub fn model<E: Engine>(&self, engine: &E) -> Result<Gpt<E>> {
        self.expect_head()?;
        let parts = self.parts();
        Gpt::build(engine, &self.opened.config, |name, _| parts.values(name))
    }

    pub(crate) fn parts(&self) -> StoredParts<'_> {
        self.opened.parts()
    }

    /// The weights that make up a linear layer of the model.
    pub(crate) fn stored_rows(&self, linear: &str) -> Option<Vec<StoredRows>> {
        let layout = &self.opened.layout;
        let stored = layout.linears.get(linear)?;
        let mut first = 0;
        let of = |(name, outputs): &(String, usize)| {
            let ours: Vec<usize> = (first..first + outputs).collect();
            first += outputs;
            let rows = layout.as_stored(name, &ours, 1);
            StoredRows { module: name.clone(), rows, is_transposed: stored.is_transposed }
        };
        Some(stored.parts.iter().map(of).collect())
    }

    /// The names of the weights that make up a linear layer of the model, and whether they are stored as `[in_features,
    /// out_features]`.
    pub(crate) fn stored(&self, linear: &str) -> Option<(Vec<String>, bool)> {
        let is_transposed = self.opened.layout.linears.get(linear)?.is_transposed;
        Some((self.parts().weights_of(linear), is_transposed))
    }
}
