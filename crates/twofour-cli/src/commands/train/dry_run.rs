//! What a recipe will do, as a table.

use anyhow::Result;
use twofour_nn::{
    linear::LayerForm,
    recipe::{LayerPlan, LevelPlan, RecipePlan, StagePlan},
    train::SparseBegin,
};

use crate::present::{
    Screen, escape,
    layers::by_layer,
    style::{self, paint},
    table::{Align, Table},
    units,
};

/// So many layers have a row each.
const FEW: usize = 20;

/// Prints the plan.
pub(super) fn show(screen: &mut Screen, plan: &RecipePlan) -> Result<()> {
    let mut table = Table::new([
        ("linear layer", Align::Left),
        ("[out, in]", Align::Right),
        ("form", Align::Left),
        ("why", Align::Left),
    ]);
    let is_detailed = screen.is_detailed() || plan.layers.len() <= FEW;
    let alike =
        |layer: &LayerPlan| (layer.out_features, layer.in_features, layer.sparse, layer.masked, layer.reason.clone());
    for (label, row) in by_layer(&plan.layers, is_detailed, |layer| (&layer.name, alike(layer))) {
        let layer = row[0];
        let form = match (layer.sparse, layer.masked) {
            (true, _) => paint(style::GOOD, "2:4"),
            (false, true) => paint(style::GOOD, "masked"),
            (false, false) => "dense".to_owned(),
        };
        let shape = units::shape(&[layer.out_features, layer.in_features]);
        table.row([label, shape, form, paint(style::FAINT, &layer.reason)]);
    }
    screen.line(table)?;
    screen.line("")?;
    let mut table = Table::of(["quantity"], ["value"]);
    let mut row = |name: &str, value: String| table.row([name.to_owned(), value]);
    if let Some(from) = &plan.from {
        row("starts from", from.display().to_string());
    }
    if let Some(teacher) = &plan.teacher {
        row("learns from", teacher.display().to_string());
    }
    row("method", plan.method.to_owned());
    if let (Some(vocabulary), Some(tokenizer)) = (plan.vocabulary, &plan.tokenizer) {
        row("tokens of the model", format!("{}, by {tokenizer}", units::count(vocabulary)));
    }
    if let Some(classes) = plan.classes {
        row("classes", units::count(classes));
    }
    row("parameters", units::count(plan.parameters));
    if plan.adapter_elements > 0 {
        row("elements of adapters, which train alone", units::count(plan.adapter_elements));
    }
    let share = plan.sparse_weights as f64 / plan.parameters as f64;
    row("weights of 2:4 layers", format!("{}, {}", units::count(plan.sparse_weights), units::percent(share)));
    if plan.masked_weights > 0 {
        let share = plan.masked_weights as f64 / plan.parameters as f64;
        row("weights of masked layers", format!("{}, {}", units::count(plan.masked_weights), units::percent(share)));
    }
    row("steps", units::count(plan.steps as usize));
    match plan.stages.as_slice() {
        [] => row("layers are 2:4", "never".to_owned()),
        [stage] => row(what_of(stage), when(stage)),
        stages => {
            stages.iter().for_each(|stage| row(&format!("{}: {}", what_of(stage), some_of(&stage.layers)), when(stage)))
        }
    }
    row("tokens a step", units::count(plan.step_tokens as usize));
    if plan.devices > 1 {
        row("GPUs, each with its share of the tokens of a step", units::count(plan.devices));
    }
    row("tokens", units::count(plan.tokens as usize));
    let memory = &plan.memory;
    let mut parts = vec![
        ("master weights, f32", memory.masters),
        ("gradients, f32", memory.gradients),
        ("moments, f32", memory.moments),
        ("dense copies for GEMMs", memory.copies),
        ("packed 2:4 weights and masks", memory.packed),
        ("activations, about", memory.activations),
    ];
    parts.extend((memory.teacher > 0).then_some(("the teacher and its logits", memory.teacher)));
    let all = if plan.devices > 1 { "memory of each GPU, about" } else { "memory, about" };
    for (name, bytes) in parts.into_iter().chain([(all, memory.total())]) {
        row(name, units::bytes(bytes));
    }
    row("precision of activations and GEMMs", plan.precision.to_owned());
    screen.line(table)?;
    plan.levels.iter().try_for_each(|levels| show_levels(screen, levels))
}

/// Prints the levels of the layers under one rule.
fn show_levels(screen: &mut Screen, plan: &LevelPlan) -> Result<()> {
    let pruned = if plan.in_place { "in place" } else { "with regrowth" };
    screen.line("")?;
    screen.line(escape::line(&format!("Masks prune {}, {pruned}: {}", plan.rule, plan.layers.join(", "))))?;
    let mut table = Table::new([("after step", Align::Right), ("level", Align::Right)]);
    for (step, level) in &plan.levels {
        table.row([units::count(*step as usize), units::percent(*level)]);
    }
    screen.line(table)
}

/// What a part's layers are while they are sparse.
fn what_of(stage: &StagePlan) -> &'static str {
    match stage.form {
        LayerForm::Masked => "layers are masked",
        LayerForm::TwoOfFourInput => "inputs of layers are 2:4",
        _ => "layers are 2:4",
    }
}

/// The first of some layers, and how many more there are.
fn some_of(layers: &[String]) -> String {
    match layers {
        [] => String::new(),
        [only] => only.clone(),
        [first, rest @ ..] => format!("{first} and {} more", rest.len()),
    }
}

/// The steps at which layers are 2:4, in words.
fn when(stage: &StagePlan) -> String {
    let end = stage.end;
    match (stage.begin, stage.two_of_four_from) {
        (SparseBegin::Step(begin), Some(from)) if from > begin => {
            format!("3:4 from step {begin}, 2:4 from step {from} to {end}")
        }
        (SparseBegin::Step(begin), _) => format!("from step {begin} to {end}"),
        (SparseBegin::Settled { earliest, latest }, _) => {
            format!("from when variances have settled, step {earliest} to {latest}, to {end}")
        }
    }
}
