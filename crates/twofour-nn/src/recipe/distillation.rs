//! The teacher of a recipe's model.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{
    Mistakes, ModelKind, Recipe,
    sections::{Sections, path_of},
};
use crate::{
    model::{DistillationLoss, SavedModel, TransformerConfig},
    settings::{NOT_NEGATIVE, Section},
};

/// The model that a decoder learns from, and by which loss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DistillationSettings {
    /// The model ([`SavedModel`]); relative to the recipe.
    pub teacher: PathBuf,
    /// The loss.
    #[serde(flatten)]
    pub loss: DistillationLoss,
    /// Its description, which [`Recipe::parse`] reads.
    #[serde(skip)]
    pub config: Option<TransformerConfig>,
}

/// The settings of `[distillation]`, where a recipe has it.
pub(super) fn read(s: &mut Section<'_>, folder: &Path, m: &mut Mistakes) -> Option<DistillationSettings> {
    if !s.is_present() {
        return None;
    }
    let teacher = s.text("teacher", m).map(Some);
    let teacher = s.required("teacher", "the model to learn from", teacher, None, m);
    let default = DistillationLoss::default();
    let mut weight = |key, default| s.number(key, NOT_NEGATIVE, m).unwrap_or(default);
    let loss = DistillationLoss {
        divergence: weight("divergence", default.divergence),
        cross_entropy: weight("cross_entropy", default.cross_entropy),
        hidden: weight("hidden", default.hidden),
    };
    let (text, place) = teacher?;
    Some(DistillationSettings { teacher: path_of(&text, &place, folder), loss, config: None })
}

/// Opens the teacher, and notes what does not fit the recipe's model.
pub(super) fn check(recipe: &mut Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let Some(own) = &recipe.distillation else { return };
    let s = &sections.distillation;
    if let Err(error) = own.loss.check() {
        m.add(s.place("divergence"), "distillation", error.to_string());
    }
    if !matches!(recipe.model.kind, ModelKind::Gpt | ModelKind::Llama) {
        m.add(s.own_place(), "distillation", "only a decoder, a \"gpt\" or a \"llama\", has a teacher");
        return;
    }
    if recipe.sparsity.decay.is_some_and(|decay| decay.strength().is_none()) {
        let problem = "found \"auto\", whose trial runs have no teacher; with [distillation], give a number";
        m.add(sections.sparsity.place("decay"), "sparsity.decay", problem);
    }
    let note = |m: &mut Mistakes, problem: String| m.add(s.place("teacher"), "distillation.teacher", problem);
    let saved = match SavedModel::open(&own.teacher) {
        Ok(saved) => saved,
        Err(error) => return note(m, error.to_string()),
    };
    let (teacher, hidden) = (saved.config().clone(), own.loss.hidden > 0.0);
    // What the recipe's own model is, is certain only where nothing is wrong with it.
    if m.is_empty() {
        let (student, path) = (recipe.decoder(), own.teacher.display());
        for (what, differs, [found, expected]) in [
            (
                "tokens, where the model that learns has",
                teacher.vocabulary() != student.vocabulary(),
                [teacher.vocabulary(), student.vocabulary()],
            ),
            (
                "tokens of context, where the model that learns has",
                teacher.context() < student.context(),
                [teacher.context(), student.context()],
            ),
            (
                "elements of a hidden state, where distillation.hidden requires",
                hidden && teacher.width != student.width,
                [teacher.width, student.width],
            ),
            (
                "layers, where distillation.hidden requires",
                hidden && teacher.layers != student.layers,
                [teacher.layers, student.layers],
            ),
        ] {
            if differs {
                note(m, format!("{path} has {found} {what} {expected}"));
            }
        }
        match (saved.tokenizer(), recipe.text_tokenizer()) {
            (Ok(of_teacher), Ok(of_text)) if m.is_empty() && !of_teacher.has_tokens_of(&of_text) => {
                let problem = format!("{path} has another tokenizer than the recipe: the same number is another token");
                note(m, problem);
            }
            (Err(error), _) | (_, Err(error)) => note(m, error.to_string()),
            _ => {}
        }
    }
    if let Some(own) = &mut recipe.distillation {
        own.config = Some(teacher);
    }
}
