//! The index of a sharded model: `model.safetensors.index.json`.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Map, Value};

use super::{
    unique::{Unique, quoted},
    what_else,
};
use crate::{Error, Result};

/// Which file of a sharded model holds which tensor.
///
/// ```json
/// {"metadata": {"total_size": 123}, "weight_map": {"a.weight": "model-00001-of-00002.safetensors"}}
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Index {
    /// The metadata, of whatever kind; `total_size` is the data bytes of all shards.
    pub metadata: Map<String, Value>,
    /// The shard's file name of each tensor.
    pub weight_map: BTreeMap<String, String>,
}

#[derive(serde::Deserialize)]
struct RawIndex {
    #[serde(default)]
    metadata: Option<Map<String, Value>>,
    weight_map: Unique<String>,
}

impl Index {
    /// Reads an index; `path` is only named in errors.
    ///
    /// # Errors
    /// [`Error::Format`] where it is no such JSON, names a tensor twice, or names a shard by anything but a plain file
    /// name: an index from a stranger must not lead out of its directory.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let fault = |reason: String| Error::Format { path: path.to_owned(), reason };
        let raw: RawIndex = serde_json::from_slice(bytes).map_err(|e| match what_else(bytes) {
            Some(what) => fault(format!("is {what}")),
            None => fault(format!("the index: {e}")),
        })?;
        for (tensor, shard) in &raw.weight_map.0 {
            if !is_plain_file_name(shard) {
                return Err(fault(format!(
                    "tensor {}: shard {} is not a plain file name in the index's own directory",
                    quoted(tensor),
                    quoted(shard)
                )));
            }
        }
        Ok(Index { metadata: raw.metadata.unwrap_or_default(), weight_map: raw.weight_map.0.into_iter().collect() })
    }

    /// The shards' file names, sorted, each once.
    pub fn shards(&self) -> Vec<&str> {
        let mut shards: Vec<&str> = self.weight_map.values().map(String::as_str).collect();
        shards.sort_unstable();
        shards.dedup();
        shards
    }

    /// The index's text.
    pub fn to_json(&self) -> String {
        let weight_map: Map<String, Value> =
            self.weight_map.iter().map(|(name, shard)| (name.clone(), shard.as_str().into())).collect();
        let index = serde_json::json!({ "metadata": self.metadata, "weight_map": weight_map });
        // A Value with string keys always serialises; `{:#}` is its indented form.
        format!("{index:#}\n")
    }
}

/// Whether the text names a file in the same directory on every system, and nothing else.
fn is_plain_file_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', ':', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_round_trips() {
        let text = r#"{"metadata":{"total_size":7,"who":"me"},"weight_map":{"b":"2.safetensors","a":"1.safetensors","c":"2.safetensors"}}"#;
        let index = Index::parse(Path::new("i"), text.as_bytes()).unwrap();
        assert_eq!(index.shards(), ["1.safetensors", "2.safetensors"]);
        assert_eq!(Index::parse(Path::new("i"), index.to_json().as_bytes()).unwrap(), index);
        assert!(Index::parse(Path::new("i"), br#"{"weight_map":{}}"#).unwrap().shards().is_empty());
    }

    #[test]
    fn hostile_indices_are_refused() {
        for shard in ["../x", "/etc/passwd", "..", ".", "", "a/b", r"..\\x", "C:x", "x\\u0000y"] {
            let text = format!(r#"{{"weight_map":{{"a":"{shard}"}}}}"#);
            let message = Index::parse(Path::new("i"), text.as_bytes()).unwrap_err().to_string();
            assert!(message.contains("tensor `a`: shard"), "{message}");
        }
        for (text, expected) in [
            (r#"{"weight_map":{"a":"x","a":"y"}}"#, "`a` is named twice"),
            (r#"{"weight_map":{"a":1}}"#, "`a`: invalid type"),
            (r#"{"metadata":{}}"#, "missing field `weight_map`"),
            ("", "is empty"),
            ("{", "EOF"),
            ("\u{feff}{}", "the index"),
        ] {
            let message = Index::parse(Path::new("i"), text.as_bytes()).unwrap_err().to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }
}
