//! The families of models that are read: one file for each kind of layer, and its lines in [`FAMILIES`].

mod gemma;
mod gpt2;
mod llama;

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{
    super::StoredDType,
    metadata::{Metadata, Stored},
    tokenizer,
};

/// Every family.
static FAMILIES: [Family; 6] = [llama::LLAMA, llama::QWEN2, llama::QWEN3, gemma::GEMMA2, gemma::GEMMA3, gpt2::GPT2];

/// A family of models: what llama.cpp and transformers call its parts.
#[derive(Debug)]
pub(super) struct Family {
    /// What llama.cpp calls it.
    pub(super) architecture: &'static str,
    /// What transformers calls it.
    model_type: &'static str,
    class: &'static str,
    /// The type of weights that are stored quantized.
    quantized: StoredDType,
    /// Modules outside of the layers, here and there.
    outside: &'static [(&'static str, &'static str, Change)],
    /// What stands before the number of a layer in transformers.
    layers: &'static str,
    /// Modules of a layer, here and there.
    inside: &'static [(&'static str, &'static str, Change)],
    /// Fills in the fields of `config.json`.
    configure: fn(&Facts<'_>, &mut Map<String, Value>) -> Described<()>,
}

/// How a stored tensor differs from the one of transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// In nothing.
    None,
    /// The rows of each head have another order.
    Rotary {
        /// They are as many as keys have heads.
        of_keys: bool,
    },
    /// Rows and columns are exchanged; of a matrix alone.
    Transposed,
    /// It is greater by one.
    LessOne,
}

/// What follows from the metadata, or why nothing does.
pub(super) type Described<T> = Result<T, String>;

impl Family {
    /// The family that the metadata names.
    pub(super) fn of(metadata: &Metadata) -> Described<&'static Self> {
        let name = Metadata::required("general.architecture", metadata.text("general.architecture")?)?;
        if let Some(parts) = metadata.size("split.count")?.filter(|parts| *parts > 1) {
            return Err(format!("it is one of {parts} files of a model; join them with llama-gguf-split --merge"));
        }
        FAMILIES.iter().find(|family| family.architecture == name).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|family| family.architecture).collect();
            format!("a model of {name:?} is not supported; supported are {}", known.join(", "))
        })
    }

    /// The type in which a model of these tensors is read: its own, or where it is quantized that of the family.
    pub(super) fn dtype(&self, tensors: &[Stored]) -> StoredDType {
        let matrices = || tensors.iter().filter(|tensor| tensor.shape.len() > 1).map(|tensor| tensor.encoding.name);
        let has = |name: &str| matrices().any(|found| found == name);
        match () {
            () if matrices().any(|name| !["F32", "F16", "BF16"].contains(&name)) => self.quantized,
            () if has("BF16") => StoredDType::BF16,
            () if has("F16") => StoredDType::F16,
            () => StoredDType::F32,
        }
    }

    /// The name of a tensor in transformers.
    pub(super) fn named(&self, name: &str) -> Option<(String, Change)> {
        let (module, kind) = name.rsplit_once('.')?;
        let find = |modules: &[(&str, &'static str, Change)], module: &str| {
            let found = modules.iter().find(|(ours, ..)| *ours == module);
            found.map(|(_, theirs, change)| (*theirs, *change))
        };
        let (name, change) = match module.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, module)) => {
                let (theirs, change) = find(self.inside, module)?;
                // A number, and written as one.
                let layer = layer.parse::<usize>().ok().filter(|number| number.to_string() == layer)?;
                (format!("{}.{layer}.{theirs}.{kind}", self.layers), change)
            }
            None => {
                let (theirs, change) = find(self.outside, module)?;
                (format!("{theirs}.{kind}"), change)
            }
        };
        match (kind, change) {
            ("bias", Change::Transposed) => Some((name, Change::None)),
            ("weight" | "bias", change) => Some((name, change)),
            _ => None,
        }
    }

    /// The contents of `config.json`.
    pub(super) fn config(&self, facts: &Facts<'_>, dtype: StoredDType) -> Described<Value> {
        let mut fields = Map::new();
        fields.insert("architectures".to_owned(), json!([self.class]));
        fields.insert("model_type".to_owned(), self.model_type.into());
        let dtype = match dtype {
            StoredDType::F16 => "float16",
            StoredDType::BF16 => "bfloat16",
            _ => "float32",
        };
        fields.insert("torch_dtype".to_owned(), dtype.into());
        (self.configure)(facts, &mut fields)?;
        fields.insert("tie_word_embeddings".to_owned(), (!facts.has("output.weight")).into());
        tokenizer::special_tokens(facts.metadata, &mut fields)?;
        Ok(Value::Object(fields))
    }
}

/// What a file tells of a model.
#[derive(Debug)]
pub(super) struct Facts<'a> {
    pub(super) metadata: &'a Metadata,
    architecture: &'static str,
    tensors: HashMap<&'a str, &'a Stored>,
    wavelengths: &'a [f32],
}

impl<'a> Facts<'a> {
    pub(super) fn new(
        metadata: &'a Metadata,
        family: &Family,
        tensors: impl IntoIterator<Item = &'a Stored>,
        wavelengths: &'a [f32],
    ) -> Self {
        let tensors = tensors.into_iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        Facts { metadata, architecture: family.architecture, tensors, wavelengths }
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn size(&self, name: &str) -> Described<Option<usize>> {
        self.metadata.size(&self.key(name))
    }

    fn required_size(&self, name: &str) -> Described<usize> {
        let key = self.key(name);
        Metadata::required(&key, self.metadata.size(&key)?)
    }

    fn number(&self, name: &str) -> Described<Option<f64>> {
        // Stored as f32: 1e-6 is what was meant by 9.999999974752427e-07.
        let number = self.metadata.number(&self.key(name))?;
        Ok(number.map(|number| (number as f32).to_string().parse().unwrap_or(number)))
    }

    fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Whether any layer has that tensor.
    fn has_in_layers(&self, tensor: &str) -> bool {
        self.has(&format!("blk.0.{tensor}"))
    }

    /// The heads of queries and of keys.
    pub(super) fn heads(&self) -> Described<(usize, usize)> {
        let queries = self.required_size("attention.head_count")?;
        Ok((queries, self.size("attention.head_count_kv")?.unwrap_or(queries)))
    }

    /// The elements of a head.
    fn head_dim(&self) -> Described<usize> {
        match self.size("attention.key_length")? {
            Some(length) => Ok(length),
            None => Ok(self.required_size("embedding_length")? / self.heads()?.0.max(1)),
        }
    }

    /// Tokens of the table.
    fn vocabulary(&self) -> Described<usize> {
        let table = self.tensors.get("token_embd.weight").filter(|table| table.shape.len() == 2);
        table.map(|table| table.shape[0]).ok_or_else(|| "tensor `token_embd.weight` is missing".to_owned())
    }

    /// An error where the model has what a family of plain layers has not.
    fn expect_plain(&self) -> Described<()> {
        if self.size("expert_count")?.unwrap_or(0) > 0 {
            return Err("layers of experts are not supported".to_owned());
        }
        let (rotated, head) = (self.size("rope.dimension_count")?, self.head_dim()?);
        match rotated.filter(|rotated| *rotated != head) {
            Some(rotated) => {
                Err(format!("rotary positions of {rotated} of {head} elements of a head are not supported"))
            }
            None => Ok(()),
        }
    }

    /// What every family with rotary positions has.
    fn common(&self, fields: &mut Map<String, Value>) -> Described<()> {
        self.expect_plain()?;
        let (heads, kv_heads) = self.heads()?;
        let own = json!({
            "vocab_size": self.vocabulary()?,
            "hidden_size": self.required_size("embedding_length")?,
            "intermediate_size": self.required_size("feed_forward_length")?,
            "num_hidden_layers": self.required_size("block_count")?,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": self.head_dim()?,
            "max_position_embeddings": self.required_size("context_length")?,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon")?.unwrap_or(1e-6),
            "rope_theta": self.number("rope.freq_base")?.unwrap_or(10_000.0),
            "attention_dropout": 0.0,
        });
        extend(fields, own);
        if let Some(scaling) = self.rope_scaling()? {
            fields.insert("rope_scaling".to_owned(), scaling);
        }
        Ok(())
    }

    /// The field `rope_scaling`.
    fn rope_scaling(&self) -> Described<Option<Value>> {
        let factor = || {
            let key = self.key("rope.scaling.factor");
            Metadata::required(&key, self.number("rope.scaling.factor")?)
        };
        let kind_key = self.key("rope.scaling.type");
        match self.metadata.text(&kind_key)? {
            None | Some("none") => self.llama3_scaling(),
            Some("linear") => Ok(Some(json!({ "rope_type": "linear", "factor": factor()? }))),
            Some("yarn") => Ok(Some(json!({
                "rope_type": "yarn",
                "factor": factor()?,
                "original_max_position_embeddings": self.required_size("rope.scaling.original_context_length")?,
            }))),
            Some(other) => Err(format!("metadata `{kind_key}` is {other:?}; supported are linear and yarn")),
        }
    }

    /// The scaling of Llama 3 whose factors are stored: llama.cpp keeps what follows from its four numbers, of which
    /// three are the same in all these models.
    fn llama3_scaling(&self) -> Described<Option<Value>> {
        let Some(&factor) = self.wavelengths.last() else { return Ok(None) };
        let (factor, head) = (f64::from(factor), self.head_dim()?);
        let base = self.number("rope.freq_base")?.unwrap_or(10_000.0);
        let (low, high, original) = (1.0, 4.0, 8192.0);
        let expected = (0..head / 2).map(|i| {
            let wavelength = std::f64::consts::TAU * base.powf(2.0 * i as f64 / head as f64);
            let smooth = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0);
            1.0 / ((1.0 - smooth) / factor + smooth)
        });
        let is_expected = |(expected, found): (f64, &f32)| (expected / f64::from(*found) - 1.0).abs() < 1e-3;
        if self.wavelengths.len() != head / 2 || !expected.zip(self.wavelengths).all(is_expected) {
            return Err("the factors of `rope_freqs.weight` are none of Llama 3's".to_owned());
        }
        Ok(Some(json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        })))
    }
}

/// Adds the fields of an object.
fn extend(fields: &mut Map<String, Value>, own: Value) {
    if let Value::Object(own) = own {
        fields.extend(own);
    }
}
