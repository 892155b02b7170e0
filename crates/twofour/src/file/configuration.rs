//! What a model's `config.json` says of how its weights are stored.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::{Error, Result};

/// The file of a model's directory that other libraries read first.
pub(super) const CONFIG_FILE: &str = "config.json";

/// The field that describes weights which are no plain tensors.
pub(super) const FIELD: &str = "quantization_config";

/// The `quant_method` of packed weights.
pub(super) const METHOD: &str = "twofour";

/// What the `quantization_config` of a model's `config.json` says of its weights.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConfiguredWeights {
    /// They are plain tensors: there is no such field, or it describes nothing. llm-compressor leaves one in models
    /// that it pruned, with a `sparsity_config` of format `dense`.
    Plain,
    /// They are packed in this library's format.
    Packed,
    /// Another tool quantized or compressed them.
    Foreign {
        /// Which tool, and to what, as far as the field tells.
        by: String,
    },
}

impl ConfiguredWeights {
    /// What a configuration says.
    pub fn of(config: &Map<String, Value>) -> Self {
        let field = match config.get(FIELD) {
            None | Some(Value::Null) => return ConfiguredWeights::Plain,
            Some(field) => field,
        };
        let text = |value: &Value, name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
        let is_absent = |value: &Value, name: &str| match value.get(name) {
            None | Some(Value::Null) => true,
            Some(Value::Object(fields)) => fields.is_empty(),
            Some(Value::Array(values)) => values.is_empty(),
            Some(_) => false,
        };
        let method = text(field, "quant_method").unwrap_or_else(|| "an unnamed method".to_owned());
        if method == METHOD {
            return ConfiguredWeights::Packed;
        }
        let sparsity = field.get("sparsity_config").and_then(|sparsity| text(sparsity, "format"));
        let is_dense = |format: Option<&str>| format.is_none_or(|format| format == "dense");
        let describes_nothing =
            ["config_groups", "kv_cache_scheme", "transform_config"].iter().all(|f| is_absent(field, f));
        let is_vestige = method == "compressed-tensors"
            && describes_nothing
            && is_dense(text(field, "format").as_deref())
            && is_dense(sparsity.as_deref());
        if is_vestige {
            return ConfiguredWeights::Plain;
        }
        let format = match sparsity.filter(|format| format != "dense") {
            Some(sparse) => Some(sparse),
            None => text(field, "format").or_else(|| text(field, "quant_algo")),
        };
        let bits = ["bits", "w_bit", "nbits"].iter().find_map(|name| field.get(name).and_then(Value::as_u64));
        let details = format.or_else(|| bits.map(|bits| format!("{bits} bits")));
        ConfiguredWeights::Foreign { by: details.map_or(method.clone(), |details| format!("{method}, {details}")) }
    }
}

/// Reads a `config.json`; `path` is only named in errors.
pub(super) fn parse(path: &Path, bytes: &[u8]) -> Result<Map<String, Value>> {
    let fault = |reason: String| Error::Format { path: path.to_owned(), reason };
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err(fault("is not a JSON object".to_owned())),
        Err(error) => Err(fault(match super::what_else(bytes) {
            Some(what) => format!("is {what}"),
            None => format!("is no JSON: {error}"),
        })),
    }
}

/// The field for packed weights of which these modules stay dense.
pub(super) fn packed(dense: Vec<String>) -> Value {
    json!({ "quant_method": METHOD, "modules_to_not_convert": dense })
}

/// The text of a configuration whose field is another one, or absent; unchanged where it was absent before.
pub(super) fn rewritten(bytes: Vec<u8>, mut fields: Map<String, Value>, field: Option<Value>) -> Vec<u8> {
    match field {
        None if !fields.contains_key(FIELD) => return bytes,
        None => _ = fields.shift_remove(FIELD),
        Some(field) => _ = fields.insert(FIELD.to_owned(), field),
    }
    // A Value with string keys always serialises; `{:#}` is its indented form.
    format!("{:#}\n", Value::Object(fields)).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(field: Value) -> ConfiguredWeights {
        let config = json!({ "model_type": "llama", "quantization_config": field });
        ConfiguredWeights::of(config.as_object().unwrap())
    }

    #[test]
    fn a_vestige_describes_plain_weights_and_the_rest_is_named() {
        let dense = json!({"format": "dense", "sparsity_structure": "2:4", "targets": ["Linear"]});
        let tensors = |rest: Value| {
            let mut field = json!({"quant_method": "compressed-tensors"});
            field.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
            of(field)
        };
        assert_eq!(of(Value::Null), ConfiguredWeights::Plain);
        assert_eq!(tensors(json!({"sparsity_config": dense})), ConfiguredWeights::Plain);
        assert_eq!(
            tensors(json!({"sparsity_config": dense, "config_groups": {}, "format": "dense", "ignore": ["lm_head"]})),
            ConfiguredWeights::Plain
        );
        assert_eq!(of(json!({"quant_method": "twofour"})), ConfiguredWeights::Packed);
        let foreign = |by: &str| ConfiguredWeights::Foreign { by: by.to_owned() };
        let groups = json!({"group_0": {"weights": {"num_bits": 4}}});
        assert_eq!(
            tensors(json!({"sparsity_config": {"format": "sparse-24-bitmask"}})),
            foreign("compressed-tensors, sparse-24-bitmask")
        );
        assert_eq!(
            tensors(json!({"sparsity_config": dense, "config_groups": groups, "format": "pack-quantized"})),
            foreign("compressed-tensors, pack-quantized")
        );
        assert_eq!(of(json!({"quant_method": "gptq", "bits": 4})), foreign("gptq, 4 bits"));
        assert_eq!(of(json!({"load_in_8bit": true})), foreign("an unnamed method"));
    }

    #[test]
    fn the_other_fields_keep_their_values_and_their_order() {
        let text = "{\n  \"z\": 1e-05,\n  \"a\": [1, 2.50],\n  \"quantization_config\": {\"quant_method\": \"x\"},\n  \
                    \"name\": \"\u{e9}\"\n}";
        let fields = || parse(Path::new("c"), text.as_bytes()).unwrap();
        let removed: Value = serde_json::from_slice(&rewritten(text.into(), fields(), None)).unwrap();
        assert_eq!(removed.as_object().unwrap().keys().collect::<Vec<_>>(), ["z", "a", "name"]);
        assert_eq!((&removed["z"], &removed["name"]), (&json!(1e-5), &json!("\u{e9}")));
        let field = packed(vec!["lm_head".to_owned()]);
        let packed: Value = serde_json::from_slice(&rewritten(text.into(), fields(), Some(field))).unwrap();
        assert_eq!(packed.as_object().unwrap().keys().collect::<Vec<_>>(), ["z", "a", "quantization_config", "name"]);
        assert_eq!(
            packed["quantization_config"],
            json!({"quant_method": "twofour", "modules_to_not_convert": ["lm_head"]})
        );
        let plain = "{ \"a\" : 1 }";
        let fields = parse(Path::new("c"), plain.as_bytes()).unwrap();
        assert_eq!(rewritten(plain.into(), fields, None), plain.as_bytes());
        assert!(parse(Path::new("c"), b"[]").unwrap_err().to_string().contains("c: is not a JSON object"));
    }
}
