//! The fields of `config.json`.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::model::{CheckpointError, config::GptConfig};

/// An object of a configuration, with the place that errors name.
#[derive(Debug, Clone)]
pub(in crate::model) struct Fields {
    path: PathBuf,
    /// What stands before a field's name, as in `rope_scaling.`.
    prefix: String,
    values: Map<String, Value>,
}

type Result<T> = std::result::Result<T, CheckpointError>;

impl Fields {
    /// A `config.json` is not larger.
    const LARGEST: u64 = 1 << 24;

    const MAX_LAYERS: usize = 1 << 16;

    /// Reads a file.
    pub(in crate::model) fn read(path: &Path) -> Result<Self> {
        let io = |source| CheckpointError::Io { path: path.to_owned(), source };
        let not = |reason: String| CheckpointError::NotAConfig { path: path.to_owned(), reason };
        if std::fs::metadata(path).map_err(io)?.len() > Self::LARGEST {
            return Err(not("too large for a configuration".to_owned()));
        }
        Self::parse(path, &std::fs::read(path).map_err(io)?)
    }

    /// Reads the text of a configuration; `path` is only named in errors.
    pub(in crate::model) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        let not = |reason: String| CheckpointError::NotAConfig { path: path.to_owned(), reason };
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(values)) => Ok(Fields { path: path.to_owned(), prefix: String::new(), values }),
            Ok(_) => Err(not("not a JSON object".to_owned())),
            Err(error) => Err(not(match twofour::file::what_else(bytes) {
                Some(what) => format!("it is {what}"),
                None => error.to_string(),
            })),
        }
    }

    /// The file.
    pub(in crate::model) fn path(&self) -> &Path {
        &self.path
    }

    /// All fields.
    pub(in crate::model) fn values(&self) -> &Map<String, Value> {
        &self.values
    }

    /// The value of a field that is there and not null.
    pub(in crate::model) fn get(&self, field: &str) -> Option<&Value> {
        self.values.get(field).filter(|value| !value.is_null())
    }

    fn wrong(&self, field: &str, expected: &'static str) -> CheckpointError {
        let found = self.get(field).map_or("absent".to_owned(), Value::to_string);
        CheckpointError::Field { path: self.path.clone(), field: format!("{}{field}", self.prefix), found, expected }
    }

    /// The error for a field's value that is valid and not supported.
    pub(in crate::model) fn unsupported(&self, field: &str, supported: &'static str) -> CheckpointError {
        let found = self.get(field).map_or("absent".to_owned(), Value::to_string);
        CheckpointError::UnsupportedField {
            path: self.path.clone(),
            field: format!("{}{field}", self.prefix),
            found,
            supported,
        }
    }

    /// The error for sizes of a configuration that make no model.
    pub(in crate::model) fn not_valid(&self, error: &crate::Error) -> CheckpointError {
        CheckpointError::NotAConfig { path: self.path.clone(), reason: error.to_string() }
    }

    fn of<T>(&self, field: &str, expected: &'static str, read: impl FnOnce(&Value) -> Option<T>) -> Result<Option<T>> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(field, expected)),
        }
    }

    /// A size, where the field is there.
    pub(in crate::model) fn size_if(&self, field: &str) -> Result<Option<usize>> {
        self.of(field, "a whole number from 0", |value| value.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// A size that must be there.
    pub(in crate::model) fn size(&self, field: &str) -> Result<usize> {
        self.size_if(field)?.ok_or_else(|| self.wrong(field, "a whole number from 0"))
    }

    /// A number of layers: more than any model has are refused before a list of them is made.
    pub(in crate::model) fn layers(&self, field: &str) -> Result<usize> {
        match self.size(field)? {
            layers if layers <= Self::MAX_LAYERS => Ok(layers),
            _ => Err(self.unsupported(field, "no model has as many layers")),
        }
    }

    /// The sizes of a model, by the names that most families have for them.
    pub(super) fn sizes(&self) -> Result<GptConfig> {
        Ok(GptConfig {
            layers: self.layers("num_hidden_layers")?,
            width: self.size("hidden_size")?,
            heads: self.size("num_attention_heads")?,
            context: self.size("max_position_embeddings")?,
            feed_forward: self.size("intermediate_size")?,
        })
    }

    /// Height and width: one number for both, or a list of two; `default` where the field is absent.
    pub(in crate::model) fn sides(&self, field: &str, default: usize) -> Result<[usize; 2]> {
        let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        let read = |value: &Value| match value.as_array().map(Vec::as_slice) {
            None => size(value).map(|side| [side; 2]),
            Some([height, width]) => Some([size(height)?, size(width)?]),
            Some(_) => None,
        };
        Ok(self.of(field, "a whole number from 0, or two of them", read)?.unwrap_or([default; 2]))
    }

    /// A list of sizes, where the field is there.
    pub(in crate::model) fn sizes_if(&self, field: &str) -> Result<Option<Vec<usize>>> {
        let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        self.of(field, "a list of whole numbers from 0", |value| value.as_array()?.iter().map(size).collect())
    }

    /// A list of numbers above 0 that must be there.
    pub(in crate::model) fn positive_numbers(&self, field: &str) -> Result<Vec<f64>> {
        const EXPECTED: &str = "a list of numbers above 0";
        let number = |value: &Value| value.as_f64().filter(|number| (*number as f32) > 0.0 && number.is_finite());
        let read = |value: &Value| value.as_array()?.iter().map(number).collect();
        self.of(field, EXPECTED, read)?.ok_or_else(|| self.wrong(field, EXPECTED))
    }

    /// A number, where the field is there.
    pub(in crate::model) fn number_if(&self, field: &str) -> Result<Option<f64>> {
        self.of(field, "a number", Value::as_f64)
    }

    /// A number above 0 that f32 holds, or `default` where the field is absent: an epsilon, or the base of rotary
    /// frequencies.
    pub(in crate::model) fn positive(&self, field: &str, default: f64) -> Result<f64> {
        let positive = |value: &Value| value.as_f64().filter(|v| (*v as f32) > 0.0 && (*v as f32).is_finite());
        Ok(self.of(field, "a number above 0", positive)?.unwrap_or(default))
    }

    /// A number above 0 that must be there.
    pub(in crate::model) fn positive_number(&self, field: &str) -> Result<f64> {
        match self.get(field) {
            Some(_) => self.positive(field, 1.0),
            None => Err(self.wrong(field, "a number above 0")),
        }
    }

    /// Whether there is no field.
    pub(in crate::model) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// A flag with its default.
    pub(in crate::model) fn flag(&self, field: &str, default: bool) -> Result<bool> {
        Ok(self.of(field, "true or false", Value::as_bool)?.unwrap_or(default))
    }

    /// A text, where the field is there.
    pub(in crate::model) fn text_if(&self, field: &str) -> Result<Option<&str>> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.wrong(field, "a text")),
        }
    }

    /// An object inside this one, where the field is there.
    pub(in crate::model) fn object_if(&self, field: &str) -> Result<Option<Fields>> {
        let values = self.of(field, "an object", |value| value.as_object().cloned())?;
        let prefix = format!("{}{field}.", self.prefix);
        Ok(values.map(|values| Fields { path: self.path.clone(), prefix, values }))
    }

    /// Returns these fields with numbers in place of absent ones.
    pub(in crate::model) fn with_defaults<N: Copy + Into<Value>>(mut self, defaults: &[(&str, N)]) -> Self {
        for (field, number) in defaults.iter().filter(|(field, _)| self.get(field).is_none()).collect::<Vec<_>>() {
            self.values.insert((*field).to_owned(), (*number).into());
        }
        self
    }

    /// Takes a field from the object around this one, where only that has it.
    pub(in crate::model) fn inherit(&mut self, around: &Fields, field: &str) {
        if let (None, Some(value)) = (self.get(field), around.get(field)) {
            self.values.insert(field.to_owned(), value.clone());
        }
    }

    /// Returns these fields with a rotation of one position for each token: in text, Qwen2-VL's positions of time, rows
    /// and columns (`mrope_section`) are equal.
    pub(in crate::model) fn with_rotation_of_text(mut self) -> Result<Self> {
        for holder in ["rope_scaling", "rope_parameters"] {
            let Some(Fields { mut values, .. }) = self.object_if(holder)? else { continue };
            for key in ["type", "rope_type"] {
                if values.get(key).and_then(Value::as_str) == Some("mrope") {
                    values.insert(key.to_owned(), Value::from("default"));
                }
            }
            self.values.insert(holder.to_owned(), Value::Object(values));
        }
        Ok(self)
    }

    /// A list of texts, where the field is there.
    pub(in crate::model) fn texts_if(&self, field: &str) -> Result<Option<Vec<&str>>> {
        match self.get(field) {
            None => Ok(None),
            Some(value) => {
                let texts = value.as_array().and_then(|all| all.iter().map(Value::as_str).collect());
                texts.map(Some).ok_or_else(|| self.wrong(field, "a list of texts"))
            }
        }
    }

    /// One token or a list of them; none where the field is absent.
    pub(in crate::model) fn tokens(&self, field: &str) -> Result<Vec<u32>> {
        let one = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
        let read = |value: &Value| match value {
            Value::Array(all) => all.iter().map(one).collect(),
            value => one(value).map(|token| vec![token]),
        };
        Ok(self.of(field, "a token or a list of tokens", read)?.unwrap_or_default())
    }

    /// An error unless the flag has the only value that is supported.
    pub(in crate::model) fn expect_flag(&self, field: &str, only: bool, supported: &'static str) -> Result<()> {
        if self.flag(field, only)? == only { Ok(()) } else { Err(self.unsupported(field, supported)) }
    }
}
