//! Writing a LLaMA that began with random weights as a checkpoint of transformers.

use std::{fs, path::Path};

use serde_json::{Value, json};
use twofour::{
    DataType,
    file::{Overwrite, write_whole},
};

use super::{CONFIG_FILE, CheckpointError, save::write_weights};
use crate::{
    Error, Result,
    engine::{Engine, Nonlinearity},
    model::{Gpt, NormKind, Positions, Tokenizer, TransformerConfig, families::llama},
};

/// The token that texts of bytes begin with: a line's end is before most texts.
const LINE_END: u32 = b'\n' as u32;

/// Writes a LLaMA-style decoder to a directory that transformers loads: `config.json`, `model.safetensors` in `dtype`
/// (f32, bf16 or f16) with the pruned elements of 2:4 layers as zeros, and `tokenizer.json`, whose tokens are the 256
/// bytes for [`Tokenizer::Bytes`], and otherwise a copy of the tokenizer's file.
///
/// # Errors
/// [`Error::Unsupported`] for a decoder that [`is_llama`] refuses; those of [`super::Checkpoint::save`].
pub fn save_llama<E: Engine>(
    (engine, model): (&E, &Gpt<E>),
    tokenizer: &Tokenizer,
    directory: impl AsRef<Path>,
    overwrite: Overwrite,
    dtype: DataType,
) -> Result<()> {
    let (directory, config) = (directory.as_ref(), model.config());
    if !is_llama(config) {
        return Err(Error::Unsupported {
            engine: "transformers' LLaMA",
            what: "layer norms, another activation than SiLU, or windows".to_owned(),
            remedy: "use `Gpt::save`",
        });
    }
    write_weights((&llama::layout(config, "model."), None), (engine, model), directory, overwrite, dtype)?;
    let write = |name: &str, text: &[u8]| write_whole(directory.join(name), Overwrite::Yes, text);
    match tokenizer {
        Tokenizer::Bytes => write("tokenizer.json", &pretty(&byte_tokenizer())?)?,
        Tokenizer::File(file) => {
            let from = file.path();
            let bytes = fs::read(from).map_err(|source| CheckpointError::Io { path: from.to_owned(), source })?;
            write("tokenizer.json", &bytes)?;
        }
    }
    let class = json!({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.context()});
    write("tokenizer_config.json", &pretty(&class)?)?;
    // Last: a directory without it is no checkpoint.
    let begin = matches!(tokenizer, Tokenizer::Bytes).then_some(LINE_END);
    Ok(write(CONFIG_FILE, &pretty(&llama_config(config, begin, dtype))?)?)
}

/// Whether transformers' `LlamaForCausalLM` computes a decoder.
pub fn is_llama(config: &TransformerConfig) -> bool {
    let is_rotary = matches!(&config.positions, Positions::Rotary(rope) if rope.scaling.is_none());
    config.norm.kind == NormKind::RootMeanSquare
        && config.feed_forward.activation == Nonlinearity::Silu
        && config.feed_forward.gated
        && !config.attention.head_norms
        && config.attention.windows.is_empty()
        && config.beyond_llama().is_none()
        && config.attention.qkv_bias == config.attention.out_bias
        && is_rotary
}

fn llama_config(config: &TransformerConfig, begin: Option<u32>, dtype: DataType) -> Value {
    let Positions::Rotary(rope) = &config.positions else { return Value::Null };
    let dtype = match dtype {
        DataType::F32 => "float32",
        DataType::F16 => "float16",
        _ => "bfloat16",
    };
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocabulary(),
        "max_position_embeddings": config.context(),
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.attention.heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": config.attention.head_dim,
        "intermediate_size": config.feed_forward.hidden,
        "hidden_act": "silu",
        "rms_norm_eps": f64::from(config.norm.epsilon),
        "rope_theta": rope.base,
        "attention_bias": config.attention.qkv_bias,
        "mlp_bias": config.feed_forward.bias,
        "tie_word_embeddings": config.is_tied(),
        "bos_token_id": begin,
        "eos_token_id": null,
        "torch_dtype": dtype,
    })
}

fn pretty(value: &Value) -> Result<Vec<u8>> {
    serde_json::to_vec_pretty(value)
        .map_err(|error| Error::State { path: CONFIG_FILE.into(), reason: error.to_string() })
}

/// A `tokenizer.json` in which every byte is a token with its own value as its number: byte pairs without merges, over
/// the 256 characters that byte-level tokenizers stand bytes for (GPT-2's table: printable characters for themselves,
/// the others from U+0100 on).
fn byte_tokenizer() -> Value {
    let is_printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100u32;
    let character = |byte: u8| {
        let code = if is_printable(byte) {
            u32::from(byte)
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER).to_string()
    };
    let characters: Vec<String> = (0..=u8::MAX).map(character).collect();
    let vocabulary: serde_json::Map<String, Value> =
        characters.into_iter().enumerate().map(|(byte, character)| (character, byte.into())).collect();
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocabulary,
            "merges": [],
        },
    })
}
