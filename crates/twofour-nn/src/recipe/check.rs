//! Settings of a recipe against each other.

use twofour::layer::{MaskRule, WeightGradient};

use super::{
    Method, Mistakes, ModelKind, Recipe, ScheduleKind, SparsitySettings, layers,
    parse::Sections,
    resolve::{gradient_of, mask_of},
};
use crate::train::{SparseBegin, SparsityPlan};

/// The largest rotary tables: positions times half a head's elements.
const MOST_ANGLES: usize = 1 << 25;

/// The most weights of a linear layer, and the most layers: a bound before anything is allocated.
const MOST_WEIGHTS: usize = 1 << 40;
const MOST_LAYERS: usize = 1 << 12;

/// Notes every contradiction.
pub(super) fn check(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    check_data(recipe, sections, m);
    check_training(recipe, sections, m);
    check_sparsity(recipe, sections, m);
    if check_model(recipe, sections, m) {
        layers::check(recipe, &sections.sparsity, m);
    }
}

/// Returns whether the sizes are such that layers can be listed.
fn check_model(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) -> bool {
    let (model, s) = (&recipe.model, &sections.model);
    let faults = m.len();
    if ["layers", "width", "heads", "kv_heads", "context", "feed_forward"]
        .iter()
        .any(|key| m.has(&format!("model.{key}")))
    {
        return false;
    }
    if !model.width.is_multiple_of(2 * model.heads) {
        let problem = format!(
            "found {}, expected a divisor of the width {} that leaves an even number of elements for each head",
            model.heads, model.width
        );
        m.add(s.place("heads"), "model.heads", problem);
    }
    if let Some(kv_heads) = model.kv_heads {
        if model.kind == ModelKind::Gpt {
            let problem = format!("found {kv_heads}, expected no such key: only a \"llama\" has heads that share keys");
            m.add(s.place("kv_heads"), "model.kv_heads", problem);
        } else if !model.heads.is_multiple_of(kv_heads) {
            let problem = format!("found {kv_heads}, expected a divisor of the {} heads", model.heads);
            m.add(s.place("kv_heads"), "model.kv_heads", problem);
        }
    }
    let angles = model.context * (model.width / model.heads).div_ceil(2);
    if angles > MOST_ANGLES {
        let problem = format!(
            "found {} with heads of {} elements, expected at most 2^26 elements of all positions of one head together",
            model.context,
            model.width / model.heads
        );
        m.add(s.place("context"), "model.context", problem);
    }
    if model.width * model.feed_forward().max(3 * model.width) > MOST_WEIGHTS {
        let problem = format!("found {}, expected linear layers of at most 2^40 weights", model.width);
        m.add(s.place("width"), "model.width", problem);
    }
    if model.layers > MOST_LAYERS {
        let problem = format!("found {}, expected at most {MOST_LAYERS}", model.layers);
        m.add(s.place("layers"), "model.layers", problem);
    }
    m.len() == faults
}

fn check_data(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    if recipe.data.text.is_empty() && !m.has("data.text") {
        m.add(sections.data.place("text"), "data.text", "found an empty list, expected at least one file");
    }
}

fn check_training(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let (training, s) = (&recipe.training, &sections.training);
    let sound = |m: &Mistakes, keys: &[&str]| !keys.iter().any(|key| m.has(&format!("training.{key}")));
    if let Some(micro) = training.micro_batch
        && sound(m, &["batch", "micro_batch"])
        && !training.batch.is_multiple_of(micro)
    {
        let problem = format!("found {micro}, expected a divisor of the batch of {} sequences", training.batch);
        m.add(s.place("micro_batch"), "training.micro_batch", problem);
    }
    if sound(m, &["learning_rate", "final_learning_rate"]) && training.final_learning_rate > training.learning_rate {
        let problem = format!(
            "found {:?}, expected at most the learning rate, {:?}",
            training.final_learning_rate, training.learning_rate
        );
        m.add(s.place("final_learning_rate"), "training.final_learning_rate", problem);
    }
    let within_run = sound(m, &["steps", "warm_up", "decay_steps", "schedule"]);
    if within_run && training.warm_up > training.steps {
        let problem = format!("found {}, beyond the run of {} steps", training.warm_up, training.steps);
        m.add(s.place("warm_up"), "training.warm_up", problem);
    }
    match (training.schedule, training.decay_steps) {
        (ScheduleKind::Cosine, Some(_)) if within_run => {
            let problem = "only the schedule \"wsd\" has it, and the schedule is \"cosine\"";
            m.add(s.place("decay_steps"), "training.decay_steps", problem);
        }
        (ScheduleKind::Wsd, _) if within_run && training.warm_up <= training.steps => {
            let together = training.warm_up + training.decay_steps();
            if together > training.steps {
                let problem = format!(
                    "{} steps of warm-up and {} of decay reach beyond the run of {} steps",
                    training.warm_up,
                    training.decay_steps(),
                    training.steps
                );
                m.add(s.place("decay_steps"), "training.decay_steps", problem);
            }
        }
        _ => {}
    }
}

fn check_sparsity(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let (settings, s) = (&recipe.sparsity, &sections.sparsity);
    if m.has("sparsity.method") {
        return;
    }
    let method = settings.method;
    let mut excluded = |key: &str, given: bool, why: &str| {
        if given {
            let problem = format!("excluded by the method \"{}\": {why}", method.name());
            m.add(s.place(key), format!("sparsity.{key}"), problem);
        }
    };
    for (key, given) in [
        ("layers", settings.layers.is_some()),
        ("mask", settings.mask.is_some()),
        ("mask_every", settings.mask_every.is_some()),
        ("weight_gradient", settings.weight_gradient.is_some()),
        ("decay", settings.decay.is_some()),
        ("decay_target", settings.decay_target.is_some()),
        ("begin", settings.begin.is_some()),
        ("end", settings.end.is_some()),
    ] {
        excluded(key, given && method == Method::Dense, "no layer is 2:4");
    }
    if method == Method::Dense {
        return;
    }
    let (mask, gradient) = (mask_of(settings), gradient_of(settings));
    let is_mvue = matches!(gradient, WeightGradient::Mvue | WeightGradient::MvueApproximate);
    let every = settings.mask_every;
    excluded("mask_every", every.is_some() && method == Method::Fixed, "its mask is chosen once");
    excluded("mask_every", every.is_some() && method == Method::Step, "its mask is chosen at every step");
    let soft = "the soft threshold's mask and values are one, so it is chosen at every step";
    excluded("mask_every", every.is_some_and(|n| n != 1) && method == Method::SSte, soft);
    excluded("weight_gradient", is_mvue && method == Method::Fixed, "MVUE is for gradients of pruned elements too");
    excluded("mask", mask == MaskRule::SoftThreshold && method != Method::SSte, "use the method \"s-ste\"");
    excluded("mask", mask != MaskRule::SoftThreshold && method == Method::SSte, "its mask is \"soft-threshold\"");
    let is_transposable = matches!(mask, MaskRule::Transposable(_));
    let names = "its masks are transposable: \"greedy\", \"greedy-signed\", \"causal1122\" or \"optimal\"";
    excluded("mask", !is_transposable && mask != MaskRule::SoftThreshold && method == Method::Fst, names);
    let masked = "pruned elements would never grow back; use the method \"fixed\"";
    excluded("weight_gradient", gradient == WeightGradient::Masked && method != Method::Fixed, masked);
    let decays = matches!(method, Method::SrSte | Method::Fst);
    let why = "pruned weights do not decay; use \"sr-ste\" or \"fst\"";
    excluded("decay", settings.decay.is_some() && !decays, why);
    excluded("decay_target", settings.decay_target.is_some() && !decays, why);
    check_times(recipe, sections, m);
}

/// The steps at which layers become 2:4 and dense again, and whatever else the trainer would refuse.
fn check_times(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let s = &sections.sparsity;
    let steps = recipe.training.steps;
    if ["sparsity.begin", "sparsity.end", "training.steps"].iter().any(|key| m.has(key)) {
        return;
    }
    if let Some(every) = recipe.sparsity.mask_every
        && every > steps
        && !m.has("sparsity.mask_every")
    {
        let problem = format!("found {every}, beyond the run of {steps} steps");
        m.add(s.place("mask_every"), "sparsity.mask_every", problem);
    }
    let own = SparsityPlan::of_method(recipe.sparsity.method, vec![], steps);
    let step_of = |share: f64| (share * steps as f64).round() as u64;
    let given = recipe.sparsity.begin.map(step_of);
    let begin = match own.begin {
        SparseBegin::Step(step) => given.unwrap_or(step),
        SparseBegin::Settled { latest, .. } => given.unwrap_or(0).max(latest),
    };
    let end = recipe.sparsity.end.map(step_of).or(own.end).unwrap_or(steps);
    if begin >= end {
        let key = if recipe.sparsity.end.is_some() { "end" } else { "begin" };
        let problem = format!(
            "layers would be 2:4 from step {begin} to step {end} of {steps}, which is never; expected an end after the beginning"
        );
        m.add(s.place(key), format!("sparsity.{key}"), problem);
    }
    if m.is_empty() {
        // Layers are checked on their own, with near misses.
        let settings = SparsitySettings { layers: None, ..recipe.sparsity.clone() };
        if let Err(error) = SparsityPlan::new(&settings, steps, &[]) {
            m.add(s.place("method"), "sparsity", error.to_string());
        }
    }
}
