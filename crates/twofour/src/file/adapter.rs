//! Adapters of peft: low-rank updates of a model's weights, in a directory of their own.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde_json::Value;

use super::{Reader, StoredDType, StoredElement, TensorInfo, TensorView, what_else};
use crate::{DataType, Element, Error, Result, match_element};

/// An adapter that peft saved (`adapter_config.json` beside `adapter_model.safetensors` or `.bin`), of LoRA, or of SPP
/// in the names of its authors, or one that `twofour train` left.
///
/// | kind | tensors of a module | update of its weight `W` |
/// |---|---|---|
/// | LoRA | `lora_A.weight` `[r, in]`, `lora_B.weight` `[out, r]` | `s · B A` |
/// | LoRS | the same, with the `peft_type` `LORS` | `s · m ⊙ (B A)`, where `m` is one where `W` is not zero |
/// | SPP (Lu et al., ICML 2024) | `lora_A.weight` `[r, in]`, `lora_A.weight_col` `[out, 1]` | `s · A' ⊙ b ⊙ W`: rows of `A'` are those of `A`, each `out / r` times |
///
/// SPP has the `peft_type` `SPP` or, as its authors wrote it, `LORA`. peft loads neither of these two kinds, and
/// refuses the types `SPP` and `LORS`. `s` is `lora_alpha / r`, or `lora_alpha / √r` with `use_rslora`.
#[derive(Debug)]
pub struct Adapter {
    reader: Reader,
    updates: BTreeMap<String, Stored>,
}

/// The names of an update's tensors, and its factor.
#[derive(Debug, Clone)]
struct Stored {
    kind: UpdateKind,
    parts: [TensorInfo; 2],
    scale: f32,
}

/// How an adapter changes a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UpdateKind {
    /// A product of two matrices is added.
    LoRA,
    /// A product of two matrices is added where the weight is not zero.
    LoRS,
    /// Its elements are multiplied, so that zeros stay zeros.
    Spp,
}

/// The update of one weight `[out, in]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Update {
    pub(crate) kind: UpdateKind,
    /// `[rank, in]`.
    pub(crate) a: Vec<f32>,
    /// `[out, rank]`; of SPP `[out]`.
    pub(crate) b: Vec<f32>,
    pub(crate) rank: usize,
    pub(crate) scale: f32,
}

/// What is in front of the names of modules.
const PREFIX: &str = "base_model.model.";

impl Adapter {
    /// Opens the adapter in a directory.
    ///
    /// # Errors
    /// [`Error::Io`] and [`Error::Format`]: no adapter, one of another kind, one that changes more than matrices, and
    /// one whose update depends on more than its tensors.
    pub fn open(directory: impl AsRef<Path>) -> Result<Self> {
        let directory = directory.as_ref();
        let config = Config::read(&directory.join("adapter_config.json"))?;
        let files = ["adapter_model.safetensors", "adapter_model.bin"].map(|name| directory.join(name));
        let file = files.iter().find(|file| file.is_file()).unwrap_or(&files[0]);
        let reader = Reader::open(file)?;
        let fault = |reason: String| Error::Format { path: file.clone(), reason };
        let mut modules: BTreeMap<String, BTreeMap<&str, TensorInfo>> = BTreeMap::new();
        for tensor in reader.plain_tensors() {
            let part = PARTS.iter().find_map(|part| Some((tensor.name.strip_suffix(part)?, *part)));
            let Some((module, part)) = part else {
                return Err(fault(format!(
                    "`{}` is no part of a low-rank update, which alone can be merged: an adapter of whole modules, \
                     trained biases, embeddings or magnitudes has to be merged by peft",
                    tensor.name
                )));
            };
            let module = module.strip_prefix(PREFIX).unwrap_or(module).to_owned();
            modules.entry(module).or_default().insert(part, tensor.clone());
        }
        if modules.is_empty() {
            return Err(fault("the adapter holds no update".to_owned()));
        }
        let mut updates = BTreeMap::new();
        for (module, mut parts) in modules {
            let [a, b, column] = PARTS.map(|part| parts.remove(part));
            let (kind, parts) = match (a, b, column, config.kind) {
                (Some(a), Some(b), None, UpdateKind::LoRA | UpdateKind::LoRS) => (config.kind, [a, b]),
                (Some(a), None, Some(column), UpdateKind::LoRA | UpdateKind::Spp) => (UpdateKind::Spp, [a, column]),
                (Some(_), Some(_), None, _) | (Some(_), None, Some(_), _) => {
                    return Err(fault(format!(
                        "the tensors of `{module}` are not those of the kind that adapter_config.json names"
                    )));
                }
                _ => {
                    return Err(fault(format!(
                        "the update of `{module}` is not whole: it lacks one of its two tensors"
                    )));
                }
            };
            let fits = match [&parts[0].shape[..], &parts[1].shape] {
                [&[rank, _], &[_, columns]] if kind != UpdateKind::Spp => rank == columns,
                [&[rank, _], &[rows, 1]] => rank > 0 && rows % rank == 0,
                _ => false,
            };
            if !fits || parts.iter().any(|part| part.shape.contains(&0)) {
                let [a, b] = parts.map(|part| format!("{:?}", part.shape));
                return Err(fault(format!(
                    "the update of `{module}` has tensors {a} and {b}, which do not fit together"
                )));
            }
            let rank = match kind {
                UpdateKind::LoRA | UpdateKind::LoRS => parts[0].shape[0] as f64,
                UpdateKind::Spp => config.rank,
            };
            let scale = config.scale(&module, rank)? as f32;
            updates.insert(module, Stored { kind, parts, scale });
        }
        Ok(Adapter { reader, updates })
    }

    /// The names of the modules whose weights it changes, and how.
    pub fn modules(&self) -> impl Iterator<Item = (&str, UpdateKind)> {
        self.updates.iter().map(|(name, own)| (name.as_str(), own.kind))
    }

    /// The file that holds its tensors.
    pub fn path(&self) -> &Path {
        self.reader.path()
    }

    /// The names of a model's weights, by the module of the adapter that changes them.
    ///
    /// # Errors
    /// [`Error::Format`] for a module of which the model has no weight, or several, and for one that two modules name.
    pub(crate) fn weights<'a>(&self, model: &'a [&'a str]) -> Result<BTreeMap<&'a str, &str>> {
        let fault = |reason: String| Error::Format { path: self.path().to_owned(), reason };
        let mut found = BTreeMap::new();
        for module in self.updates.keys() {
            let own = format!("{module}.weight");
            let inside = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|head| head.ends_with('.'));
            let exact: Vec<&str> = model.iter().copied().filter(|name| *name == own).collect();
            let similar = || model.iter().copied().filter(|name| inside(name, &own) || inside(&own, name)).collect();
            let names = if exact.is_empty() { similar() } else { exact };
            let [name] = names[..] else {
                return Err(fault(match names[..] {
                    [] => format!("it changes `{own}`, which the model does not have: it belongs to another model"),
                    _ => format!("it changes `{own}`, and the model has several such weights: {}", names.join(", ")),
                }));
            };
            if let Some(other) = found.insert(name, module.as_str()) {
                return Err(fault(format!("its modules `{other}` and `{module}` both change the model's `{name}`")));
            }
        }
        Ok(found)
    }

    /// How a module's weight is changed, and the shape `[out, in]` that the update is for.
    pub(crate) fn of(&self, module: &str) -> Option<(UpdateKind, [usize; 2])> {
        let Stored { kind, parts: [a, b], .. } = self.updates.get(module)?;
        Some((*kind, [*b.shape.first()?, *a.shape.get(1)?]))
    }

    /// The update of a module's weight.
    ///
    /// # Errors
    /// Those of reading, and an element that is not finite.
    pub(crate) fn update(&self, module: &str) -> Result<Option<Update>> {
        let Some(Stored { kind, parts, scale }) = self.updates.get(module) else { return Ok(None) };
        let [a, b] = parts;
        let rank = a.shape[0];
        Ok(Some(Update { kind: *kind, a: self.floats(a)?, b: self.floats(b)?, rank, scale: *scale }))
    }

    fn floats(&self, tensor: &TensorInfo) -> Result<Vec<f32>> {
        let named = |error: Error| error.in_tensor(&tensor.name).in_file(self.path());
        let dtype = tensor.dtype.element().filter(|dtype| *dtype != DataType::I8);
        let Some(dtype) = dtype else {
            return Err(named(Error::WrongDType { expected: StoredDType::F32, found: tensor.dtype }));
        };
        let view = self.reader.tensor(&tensor.name)?;
        let values = match_element!(dtype, |T| widened::<T>(view))?;
        let cols = tensor.shape[1];
        crate::MatrixRef::new(values.len() / cols, cols, &values)?.expect_finite().map_err(named)?;
        Ok(values)
    }
}

fn widened<T: Element + StoredElement>(view: TensorView<'_>) -> Result<Vec<f32>> {
    Ok(view.elements::<T>()?.iter().map(|value| value.to_f32()).collect())
}

/// The endings of an update's tensors.
const PARTS: [&str; 3] = [".lora_A.weight", ".lora_B.weight", ".lora_A.weight_col"];

/// What `adapter_config.json` says.
#[derive(Debug)]
struct Config {
    path: PathBuf,
    /// LoRA where the tensors decide whether it is SPP.
    kind: UpdateKind,
    rank: f64,
    alpha: f64,
    /// `lora_alpha` of some modules, by the end of their names.
    alphas: BTreeMap<String, f64>,
    has_root: bool,
}

impl Config {
    fn read(path: &Path) -> Result<Self> {
        let io = |source| Error::Io { path: path.to_owned(), action: "reading the adapter's configuration", source };
        let bytes = std::fs::read(path).map_err(io)?;
        let fault = |reason: String| Error::Format { path: path.to_owned(), reason };
        let config: Value = serde_json::from_slice(&bytes).map_err(|e| {
            fault(what_else(&bytes).map_or_else(|| format!("it is no JSON: {e}"), |what| format!("is {what}")))
        })?;
        let kind = config["peft_type"].as_str().unwrap_or("LORA");
        let kind = match kind {
            "LORA" => UpdateKind::LoRA,
            "LORS" => UpdateKind::LoRS,
            "SPP" => UpdateKind::Spp,
            _ => {
                return Err(fault(format!("an adapter of the type {kind}: those of LORA, LORS and SPP can be merged")));
            }
        };
        for (key, why) in [
            ("use_dora", "DoRA normalizes the sum of weight and update"),
            ("layer_replication", "it repeats layers of the model"),
            ("use_qalora", "it adds up groups of inputs"),
            ("alora_invocation_tokens", "it changes the model behind some tokens alone"),
            ("arrow_config", "it chooses among several adapters"),
        ] {
            if !matches!(config[key], Value::Null | Value::Bool(false)) {
                return Err(fault(format!("`{key}` is set, with which weights cannot be merged here: {why}")));
            }
        }
        let begins = config["init_lora_weights"].as_str().unwrap_or("gaussian");
        if !["gaussian", "orthogonal", "eva"].contains(&begins) {
            return Err(fault(format!(
                "`init_lora_weights` is \"{begins}\", which changed the model's own weights before training: convert the \
                 adapter by peft (path_initial_model_for_weight_conversion) first"
            )));
        }
        let number = |key: &str| {
            config[key].as_f64().filter(|x| x.is_finite()).ok_or_else(|| fault(format!("`{key}` is no number")))
        };
        let rank = number("r")?;
        if rank <= 0.0 {
            return Err(fault(format!("`r` is {rank}, expected a number above 0")));
        }
        let mut alphas = BTreeMap::new();
        for (module, alpha) in config["alpha_pattern"].as_object().into_iter().flatten() {
            let is_name = module.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
            let Some(alpha) = alpha.as_f64().filter(|_| is_name) else {
                return Err(fault(format!("`alpha_pattern` has \"{module}\", expected names of modules with numbers")));
            };
            alphas.insert(module.clone(), alpha);
        }
        let has_root = config["use_rslora"].as_bool().unwrap_or(false);
        Ok(Config { path: path.to_owned(), kind, rank, alpha: number("lora_alpha")?, alphas, has_root })
    }

    /// The factor of a module's update.
    fn scale(&self, module: &str, rank: f64) -> Result<f64> {
        let is_of = |name: &str| module.strip_suffix(name).is_some_and(|head| head.is_empty() || head.ends_with('.'));
        let found: BTreeSet<u64> =
            self.alphas.iter().filter(|(name, _)| is_of(name)).map(|(_, alpha)| alpha.to_bits()).collect();
        if found.len() > 1 {
            let reason = format!("`alpha_pattern` has several numbers for `{module}`");
            return Err(Error::Format { path: self.path.clone(), reason });
        }
        let alpha = found.first().map_or(self.alpha, |bits| f64::from_bits(*bits));
        Ok(alpha / if self.has_root { rank.sqrt() } else { rank })
    }
}
