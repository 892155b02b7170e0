//! What sentence-transformers makes of a model's last hidden states, as the folders of its modules beside the model
//! say.

use std::{io::ErrorKind, path::Path};

use serde_json::Value;
use twofour::file::Reader;

use crate::{
    Result,
    model::{
        CheckpointError,
        checkpoint::StoredParts,
        families::layout::{Layout, StoredLinear},
    },
};

/// The modules after the model, in their order.
#[derive(Debug)]
pub(super) struct Modules {
    poolings: Vec<Pooling>,
    then: Vec<Module>,
    width: usize,
}

/// How the hidden states of all tokens become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pooling {
    First,
    Largest,
    Mean,
    /// The sum by the square root of the number of tokens.
    MeanOfRoot,
    /// The mean in which the n-th token counts n times.
    Weighted,
    Last,
}

impl Pooling {
    /// Each with its flag and its name in a configuration, in the order in which vectors of several are put one after
    /// the other.
    const ALL: [(Pooling, &str, &str); 6] = [
        (Pooling::First, "pooling_mode_cls_token", "cls"),
        (Pooling::Largest, "pooling_mode_max_tokens", "max"),
        (Pooling::Mean, "pooling_mode_mean_tokens", "mean"),
        (Pooling::MeanOfRoot, "pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
        (Pooling::Weighted, "pooling_mode_weightedmean_tokens", "weightedmean"),
        (Pooling::Last, "pooling_mode_lasttoken", "lasttoken"),
    ];
}

/// A module after pooling.
#[derive(Debug)]
enum Module {
    /// To unit length.
    Normalize,
    Dense(Dense),
}

/// A linear layer and a function of its outputs.
#[derive(Debug)]
struct Dense {
    /// `[outputs, inputs]`.
    weight: Vec<f32>,
    bias: Vec<f32>,
    function: fn(f64) -> f64,
}

/// A file of JSON; none where there is no such file.
fn json(path: &Path) -> Result<Option<Value>> {
    let text = match std::fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|source| CheckpointError::Io { path: path.to_owned(), source })?,
    };
    let not_json =
        |error: serde_json::Error| CheckpointError::NotAConfig { path: path.to_owned(), reason: error.to_string() };
    Ok(Some(serde_json::from_slice(&text).map_err(not_json)?))
}

/// The error for a field of a module's configuration.
fn unsupported(path: &Path, field: &str, found: impl ToString, supported: &'static str) -> crate::Error {
    let (path, field, found) = (path.to_owned(), field.to_owned(), found.to_string());
    CheckpointError::UnsupportedField { path, field, found, supported }.into()
}

impl Modules {
    /// The modules of a model without a folder of modules: the mean of its hidden states, of that width.
    pub(super) fn mean(width: usize) -> Self {
        Modules { poolings: vec![Pooling::Mean], then: vec![], width }
    }

    /// The modules of a directory whose model has hidden states of that width.
    pub(super) fn of(directory: &Path, width: usize) -> Result<Self> {
        let path = directory.join("modules.json");
        let Some(list) = json(&path)? else {
            // A directory of another program, or one whose list was left behind.
            return Ok(Modules { poolings: poolings(&directory.join("1_Pooling"))?, then: vec![], width });
        };
        let mut modules = Modules { poolings: vec![], then: vec![], width };
        let mut outputs = None;
        for module in list.as_array().map_or(&[][..], Vec::as_slice) {
            let text = |key: &str| module.get(key).and_then(Value::as_str).unwrap_or_default();
            let folder = directory.join(text("path"));
            match (text("type").rsplit('.').next().unwrap_or_default(), outputs) {
                ("Transformer", None) => {}
                ("Pooling", None) => {
                    modules.poolings = poolings(&folder)?;
                    outputs = Some(width * modules.poolings.len());
                }
                ("Normalize", Some(_)) => modules.then.push(Module::Normalize),
                ("Dense", Some(inputs)) => {
                    let dense = Dense::read(&folder, inputs)?;
                    outputs = Some(dense.bias.len());
                    modules.then.push(Module::Dense(dense));
                }
                _ => {
                    let supported = "supported are Transformer, Pooling, and then Dense and Normalize";
                    return Err(unsupported(&path, "type", text("type"), supported));
                }
            }
        }
        if modules.poolings.is_empty() {
            return Err(unsupported(&path, "type", "no Pooling", "one vector is made of all tokens by Pooling"));
        }
        Ok(modules)
    }

    /// The embedding that last hidden states, `[tokens, width]`, become.
    pub(super) fn embedding(&self, hidden: &[f32]) -> Vec<f64> {
        let mut x: Vec<f64> = self.poolings.iter().flat_map(|pooling| pooling.of(hidden, self.width)).collect();
        for module in &self.then {
            x = match module {
                Module::Normalize => {
                    let norm = x.iter().map(|value| value * value).sum::<f64>().sqrt().max(1e-12);
                    x.into_iter().map(|value| value / norm).collect()
                }
                Module::Dense(dense) => dense.of(&x),
            };
        }
        x
    }
}

/// What the configuration of a pooling asks for; the mean where there is none.
fn poolings(folder: &Path) -> Result<Vec<Pooling>> {
    let path = folder.join("config.json");
    let Some(config) = json(&path)? else { return Ok(vec![Pooling::Mean]) };
    let is = |flag: &str| config.get(flag).and_then(Value::as_bool) == Some(true);
    let named: Vec<&str> = match config.get("pooling_mode") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => vec![],
    };
    let by_name = |name: &&str| Pooling::ALL.iter().find(|(.., known)| known == name).map(|(pooling, ..)| *pooling);
    let flagged = Pooling::ALL.iter().filter(|(_, flag, _)| is(flag)).map(|(pooling, ..)| *pooling);
    // Older configurations have flags, newer ones names, in their order.
    let found: Vec<Pooling> = named.iter().filter_map(by_name).chain(flagged).collect();
    if found.is_empty() || named.iter().any(|name| by_name(name).is_none()) {
        let supported = "supported are cls, max, mean, mean_sqrt_len_tokens, weightedmean and lasttoken";
        return Err(unsupported(&path, "pooling_mode", &config, supported));
    }
    Ok(found)
}

impl Pooling {
    fn of(self, hidden: &[f32], width: usize) -> Vec<f64> {
        let rows = || hidden.chunks_exact(width).map(|row| row.iter().map(|value| f64::from(*value)));
        let tokens = hidden.len() / width;
        let sum = |weight: &dyn Fn(usize) -> f64| {
            let mut sum = vec![0.0; width];
            for (token, row) in rows().enumerate() {
                sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight(token) * value);
            }
            sum
        };
        match self {
            Pooling::First => sum(&|token| f64::from(token == 0)),
            Pooling::Last => sum(&|token| f64::from(token + 1 == tokens)),
            Pooling::Mean => sum(&|_| 1.0 / tokens as f64),
            Pooling::MeanOfRoot => sum(&|_| 1.0 / (tokens as f64).sqrt()),
            Pooling::Weighted => {
                let all = (tokens * (tokens + 1)) as f64 / 2.0;
                sum(&|token| (token + 1) as f64 / all)
            }
            Pooling::Largest => {
                let mut largest = vec![f64::NEG_INFINITY; width];
                for row in rows() {
                    largest.iter_mut().zip(row).for_each(|(largest, value)| *largest = largest.max(value));
                }
                largest
            }
        }
    }
}

impl Dense {
    /// Reads `config.json` and `model.safetensors` of a linear layer for so many inputs.
    fn read(folder: &Path, inputs: usize) -> Result<Self> {
        let path = folder.join("config.json");
        let config = json(&path)?.unwrap_or_default();
        let size = |key: &str| config.get(key).and_then(Value::as_u64).and_then(|size| usize::try_from(size).ok());
        let (Some(outputs), Some(found)) = (size("out_features"), size("in_features")) else {
            return Err(unsupported(&path, "out_features", &config, "in_features and out_features are numbers"));
        };
        if found != inputs {
            let supported = "it is the width of what the module before it returns";
            return Err(unsupported(&path, "in_features", found, supported));
        }
        let is = |key: &str, usual: &str| config.get(key).and_then(Value::as_str).is_none_or(|found| found == usual);
        if !is("module_input_name", "sentence_embedding") || !is("module_output_name", "sentence_embedding") {
            let supported = "supported is a layer from `sentence_embedding` to it";
            return Err(unsupported(&path, "module_input_name", &config, supported));
        }
        if config.get("use_residual").and_then(Value::as_bool) == Some(true) {
            return Err(unsupported(&path, "use_residual", true, "supported are layers without a residual"));
        }
        let name = config.get("activation_function").and_then(Value::as_str).unwrap_or("Tanh");
        let function: fn(f64) -> f64 = match name.rsplit('.').next().unwrap_or_default() {
            "Identity" => |x| x,
            "Tanh" => f64::tanh,
            "ReLU" => |x| x.max(0.0),
            "Sigmoid" => |x| 1.0 / (1.0 + (-x).exp()),
            "SiLU" => |x| x / (1.0 + (-x).exp()),
            _ => {
                let supported = "supported are Identity, Tanh, ReLU, Sigmoid and SiLU";
                return Err(unsupported(&path, "activation_function", name, supported));
            }
        };
        let has_bias = config.get("bias").and_then(Value::as_bool).unwrap_or(true);
        let mut layout = Layout::default();
        let parts = vec![("linear".to_owned(), outputs)];
        layout.linear("linear", StoredLinear { parts, inputs, has_bias, is_transposed: false });
        let reader = Reader::open(folder.join("model.safetensors"))?;
        layout.check(&reader)?;
        let stored = StoredParts::new(&reader, &layout, false);
        let bias = if has_bias { stored.values("linear.bias")? } else { vec![0.0; outputs] };
        Ok(Dense { weight: stored.values("linear.weight")?, bias, function })
    }

    fn of(&self, x: &[f64]) -> Vec<f64> {
        let product = |row: &[f32]| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
        let rows = self.weight.chunks_exact(x.len());
        rows.zip(&self.bias).map(|(row, bias)| (self.function)(product(row) + f64::from(*bias))).collect()
    }
}
