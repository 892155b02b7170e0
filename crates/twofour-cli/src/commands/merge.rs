//! `twofour merge`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use twofour::file::{self, Adapter, Convert, Merged, Outcome, Reader, UpdateKind};

use super::{
    model::expect_model,
    next,
    output::{BesideAnswer, OutputOptions, path, show},
};
use crate::{
    exit::Verdict,
    hub, interrupt,
    present::{
        Screen, escape,
        layers::by_layer,
        table::{Align, Table},
        units,
    },
};

/// Add an adapter of peft to a model's weights; zeros stay zeros
///
/// Of LoRA the product of its matrices is added to a weight. Where a fifth of the weight or more is zero, or it is
/// compressed, only its other elements change: the pattern is kept, and what that loses of the update is shown. An
/// adapter of SPP multiplies the elements, and one of LoRS adds to those that are not zero, so that nothing is lost.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour merge pruned/ adapter/ -o merged/
  twofour merge small/ adapter/ -o merged/       weights stay compressed
  twofour merge --json pruned/ adapter/ -o merged/ | jq '.weights[].lost'

An adapter is a directory with adapter_config.json and adapter_model.safetensors or .bin, as peft and twofour train \
write it. DoRA, trained biases and \
whole modules are an error: peft merges those.")]
pub(crate) struct Merge {
    /// The model: a .safetensors or .gguf file, an index, a directory, or OWNER/NAME or OWNER/NAME@REVISION on the
    /// Hugging Face hub
    model: PathBuf,

    /// The directory of the adapter
    adapter: PathBuf,

    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    #[serde(serialize_with = "path")]
    output: &'a PathBuf,
    weights: Vec<WeightAnswer<'a>>,
    beside: BesideAnswer,
}

#[derive(Debug, Serialize)]
struct WeightAnswer<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: &'a [usize],
    kind: &'static str,
    keeps_zeros: bool,
    /// The norm of the update by that of the weight.
    update: f64,
    /// The norm of what zeros lose of the update, by that of the update.
    lost: f64,
}

impl Merge {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        self.model = hub::locate(&self.model, screen)?;
        let (output, overwrite) = (&self.output.output, self.output.overwrite());
        let reader = Reader::open(&self.model)?;
        expect_model(&reader)?;
        let adapter = Adapter::open(&self.adapter)?;
        file::check_output(&reader, output, overwrite)?;
        let merge = file::Merge::new(&adapter, &reader)?;
        tracing::info!(model = %reader.path().display(), adapter = %adapter.path().display(), "merging");
        let _guard = interrupt::guard();
        let mut progress = screen.progress();
        let convert = Convert::new(reader).overwrite(overwrite).progress(|p| show(&mut progress, p));
        let report = convert.run(output, merge)?;
        drop(progress);
        let weights: Vec<WeightAnswer<'_>> = report.tensors.iter().filter_map(weight_answer).collect();
        tell(screen, &weights)?;
        screen.line(format!(
            "\n{} of {} merged, written to {}",
            weights.len(),
            units::plural(report.tensors.len(), "tensor"),
            escape::path(output)
        ))?;
        let beside = BesideAnswer::of(&self.model, output)?;
        beside.tell(screen)?;
        screen.next(&[next::check(output)])?;
        screen.json(&Answer { output, weights, beside })?;
        Ok(Verdict::Yes)
    }
}

fn weight_answer(t: &file::Converted<Merged>) -> Option<WeightAnswer<'_>> {
    let Outcome::Changed(Merged { kind, keeps_zeros, update, lost }) = t.outcome else { return None };
    let kind = match kind {
        UpdateKind::LoRA => "LoRA",
        UpdateKind::LoRS => "LoRS",
        UpdateKind::Spp => "SPP",
    };
    Some(WeightAnswer { name: &t.name, dtype: t.dtype, shape: &t.shape, kind, keeps_zeros, update, lost })
}

fn tell(screen: &mut Screen, weights: &[WeightAnswer<'_>]) -> Result<()> {
    let mut table = Table::new([
        (if screen.is_detailed() { "tensor" } else { "layers" }, Align::Left),
        ("dtype", Align::Left),
        ("shape", Align::Right),
        ("adapter", Align::Left),
        ("update", Align::Right),
        ("lost", Align::Right),
        ("", Align::Left),
    ]);
    let alike = |w: &WeightAnswer<'_>| (w.dtype, w.shape.to_vec(), w.kind, w.keeps_zeros);
    for (label, row) in by_layer(weights, screen.is_detailed(), |w| (w.name, alike(w))) {
        let first = row[0];
        let mean = |of: fn(&WeightAnswer<'_>) -> f64| {
            units::percent(row.iter().map(|w| of(w)).sum::<f64>() / row.len() as f64)
        };
        table.row([
            label,
            first.dtype.to_owned(),
            units::shape(first.shape),
            first.kind.to_owned(),
            mean(|w| w.update),
            mean(|w| w.lost),
            if first.keeps_zeros { String::new() } else { "dense".to_owned() },
        ]);
    }
    screen.line(table)?;
    screen.note("update: the norm of the update by that of the weight, ‖Δ‖ / ‖W‖")?;
    screen.note("lost: the norm of what the zeros of the weight lose of the update, by that of the update")
}
