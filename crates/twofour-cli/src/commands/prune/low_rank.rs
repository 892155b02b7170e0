//! A low-rank part beside pruned weights, as an adapter that peft loads.
//!
//! In peft's format a layer computes `Ŵx + B(Ax)` with the factors in `adapter_model.safetensors`: `lora_B.weight`,
//! `[out, rank]`, and `lora_A.weight`, `[rank, in]`. The scale `lora_alpha / r` is 1.

use std::{collections::BTreeMap, fs, path::Path};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use half::{bf16, f16};
use serde::Serialize;
use serde_json::{Value, json};
use twofour::{
    Arithmetic, DataType, Element, MatrixRef,
    file::{Overwrite, PlannedTensor, Reader, StoredDType, StoredElement, TensorInfo, Writer},
    solve::{LowRankForm, LowRankPart, Pruning, Rank},
};

use super::solution::Solutions;
use crate::{
    commands::{
        peft::{CONFIG, WEIGHTS, configuration_of, module},
        tensor::{OnMatrix, floats, on_compressed},
    },
    exit::Usage,
    present::{Screen, units},
};

/// The folder of the adapter in the pruned model's.
pub(super) const FOLDER: &str = "low-rank";

/// Options of the low-rank part.
#[derive(Debug, Clone, Args)]
pub(super) struct LowRankOptions {
    /// Beside the pruned weights, a low-rank part that stands for what they lost, in OUT/low-rank: a LoRA adapter as
    /// peft and transformers load it
    #[arg(long, value_enum, value_name = "FORM", requires = "calibration", conflicts_with = "tune")]
    low_rank: Option<Form>,

    /// Rank of the low-rank part: a number for every weight, or a share of its elements, such as 5%
    #[arg(long, value_name = "RANK", default_value = "64", requires = "low_rank")]
    rank: Rank,
}

/// How the low-rank part is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// EoRA: the part that changes the layer's outputs least on the calibration text
    Eora,
    /// SLiM: by the norms of the inputs alone; kept weights are found anew beside it
    Slim,
}

impl LowRankOptions {
    /// An error where the output has a low-rank part of other weights, which would stay.
    pub(super) fn expect_no_other(&self, output: &Path) -> Result<(), Usage> {
        let old = output.join(FOLDER);
        match self.low_rank.is_none() && old.join(CONFIG).exists() {
            true => Err(Usage(format!("{} is the low-rank part of the model that is there; remove it", old.display()))),
            false => Ok(()),
        }
    }

    /// Returns the part, where there is to be one.
    pub(super) fn part(&self, pruning: &Pruning, output: &Path, rounds: bool) -> Result<Option<LowRankPart>, Usage> {
        let Some(form) = self.low_rank else { return Ok(None) };
        if output.extension().is_some_and(|extension| extension == "safetensors") {
            return Err(Usage("--low-rank writes a folder beside the weights; name a directory to write".to_owned()));
        }
        if form == Form::Slim && rounds {
            return Err(Usage(
                "--low-rank slim finds kept weights anew, and --quantize rounds them; take eora".to_owned(),
            ));
        }
        let form = match form {
            Form::Eora => LowRankForm::Eora,
            Form::Slim => LowRankForm::Slim,
        };
        Ok(Some(LowRankPart { form, rank: self.rank, refit: pruning.refit }))
    }
}

/// An error for a model whose layers have other names in transformers, and for the first chosen weight that is an
/// expert's: transformers holds experts in one parameter, and an adapter has factors for modules.
pub(super) fn expect_modules(reader: &Reader, is_chosen: &dyn Fn(&TensorInfo) -> bool) -> Result<()> {
    if configuration_of(reader)?.get("vision_config").is_some() {
        let reason = "--low-rank: transformers renames the layers of models of text and images, so that an adapter by \
                      the stored names would fit none";
        return Err(Usage(reason.to_owned()).into());
    }
    let is_expert = |tensor: &&TensorInfo| tensor.name.split('.').any(|part| part.contains("expert"));
    match reader.plain_tensors().filter(is_expert).find(|tensor| is_chosen(tensor)) {
        None => Ok(()),
        Some(tensor) => Err(Usage(format!(
            "--low-rank: `{}` is of an expert, for which peft has no module; leave experts out with --exclude \
             '*expert*'",
            tensor.name
        ))
        .into()),
    }
}

/// What the low-rank part takes.
#[derive(Debug, Serialize)]
pub(super) struct LowRankAnswer {
    form: &'static str,
    /// The rank of every weight, or the least and the greatest.
    ranks: [usize; 2],
    weights: usize,
    bytes: usize,
    /// Of the pruned weights as they are stored dense.
    share: f64,
}

/// The adapter's files, by their paths in the model's directory, and what they take.
pub(super) fn files(
    part: &LowRankPart,
    reader: &Reader,
    solutions: &Solutions,
    output: &Path,
) -> Result<(BTreeMap<String, Vec<u8>>, LowRankAnswer)> {
    let shapes = solutions.low_rank_shapes();
    let (mut plan, mut dense) = (vec![], 0);
    for (name, [rank, outputs, inputs]) in &shapes {
        let info = reader.tensor(name)?.info;
        dense += info.bytes;
        for (factor, shape) in [("lora_A", [*rank, *inputs]), ("lora_B", [*outputs, *rank])] {
            plan.push(PlannedTensor::new(key(reader, name, factor)?, info.dtype, shape));
        }
    }
    let bytes = plan.iter().filter_map(|tensor| tensor.dtype.bytes(&tensor.shape)).sum();
    let folder = tempfile::tempdir_in(output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")))
        .context("making a temporary folder for the low-rank part")?;
    let path = folder.path().join(WEIGHTS);
    let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
    let mut writer = Writer::create(&path, Overwrite::No, plan, metadata)?;
    for name in shapes.keys() {
        let dtype = reader.tensor(name)?.info.dtype;
        let Some(factors) = solutions.low_rank(name)? else { continue };
        write(&mut writer, &key(reader, name, "lora_A")?, dtype, factors.right())?;
        write(&mut writer, &key(reader, name, "lora_B")?, dtype, factors.left())?;
    }
    writer.finish()?;
    let weights = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    let ranks: BTreeMap<&str, usize> = shapes.iter().map(|(name, [rank, ..])| (*name, *rank)).collect();
    let config = configuration(reader, &ranks, solutions.low_rank_is_transposed(), output)?;
    let files = BTreeMap::from([(format!("{FOLDER}/{WEIGHTS}"), weights), (format!("{FOLDER}/{CONFIG}"), config)]);
    let bounds = [ranks.values().min(), ranks.values().max()].map(|rank| rank.copied().unwrap_or_default());
    let form = if part.form == LowRankForm::Eora { "eora" } else { "slim" };
    let share = bytes as f64 / dense.max(1) as f64;
    Ok((files, LowRankAnswer { form, ranks: bounds, weights: ranks.len(), bytes, share }))
}

impl LowRankAnswer {
    /// Shows it.
    pub(super) fn tell(&self, screen: &mut Screen) -> Result<()> {
        let [least, most] = self.ranks;
        let ranks = if least == most { format!("rank {most}") } else { format!("ranks from {least} to {most}") };
        screen.line(format!(
            "low-rank part: {ranks} beside {}, {} ({} of these weights dense), in {FOLDER}/",
            units::plural(self.weights, "weight"),
            units::bytes(self.bytes as u64),
            units::percent(self.share),
        ))?;
        Ok(())
    }
}

fn key(reader: &Reader, weight: &str, factor: &str) -> Result<String> {
    Ok(format!("base_model.model.{}.{factor}.weight", module(reader, weight)?))
}

/// The text of `adapter_config.json`.
fn configuration(
    reader: &Reader,
    ranks: &BTreeMap<&str, usize>,
    is_transposed: bool,
    output: &Path,
) -> Result<Vec<u8>> {
    let rank = ranks.values().max().copied().unwrap_or(1);
    let (mut modules, mut others) = (vec![], serde_json::Map::new());
    for (name, own) in ranks {
        let module = module(reader, name)?;
        if *own != rank {
            others.insert(module.clone(), Value::from(*own));
        }
        modules.push(module);
    }
    let config = json!({
        "peft_type": "LORA",
        "task_type": null,
        "base_model_name_or_path": output.to_string_lossy(),
        "inference_mode": true,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "target_modules": modules,
    });
    Ok(format!("{config:#}\n").into_bytes())
}

fn write(writer: &mut Writer, key: &str, dtype: StoredDType, values: &[f32]) -> twofour::Result<()> {
    fn typed<T: Arithmetic + StoredElement>(writer: &mut Writer, key: &str, values: &[f32]) -> twofour::Result<()> {
        writer.write_elements(key, &values.iter().map(|value| T::from_f32(*value)).collect::<Vec<T>>())
    }
    match dtype.element() {
        Some(DataType::F16) => typed::<f16>(writer, key, values),
        Some(DataType::BF16) => typed::<bf16>(writer, key, values),
        _ => typed::<f32>(writer, key, values),
    }
}

/// A weight that was written, with its low-rank part, in its stored orientation; nothing for other weights.
pub(super) fn sum(reader: &Reader, solutions: &Solutions, name: &str) -> Result<Option<Vec<f32>>> {
    if !solutions.low_rank_shapes().contains_key(name) {
        return Ok(None);
    }
    let mut weight = match reader.compressed_weights().find(|weight| weight.name == name) {
        Some(weight) => on_compressed(reader, weight, Dense)?,
        None => floats(reader, name)?,
    };
    solutions.add_low_rank(name, &mut weight)?;
    Ok(Some(weight))
}

/// A matrix in f32.
struct Dense;

impl OnMatrix for Dense {
    type Output = Vec<f32>;

    fn run<T: Element>(self, matrix: MatrixRef<'_, T>) -> Vec<f32> {
        matrix.data().iter().map(|value| value.to_f32()).collect()
    }
}
