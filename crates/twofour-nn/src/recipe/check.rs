//! Settings of a recipe against each other.

use super::{
    Mistakes, ModelKind, OptimizerKind, Place, Recipe, ScheduleKind, TrainingSettings, layers,
    sections::{Sections, VISION_KEYS},
    sparsity::{check_bands, check_sparsity},
    start,
};
use crate::model::{EncoderTask, VitConfig};

/// The largest rotary tables: positions times half a head's elements.
const MAX_ANGLES: usize = 1 << 25;

/// The most weights of a linear layer, and the most layers: a bound before anything is allocated.
const MAX_WEIGHTS: usize = 1 << 40;
const MAX_LAYERS: usize = 1 << 12;

/// Notes every contradiction.
pub(super) fn check(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    check_data(recipe, sections, m);
    check_training(recipe, sections, m);
    check_sparsity(recipe, sections, m);
    start::check_trials(recipe, sections, m);
    if check_model(recipe, sections, m) {
        layers::check(recipe, sections, m);
        check_bands(recipe, sections, m);
        start::check_zeros(recipe, sections, m);
    }
}

/// Returns whether the sizes are such that layers can be listed.
fn check_model(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) -> bool {
    let (model, s) = (&recipe.model, &sections.model);
    let faults = m.len();
    if m.has("model.from") {
        return false;
    }
    let sizes = [
        "kind",
        "task",
        "layers",
        "width",
        "heads",
        "kv_heads",
        "context",
        "feed_forward",
        "image",
        "patch",
        "channels",
        "classes",
    ];
    if sizes.iter().any(|key| m.has(&format!("model.{key}"))) {
        return false;
    }
    check_vision(recipe, sections, m);
    if model.kind != ModelKind::Bert && s.place("task") != Place::Absent {
        m.add(s.place("task"), "model.task", "only a \"bert\" has it");
    }
    // The sizes of a model that training starts from fit each other.
    if model.from.is_some() {
        return m.len() == faults;
    }
    if !model.width.is_multiple_of(2 * model.heads) {
        let problem = format!(
            "found {}, expected a divisor of the width {} that leaves an even number of elements for each head",
            model.heads, model.width
        );
        m.add(s.place("heads"), "model.heads", problem);
    }
    if let Some(kv_heads) = model.kv_heads {
        if model.kind != ModelKind::Llama {
            let problem = format!("found {kv_heads}, expected no such key: only a \"llama\" has heads that share keys");
            m.add(s.place("kv_heads"), "model.kv_heads", problem);
        } else if !model.heads.is_multiple_of(kv_heads) {
            let problem = format!("found {kv_heads}, expected a divisor of the {} heads", model.heads);
            m.add(s.place("kv_heads"), "model.kv_heads", problem);
        }
    }
    let angles = model.context * (model.width / model.heads).div_ceil(2);
    if angles > MAX_ANGLES {
        let problem = format!(
            "found {} with heads of {} elements, expected at most 2^26 elements of all positions of one head together",
            model.context,
            model.width / model.heads
        );
        m.add(s.place("context"), "model.context", problem);
    }
    if model.width * model.feed_forward().max(3 * model.width) > MAX_WEIGHTS {
        let problem = format!("found {}, expected linear layers of at most 2^40 weights", model.width);
        m.add(s.place("width"), "model.width", problem);
    }
    if model.layers > MAX_LAYERS {
        let problem = format!("found {}, expected at most {MAX_LAYERS}", model.layers);
        m.add(s.place("layers"), "model.layers", problem);
    }
    m.len() == faults
}

/// The keys that only a vision transformer has, and those of images against each other.
fn check_vision(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let (model, s) = (&recipe.model, &sections.model);
    if model.kind != ModelKind::Vit {
        for key in VISION_KEYS {
            if s.place(key) != Place::Absent {
                m.add(s.place(key), format!("model.{key}"), "only a \"vit\" has it");
            }
        }
        return;
    }
    let (image, patch) = (model.image.unwrap_or(0), model.patch.unwrap_or(0));
    if patch == 0 || !image.is_multiple_of(patch) {
        let problem = format!("found {patch}, expected a divisor of the image's {image} pixels");
        m.add(s.place("patch"), "model.patch", problem);
    } else if VitConfig::from(model).validate().is_err() && model.width.is_multiple_of(2 * model.heads) {
        let problem =
            format!("found {patch} for images of {image}, expected at most 2^20 values of a patch, and 2^20 patches");
        m.add(s.place("patch"), "model.patch", problem);
    }
    if model.classes.is_some_and(|classes| classes > 256) {
        let problem = format!("found {}, expected at most 256: labels are bytes", model.classes.unwrap_or(0));
        m.add(s.place("classes"), "model.classes", problem);
    }
}

fn check_data(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let (key, files) = match (recipe.model.kind, recipe.model.task) {
        (ModelKind::Vit, _) | (ModelKind::Bert, None) => return,
        (ModelKind::Bert, Some(EncoderTask::Answers)) => ("questions", &recipe.data.questions),
        _ => ("text", &recipe.data.text),
    };
    if files.is_empty() && !m.has(&format!("data.{key}")) {
        m.add(sections.data.place(key), format!("data.{key}"), "found an empty list, expected at least one file");
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
    if training.linear_probe && recipe.model.kind != ModelKind::Vit {
        let problem = "only a \"vit\" has features of images, and the model is of another kind";
        m.add(s.place("linear_probe"), "training.linear_probe", problem);
    }
    if training.frozen_embeddings && !matches!(recipe.model.kind, ModelKind::Gpt | ModelKind::Llama) {
        let problem = "only a decoder, a \"gpt\" or a \"llama\", has tables of tokens that can stay";
        m.add(s.place("frozen_embeddings"), "training.frozen_embeddings", problem);
    }
    check_optimizer(recipe, sections, m);
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
        (ScheduleKind::Wsd, Some(1)) if within_run => {
            let problem = "found 1, expected at least 2, or 0 for a constant rate: the fall begins at the learning \
                           rate, so one step of it changes nothing";
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

/// The keys that the other optimizer has. The defaults are in every recipe that is written.
fn check_optimizer(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let (own, s, default) = (&recipe.training, &sections.training, TrainingSettings::default());
    if m.has("training.optimizer") {
        return;
    }
    let is_sgd = own.optimizer == OptimizerKind::Sgd;
    let foreign = |owner: &str, given: &str, default: f64| {
        format!(
            "only the optimizer \"{owner}\" has it, and the optimizer is \"{given}\"; leave it out, or set its \
             default, {default}"
        )
    };
    for (key, value, default, is_foreign) in [
        ("momentum", own.momentum, default.momentum, !is_sgd),
        ("beta1", own.beta1, default.beta1, is_sgd),
        ("beta2", own.beta2, default.beta2, is_sgd),
        ("epsilon", own.epsilon, default.epsilon, is_sgd),
    ] {
        if value != default && is_foreign && !m.has(&format!("training.{key}")) {
            let (owner, given) = if is_sgd { ("adamw", "sgd") } else { ("sgd", "adamw") };
            m.add(s.place(key), format!("training.{key}"), foreign(owner, given, default));
        }
    }
}
