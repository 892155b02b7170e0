//! Adapters as peft has them: files, and the names of modules.

use anyhow::Result;
use serde_json::Value;
use twofour::file::Reader;

/// The file of an adapter's tensors.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";

/// The file that describes an adapter.
pub(super) const CONFIG: &str = "adapter_config.json";

/// The model's `config.json`; null where there is none.
pub(super) fn configuration_of(reader: &Reader) -> Result<Value> {
    Ok(serde_json::from_slice(&reader.beside("config.json")?.unwrap_or_default()).unwrap_or_default())
}

/// The module of a weight in the model that transformers makes of the directory.
pub(super) fn module(reader: &Reader, weight: &str) -> Result<String> {
    let module = weight.strip_suffix(".weight").unwrap_or(weight);
    // A model with a head has the layers inside a module of this name, also where they are stored without it.
    let config = configuration_of(reader)?;
    let architecture = config["architectures"][0].as_str().unwrap_or_default();
    let is_bare = architecture.is_empty() || architecture.ends_with("Model") && !architecture.contains("LMHead");
    let inside = match module.split('.').next() {
        _ if is_bare => None,
        Some("h") => Some("transformer"),
        Some("layers") => Some("model"),
        Some("encoder") => Some("bert"),
        _ => None,
    };
    Ok(inside.map_or(module.to_owned(), |inside| format!("{inside}.{module}")))
}
