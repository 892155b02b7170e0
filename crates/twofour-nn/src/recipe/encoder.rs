//! Recipes of encoders.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::{
    DataSettings, Mistakes, ModelConfig, ModelKind, ModelSettings, ModelSource, Place, Recipe, SparsitySettings,
    Tokenizer,
    sections::{Sections, VISION_KEYS, read_files, read_validation, refuse},
};
use crate::{
    Result,
    model::{BertConfig, EncoderCheckpoint, EncoderTask, GptConfig, SavedModel, TransformerConfig},
    questions::QuestionFile,
    settings::{LARGEST, Section, name_of},
    train::QuestionSet,
};

/// Tokens of a sequence where the recipe gives none and the model has more: BERT's on SQuAD.
const POSITIONS: usize = 384;

impl Recipe {
    /// The description of an encoder.
    pub fn encoder(&self) -> BertConfig {
        match self.source.as_ref().map(|source| &source.config) {
            Some(ModelConfig::Bert(config)) => config.clone(),
            _ => config_of(&self.model),
        }
    }

    /// Opens the encoder that training starts from, where there is one.
    ///
    /// # Errors
    /// Those of [`EncoderCheckpoint::open`].
    pub fn saved_encoder(&self) -> Result<Option<EncoderCheckpoint>> {
        let from = self.model.from.as_ref().filter(|_| self.model.kind == ModelKind::Bert);
        from.map(|from| EncoderCheckpoint::open(SavedModel::locate(from))).transpose()
    }

    /// Reads the files of `data.questions` and cuts them into windows. Places are those of the paths, in their order.
    pub(super) fn gather_questions(&self, places: &[Place], mistakes: &mut Mistakes) -> Option<QuestionSet> {
        let mut files = vec![];
        for (index, path) in self.data.questions.iter().enumerate() {
            match QuestionFile::read(path) {
                Ok(file) => files.push(file),
                Err(error) => {
                    let place = places.get(index).cloned().unwrap_or(Place::Absent);
                    mistakes.add(place, "data.questions", error.to_string());
                }
            }
        }
        // With other mistakes, neither the tokenizer nor the length of windows is certain.
        if !mistakes.is_empty() {
            return None;
        }
        let cut = || -> Result<QuestionSet> {
            let positions = self.encoder().positions;
            QuestionSet::new(&QuestionFile::joined(files), &self.text_tokenizer()?, positions, self.data.validation)
        };
        cut().map_err(|error| mistakes.add(Place::Absent, "data.questions", error.to_string())).ok()
    }
}

/// A description by the sizes of a recipe alone, where the model cannot be opened.
fn config_of(model: &ModelSettings) -> BertConfig {
    let encoder = TransformerConfig::bert(&GptConfig::from(model), 1);
    BertConfig { encoder, task: model.task.unwrap_or(EncoderTask::Answers), positions: model.context }
}

/// The task, which must be there.
fn task(s: &mut Section<'_>, m: &mut Mistakes) -> Option<EncoderTask> {
    let task = s.choice("task", m).map(Some);
    s.required("task", "what the model learns, \"answers\" or \"masked-tokens\"", task, None, m)
}

/// Notes the keys that an encoder does not have.
fn refuse_others(s: &mut Section<'_>, m: &mut Mistakes) {
    refuse(s, "model", &VISION_KEYS, "only a \"vit\" has it", m);
    refuse(s, "model", &["kv_heads"], "only a \"llama\" has heads that share keys", m);
}

/// The model of a recipe whose start is absent or cannot be opened.
pub(super) fn read_model(s: &mut Section<'_>, from: Option<PathBuf>, m: &mut Mistakes) -> ModelSettings {
    let what =
        "the directory of the checkpoint that a \"bert\" starts from, with config.json, safetensors and tokenizer.json";
    if from.is_none() && !m.has("model.from") {
        m.add(s.place("kind"), "model.from", format!("is missing: {what}"));
    }
    refuse_others(s, m);
    let task = task(s, m);
    let mut size = |key| s.integer(key, 1, LARGEST, m).map_or(1, |size| size as usize);
    ModelSettings {
        kind: ModelKind::Bert,
        layers: size("layers"),
        width: size("width"),
        heads: size("heads"),
        context: size("context"),
        feed_forward: Some(size("feed_forward")),
        task,
        from,
        ..Default::default()
    }
}

/// The sizes of an encoder that training starts from; those that the recipe gives must be the same, but for a shorter
/// context.
pub(super) fn sizes(saved: &EncoderCheckpoint, from: &Path, s: &mut Section<'_>, m: &mut Mistakes) -> ModelSettings {
    let config = saved.config();
    let TransformerConfig { layers, width, .. } = *config;
    let (heads, feed_forward, longest) = (config.attention.heads, config.feed_forward.hidden, config.context());
    let kind = ModelKind::Bert;
    if let Some(given) = s.choice::<ModelKind>("kind", m).filter(|given| *given != kind) {
        let problem = format!("found \"{}\", but {} is a \"bert\"; leave the key out", name_of(given), from.display());
        m.add(s.place("kind"), "model.kind", problem);
    }
    for (key, own) in [("layers", layers), ("width", width), ("heads", heads), ("feed_forward", feed_forward)] {
        if let Some(given) = s.integer(key, 1, LARGEST, m).filter(|given| *given != own as u64) {
            let problem = format!("found {given}, but {} has {own}; leave the key out", from.display());
            m.add(s.place(key), format!("model.{key}"), problem);
        }
    }
    refuse_others(s, m);
    let context = s.integer("context", 1, LARGEST, m).map_or(longest.min(POSITIONS), |given| given as usize);
    if context > longest {
        let problem = format!("found {context}, but {} has positions for {longest} tokens", from.display());
        m.add(s.place("context"), "model.context", problem);
    }
    ModelSettings {
        from: Some(from.to_owned()),
        kind,
        layers,
        width,
        heads,
        context,
        feed_forward: Some(feed_forward),
        task: task(s, m),
        ..Default::default()
    }
}

/// What an encoder is trained on, with the place of each file.
pub(super) fn read_data(
    s: &mut Section<'_>,
    model: &ModelSettings,
    folder: &Path,
    m: &mut Mistakes,
) -> (DataSettings, Vec<Place>) {
    refuse(s, "data", &["images", "labels"], "only a \"vit\" has it", m);
    let (text, questions, places) = match model.task {
        Some(EncoderTask::Answers) => {
            refuse(s, "data", &["text"], "the task \"answers\" learns from data.questions", m);
            let what = "files of questions in SQuAD's JSON format";
            let (questions, places) = read_files(s, "questions", what, folder, m);
            (vec![], questions, places)
        }
        Some(EncoderTask::MaskedTokens) => {
            refuse(s, "data", &["questions"], "the task \"masked-tokens\" learns from data.text", m);
            let (text, places) = read_files(s, "text", "text files to train on", folder, m);
            (text, vec![], places)
        }
        // Which keys there may be depends on the task.
        None => {
            for key in ["text", "questions"] {
                s.skip(key);
            }
            (vec![], vec![], vec![])
        }
    };
    if let Some((name, place)) = s.text("tokenizer", m).filter(|(name, _)| name != "checkpoint") {
        let problem = format!("found {name:?}, but a \"bert\" reads by its checkpoint's tokenizer; leave the key out");
        m.add(place, "data.tokenizer", problem);
    }
    let tokenizer = Tokenizer::Checkpoint;
    let settings =
        DataSettings { text, questions, images: None, labels: None, tokenizer, validation: read_validation(s, m) };
    (settings, places)
}

/// What the checkpoint says, checked against the recipe.
pub(super) fn source(
    saved: &EncoderCheckpoint,
    model: &ModelSettings,
    sparsity: &SparsitySettings,
    sections: &Sections<'_>,
    m: &mut Mistakes,
) -> Option<ModelSource> {
    let place = || sections.model.place("from");
    let config = BertConfig { encoder: saved.config().clone(), task: model.task?, positions: model.context };
    if ["model.context", "model.task"].iter().any(|key| m.has(key)) {
        return None;
    }
    if let Err(error) = config.validate() {
        m.add(place(), "model", error.to_string());
    }
    match saved.tokenizer().map(|tokenizer| tokenizer.vocabulary()) {
        Err(error) => m.add(place(), "model.from", error.to_string()),
        // A model may have more tokens than its tokenizer, so that matrices have rounder shapes.
        Ok(tokens) if tokens > config.encoder.vocabulary() => {
            let problem =
                format!("its tokenizer has {tokens} tokens, but the model has {}", config.encoder.vocabulary());
            m.add(place(), "model.from", problem);
        }
        Ok(_) => {}
    }
    let mut methods = sparsity.overrides.iter().filter_map(|own| own.method).chain([sparsity.method]);
    let mut violations = BTreeMap::new();
    if methods.any(|method| method.keeps_zeros()) && m.is_empty() {
        for (layer, ..) in config.linear_layers() {
            if layer == "embedding" {
                violations.insert(layer, "it is the embedding, which is read dense".to_owned());
                continue;
            }
            match saved.violation(&layer) {
                Ok(found) => violations.extend(found.map(|found| (layer, found))),
                Err(error) => m.add(place(), "model.from", error.to_string()),
            }
        }
    }
    Some(ModelSource { config: ModelConfig::Bert(config), violations })
}
