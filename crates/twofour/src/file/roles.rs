//! The roles of a model's tensors: their names and shapes, and what `config.json` says about the layout of weights.

use serde_json::Value;

use super::{Reader, what_else};
use crate::{Error, Result, role::Roles};

impl Roles {
    /// Looks at the names and shapes of a model's tensors and at the `config.json` beside them.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Format`] for a configuration that cannot be
    /// read.
    pub fn of_model(reader: &Reader) -> Result<Self> {
        let names_conv1d = names_conv1d(reader)?;
        let plain = reader.plain_tensors().map(|tensor| (tensor.name.as_str(), tensor.shape.clone()));
        let compressed = reader.compressed_weights().map(|w| (w.name.as_str(), vec![w.rows, w.cols]));
        let tensors: Vec<(&str, Vec<usize>)> = plain.chain(compressed).collect();
        Ok(Self::new(tensors.iter().map(|(name, shape)| (*name, shape.as_slice())), names_conv1d))
    }
}

/// Model types whose blocks are made of transformers' `Conv1D`.
const CONV1D: [&str; 6] = ["gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder"];

/// Whether the configuration of a model names a model type of `Conv1D` layers, at any depth: a model of text and
/// images has a configuration of each inside.
fn names_conv1d(reader: &Reader) -> Result<bool> {
    let Some(bytes) = reader.beside("config.json")? else { return Ok(false) };
    let path = reader.path_beside("config.json");
    let config = serde_json::from_slice(&bytes)
        .map_err(|e| {
            what_else(&bytes)
                .map_or_else(|| format!("the model's configuration is no JSON: {e}"), |what| format!("is {what}"))
        })
        .map_err(|reason| Error::Format { path, reason })?;
    Ok(has_conv1d(&config))
}

fn has_conv1d(config: &Value) -> bool {
    match config {
        Value::Object(fields) => fields.iter().any(|(key, value)| match value {
            Value::String(text) => key == "model_type" && CONV1D.contains(&text.as_str()),
            value => has_conv1d(value),
        }),
        Value::Array(values) => values.iter().any(has_conv1d),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_types_count_at_any_depth() {
        for (text, expected) in [
            (r#"{"model_type": "gpt2"}"#, true),
            (r#"{"model_type": "vision-encoder-decoder", "decoder": {"model_type": "gpt2"}}"#, true),
            (r#"{"model_type": "gpt_neo", "note": "gpt2"}"#, false),
            ("[]", false),
        ] {
            assert_eq!(has_conv1d(&serde_json::from_str(text).unwrap()), expected, "{text}");
        }
    }

    #[test]
    fn a_model_without_a_configuration_names_none_and_a_damaged_one_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("model.safetensors");
        let mut file = 2u64.to_le_bytes().to_vec();
        file.extend(b"{}");
        std::fs::write(&path, file).unwrap();
        let reader = Reader::open(path).unwrap();
        assert!(!names_conv1d(&reader).unwrap());
        std::fs::write(directory.path().join("config.json"), "{").unwrap();
        let message = names_conv1d(&reader).unwrap_err().to_string();
        assert!(message.contains("config.json: the model's configuration is no JSON"), "{message}");
    }
}
