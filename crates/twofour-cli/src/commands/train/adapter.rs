//! The adapter that a run leaves.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Map, Value, json};
use twofour::file::{Overwrite, PlannedTensor, StoredDType, Writer, write_whole};
use twofour_nn::{
    model::{ModelParts as _, SavedModel, StoredRows},
    recipe::Recipe,
    train::{
        Trainer, TrainingData,
        methods::{AdapterFactors, AdapterKind},
    },
};
use twofour_transformer::engine::Engine;

use super::{
    folder::Folder,
    outcome::{publish, remove},
};
use crate::commands::peft;

/// The directory of the adapter in the run's folder.
pub(super) const FOLDER: &str = "adapter";

/// The directory while it is written.
const UNFINISHED: &str = ".adapter.tmp";

/// What merging the adapter changed.
#[derive(Debug, Clone, Serialize)]
pub(super) struct AdapterReport {
    /// The directory in the run's folder; none where the format has no place for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) path: Option<&'static str>,
    /// How it changes weights.
    pub(super) kind: &'static str,
    /// Elements of all factors.
    pub(super) elements: usize,
    /// Loss of the merged model on the validation part.
    pub(super) merged_val_loss: Option<f64>,
    /// By layer.
    pub(super) layers: BTreeMap<String, LayerUpdate>,
}

/// What merging changed in a layer.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct LayerUpdate {
    /// The norm of the update by that of the weight.
    update: f64,
    /// The norm of what zeros lose of the update, by that of the update.
    pub(super) lost: f64,
}

impl AdapterReport {
    /// The mean over the layers of what zeros lose.
    pub(super) fn lost(&self) -> f64 {
        self.layers.values().map(|layer| layer.lost).sum::<f64>() / self.layers.len().max(1) as f64
    }

    /// What the directory is, for people.
    pub(super) fn describe(&self) -> &'static str {
        match self.kind {
            "lora" => "the adapter, as peft and twofour merge load it",
            _ => "the adapter, as twofour merge loads it",
        }
    }
}

/// Writes the adapter of a trainer, where it has one, and merges it into the trainer's model.
///
/// # Errors
/// Those of reading the model that training started from, of writing and of the engine.
pub(super) fn leave<E: Engine, D: TrainingData>(
    folder: &Folder,
    recipe: &Recipe,
    trainer: &mut Trainer<E, D>,
) -> Result<Option<AdapterReport>> {
    let of = |weight: &str| trainer.host_masks().find_map(|masks| masks.factors(weight));
    let layers: Vec<(&str, &AdapterFactors)> =
        trainer.model().linears().filter_map(|linear| Some((linear.name(), of(linear.weight().name())?))).collect();
    let Some(first) = layers.first().map(|(_, first)| *first) else { return Ok(None) };
    let kind = first.kind;
    let saved = recipe.saved_model()?.context("the recipe names no model to start from")?;
    let elements = layers.iter().map(|(_, factors)| factors.a.len() + factors.b.len()).sum();
    let is_written = write(folder, &saved, recipe, &layers)?;
    let layers = trainer.merge_adapters()?.into_iter();
    let layers = layers.map(|(name, [update, lost])| (name, LayerUpdate { update, lost })).collect();
    let loss = trainer.validate(recipe.training.validation_sequences)?;
    Ok(Some(AdapterReport {
        path: is_written.then_some(FOLDER),
        kind: kind.name(),
        elements,
        merged_val_loss: loss.is_finite().then_some(loss),
        layers,
    }))
}

/// Writes the directory, unless the format has no place for the adapter: SPP's rows are outputs, and a weight may be
/// stored the other way around.
fn write(folder: &Folder, saved: &SavedModel, recipe: &Recipe, layers: &[(&str, &AdapterFactors)]) -> Result<bool> {
    let mut parts = vec![];
    for &(layer, factors) in layers {
        for stored in saved.stored_rows(layer, factors.shape[0]) {
            let module = peft::module(saved.reader(), &format!("{}.weight", stored.module))?;
            parts.push((module, stored, factors));
        }
    }
    let is_transposed = parts.iter().any(|(_, stored, _)| stored.is_transposed);
    let Some(kind) = parts.first().map(|(.., factors)| factors.kind) else { return Ok(false) };
    let path = folder.file(UNFINISHED);
    remove(&path)?;
    if is_transposed && kind == AdapterKind::Spp {
        remove(&folder.file(FOLDER))?;
        return Ok(false);
    }
    fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
    let tensors: Vec<(String, [usize; 2], Vec<f32>)> =
        parts.iter().flat_map(|(module, stored, factors)| tensors(module, stored, factors)).collect();
    let planned = tensors.iter().map(|(name, shape, _)| PlannedTensor::new(name.clone(), StoredDType::F32, *shape));
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut writer = Writer::create(path.join(peft::WEIGHTS), Overwrite::Yes, planned.collect::<Vec<_>>(), metadata)?;
    for (name, _, values) in &tensors {
        writer.write_elements(name, values)?;
    }
    writer.finish()?;
    let modules: Vec<(&str, &AdapterFactors)> =
        parts.iter().map(|(module, _, factors)| (module.as_str(), *factors)).collect();
    let base = recipe.model.from.as_deref().unwrap_or(Path::new(""));
    let base = std::path::absolute(base).with_context(|| base.display().to_string())?;
    let config = configuration(kind, &modules, is_transposed, &base);
    write_whole(path.join(peft::CONFIG), Overwrite::Yes, format!("{config:#}\n").as_bytes())?;
    publish(folder, UNFINISHED, FOLDER)?;
    Ok(true)
}

/// The tensors of a module, with their shapes.
fn tensors(module: &str, stored: &StoredRows, factors: &AdapterFactors) -> [(String, [usize; 2], Vec<f32>); 2] {
    let AdapterFactors { rank, shape: [_, inputs], ref a, ref b, .. } = *factors;
    let (rows, name) = (&stored.rows, |part: &str| format!("base_model.model.{module}.{part}"));
    if factors.kind != AdapterKind::Spp {
        let b = rows.iter().flat_map(|row| &b[row * rank..][..rank]).copied().collect();
        return [(name("lora_A.weight"), [rank, inputs], a.clone()), (name("lora_B.weight"), [rows.len(), rank], b)];
    }
    // Rows that are stored one after the other share one of A if they do in the layer.
    let repeated = factors.repeated();
    let is_shared = |count: &usize| {
        let mut shared = rows.chunks(*count).map(|rows| rows.iter().map(|row| row / repeated));
        rows.len().is_multiple_of(*count)
            && shared.all(|mut rows| rows.next().is_none_or(|k| rows.all(|other| other == k)))
    };
    let count = (1..=repeated).rev().find(is_shared).unwrap_or(1);
    let own: Vec<f32> =
        rows.iter().step_by(count).flat_map(|row| &a[row / repeated * inputs..][..inputs]).copied().collect();
    let column = rows.iter().map(|row| b[*row]).collect();
    [(name("lora_A.weight"), [rows.len() / count, inputs], own), (name("lora_A.weight_col"), [rows.len(), 1], column)]
}

/// `adapter_config.json`. peft refuses the types of adapters that it would compute otherwise.
fn configuration(kind: AdapterKind, modules: &[(&str, &AdapterFactors)], is_transposed: bool, base: &Path) -> Value {
    let (mut ranks, mut alphas) = (Map::new(), Map::new());
    let (rank, alpha) = modules.first().map_or((1, 1.0), |(_, factors)| (factors.rank, factors.alpha));
    for (module, factors) in modules {
        // The scale of SPP is by the rank of all.
        let own = match kind {
            AdapterKind::Spp => factors.alpha / factors.rank as f64 * rank as f64,
            AdapterKind::Lora | AdapterKind::Lors => factors.alpha,
        };
        if factors.rank != rank {
            ranks.insert((*module).to_owned(), Value::from(factors.rank));
        }
        if own != alpha {
            alphas.insert((*module).to_owned(), Value::from(own));
        }
    }
    let kind = match kind {
        AdapterKind::Lora => "LORA",
        AdapterKind::Lors => "LORS",
        AdapterKind::Spp => "SPP",
    };
    json!({
        "peft_type": kind,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.to_string_lossy(),
        "inference_mode": true,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "target_modules": modules.iter().map(|(module, _)| *module).collect::<Vec<_>>(),
    })
}
