//! What a recipe takes from a model on disk, and from a tokenizer's file.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use twofour::layer::MaskRule;

use super::{
    DataSettings, Mistakes, ModelConfig, ModelKind, ModelSettings, Place, Recipe, SparsitySettings, Tokenizer,
    sections::{Sections, VISION_KEYS, path_of},
};
use crate::{
    Result,
    model::{self, AttentionConfig, EncoderCheckpoint, SavedModel, TransformerConfig, expect_trainable},
    settings::{LARGEST, Section, name_of, suggestion},
};

/// What the files say that a recipe names for its model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSource {
    /// The model, with the recipe's context.
    pub config: ModelConfig,
    /// The linear layers of the model that training starts from whose weights are not 2:4, with the first group that is
    /// not. Looked up only where a method keeps zeros.
    pub violations: BTreeMap<String, String>,
}

/// The context where training starts from a model of a longer one and the recipe gives none.
const CONTEXT: usize = 1024;

impl Recipe {
    /// The description of a decoder.
    pub fn decoder(&self) -> TransformerConfig {
        match self.source.as_ref().map(|source| &source.config) {
            Some(ModelConfig::Decoder(config)) => config.clone(),
            _ => TransformerConfig::from(&self.model),
        }
    }

    /// Opens the decoder that training starts from, where there is one.
    ///
    /// # Errors
    /// Those of [`SavedModel::open`].
    pub fn saved_model(&self) -> Result<Option<SavedModel>> {
        self.model.from.as_ref().filter(|_| self.model.kind != ModelKind::Bert).map(SavedModel::open).transpose()
    }

    /// Reads the tokenizer.
    ///
    /// # Errors
    /// Those of [`model::Tokenizer::read`], [`SavedModel::open`] and [`EncoderCheckpoint::open`].
    pub fn text_tokenizer(&self) -> Result<model::Tokenizer> {
        if let Some(saved) = self.saved_encoder()? {
            return saved.tokenizer();
        }
        match (&self.data.tokenizer, self.saved_model()?) {
            (Tokenizer::File(path), _) => model::Tokenizer::read(path),
            (Tokenizer::Checkpoint, Some(saved)) => saved.tokenizer(),
            (Tokenizer::Bytes | Tokenizer::Checkpoint, _) => Ok(model::Tokenizer::Bytes),
        }
    }

    /// Whether the zeros of the model that training starts from are kept, in the layers that the section's method is
    /// for.
    pub(super) fn keeps_zeros(&self) -> bool {
        self.model.from.is_some() && self.sparsity.method.keeps_zeros()
    }

    /// The section of sparsity with its layers, where they follow from the zeros of the model that training starts
    /// from.
    pub(super) fn sparsity_of_layers(&self) -> Cow<'_, SparsitySettings> {
        match &self.source {
            Some(source) if self.keeps_zeros() && self.sparsity.layers.is_none() => {
                let layers = source.config.linear_layers().into_iter().map(|(name, ..)| name);
                let is_two_of_four = |name: &String| !source.violations.contains_key(name);
                let layers = Some(layers.filter(is_two_of_four).collect());
                Cow::Owned(SparsitySettings { layers, ..self.sparsity.clone() })
            }
            _ => Cow::Borrowed(&self.sparsity),
        }
    }
}

/// A model that training starts from.
pub(super) enum Start {
    Decoder(Box<SavedModel>),
    Encoder(Box<EncoderCheckpoint>),
}

impl Start {
    fn open(path: &Path) -> Result<Self> {
        if EncoderCheckpoint::is_at(SavedModel::locate(path)) {
            return Ok(Start::Encoder(Box::new(EncoderCheckpoint::open(SavedModel::locate(path))?)));
        }
        Ok(Start::Decoder(Box::new(SavedModel::open(path)?)))
    }
}

/// What a model that training starts from decides: its sizes.
const SIZES: &[&str] = &["kind", "layers", "width", "heads", "kv_heads", "feed_forward"];

/// The model that training starts from, if one is named and can be opened. One that an override names has its own sizes
/// in the place of those of the recipe's file.
pub(super) fn open(s: &mut Section<'_>, folder: &Path, m: &mut Mistakes) -> (Option<PathBuf>, Option<Start>) {
    let Some((text, place)) = s.text("from", m) else { return (None, None) };
    let path = path_of(&text, &place, folder);
    match Start::open(&path) {
        Ok(start) => {
            if place == Place::Override {
                s.ignore_in_file(SIZES);
            }
            (Some(path), Some(start))
        }
        Err(error) => {
            m.add(place, "model.from", error.to_string());
            (Some(path), None)
        }
    }
}

/// The sizes of a model that training starts from; those that the recipe gives must be the same, but for a shorter
/// context.
pub(super) fn sizes(saved: &SavedModel, from: &Path, s: &mut Section<'_>, m: &mut Mistakes) -> ModelSettings {
    let config = saved.config();
    let kind = if config.feed_forward.gated { ModelKind::Llama } else { ModelKind::Gpt };
    if let Some(given) = s.choice::<ModelKind>("kind", m).filter(|given| *given != kind) {
        let problem = format!(
            "found \"{}\", but {} is a \"{}\"; leave the key out",
            name_of(given),
            from.display(),
            name_of(kind)
        );
        m.add(s.place("kind"), "model.kind", problem);
    }
    let TransformerConfig { layers, width, .. } = *config;
    let AttentionConfig { heads, kv_heads, .. } = config.attention;
    let feed_forward = config.feed_forward.hidden;
    for (key, own) in
        [("layers", layers), ("width", width), ("heads", heads), ("kv_heads", kv_heads), ("feed_forward", feed_forward)]
    {
        if let Some(given) = s.integer(key, 1, LARGEST, m).filter(|given| *given != own as u64) {
            let problem = format!("found {given}, but {} has {own}; leave the key out", from.display());
            m.add(s.place(key), format!("model.{key}"), problem);
        }
    }
    // Only a vision transformer or an encoder has them, as the check of all settings says.
    for key in VISION_KEYS.into_iter().chain(["task"]) {
        s.skip(key);
    }
    let context = s.integer("context", 1, LARGEST, m).map_or(config.context().min(CONTEXT), |given| given as usize);
    if context > config.context() {
        let problem = format!("found {context}, but that of {} is {}", from.display(), config.context());
        m.add(s.place("context"), "model.context", problem);
    }
    ModelSettings {
        from: Some(from.to_owned()),
        kind,
        layers,
        width,
        heads,
        kv_heads: (kind == ModelKind::Llama).then_some(kv_heads),
        context,
        feed_forward: Some(feed_forward),
        ..Default::default()
    }
}

/// The tokenizer that a recipe names, or else that of the checkpoint which training starts from, or bytes.
pub(super) fn tokenizer(s: &mut Section<'_>, folder: &Path, saved: Option<&SavedModel>, m: &mut Mistakes) -> Tokenizer {
    let Some((text, place)) = s.text("tokenizer", m) else {
        return match saved.and_then(SavedModel::checkpoint) {
            Some(_) => Tokenizer::Checkpoint,
            None => Tokenizer::Bytes,
        };
    };
    match Tokenizer::from(text) {
        Tokenizer::File(path) => {
            let text = path.to_string_lossy();
            if path.extension().is_none_or(|extension| extension != "json") {
                let hint = suggestion(&text, Tokenizer::NAMES);
                let problem = match hint.ends_with('?') {
                    true => format!("found {text:?}; {hint} It may also be the path of a tokenizer.json"),
                    false => format!("found {text:?}; {hint}, or the path of a tokenizer.json"),
                };
                m.add(place.clone(), "data.tokenizer", problem);
            }
            Tokenizer::File(path_of(&text, &place, folder))
        }
        named => named,
    }
}

/// What the files say, checked against the recipe.
pub(super) fn source(
    (model, data, sparsity): (&ModelSettings, &DataSettings, &SparsitySettings),
    saved: Option<&SavedModel>,
    sections: &Sections<'_>,
    m: &mut Mistakes,
) -> Option<ModelSource> {
    let vocabulary = vocabulary(model, data, saved, sections, m);
    let Some(saved) = saved else {
        let config = TransformerConfig::from(model).with_vocabulary(vocabulary?);
        return Some(ModelSource { config: ModelConfig::Decoder(config), violations: BTreeMap::new() });
    };
    let config = saved.config().clone().with_context(model.context);
    let place = || sections.model.place("from");
    if let Err(error) = expect_trainable(&config) {
        m.add(place(), "model.from", error.to_string());
    }
    let mut methods = sparsity.overrides.iter().filter_map(|own| own.method).chain([sparsity.method]);
    let mut violations = BTreeMap::new();
    if methods.any(|method| method.keeps_zeros()) && m.is_empty() {
        for (layer, ..) in config.linear_layers() {
            match saved.violation(&layer) {
                Ok(found) => violations.extend(found.map(|found| (layer, found))),
                Err(error) => m.add(place(), "model.from", error.to_string()),
            }
        }
        if config.is_tied() {
            violations.insert("head".to_owned(), "it is the embedding, too, which is read dense".to_owned());
        }
    }
    Some(ModelSource { config: ModelConfig::Decoder(config), violations })
}

/// The number of tokens of the recipe's tokenizer, where the model's follows from it.
fn vocabulary(
    model: &ModelSettings,
    data: &DataSettings,
    saved: Option<&SavedModel>,
    sections: &Sections<'_>,
    m: &mut Mistakes,
) -> Option<usize> {
    if m.has("data.tokenizer") || m.has("model.from") {
        return None;
    }
    let place = sections.data.place("tokenizer");
    let tokenizer = match (&data.tokenizer, saved) {
        (Tokenizer::Bytes, None) => return None,
        (Tokenizer::Bytes, Some(_)) => Ok(model::Tokenizer::Bytes),
        (Tokenizer::Checkpoint, Some(saved)) if saved.checkpoint().is_some() => saved.tokenizer(),
        (Tokenizer::Checkpoint, _) => {
            let problem =
                "found \"checkpoint\", which requires model.from to be a directory with config.json and tokenizer.json";
            m.add(place, "data.tokenizer", problem);
            return None;
        }
        (Tokenizer::File(_), None) if model.kind == ModelKind::Gpt => {
            let problem = "found a tokenizer's file, but a model of kind \"gpt\" is over bytes; use the kind \"llama\"";
            m.add(place, "data.tokenizer", problem);
            return None;
        }
        (Tokenizer::File(path), _) => model::Tokenizer::read(path),
    };
    let (tokenizer, own) = match tokenizer {
        Ok(tokenizer) => (tokenizer.vocabulary(), saved.map(|saved| saved.config().vocabulary())),
        Err(error) => {
            m.add(place, "data.tokenizer", error.to_string());
            return None;
        }
    };
    // A model may have more tokens than its tokenizer, so that matrices have rounder shapes.
    let fits = |own| if data.tokenizer == Tokenizer::Bytes { tokenizer == own } else { tokenizer <= own };
    if let Some(own) = own.filter(|own| !fits(*own)) {
        let name = String::from(data.tokenizer.clone());
        m.add(place, "data.tokenizer", format!("{name:?} has {tokenizer} tokens, but the model has {own}"));
    }
    Some(tokenizer)
}

/// Notes settings that contradict zeros which are kept: layers that have none, another rule of masks, a part of the run
/// without them.
pub(super) fn check_zeros(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let (Some(source), Some(from)) = (&recipe.source, &recipe.model.from) else { return };
    let settings = recipe.sparsity_of_layers();
    let names: Vec<String> = source.config.linear_layers().into_iter().map(|(name, ..)| name).collect();
    let matching = |patterns: &[String]| -> Vec<&String> {
        let globs = super::layers::globs(patterns);
        names.iter().filter(|name| globs.iter().any(|glob| glob.is_match(name))).collect()
    };
    let overridden: Vec<&String> = settings.overrides.iter().flat_map(|own| matching(&own.layers)).collect();
    let own = [(settings.clone().into_owned(), &sections.sparsity, "sparsity")];
    let overrides = settings.overrides.iter().zip(&sections.overrides);
    let overrides = overrides.map(|(own, section)| (own.over(&settings), section, "sparsity.override"));
    for (part, section, name) in own.into_iter().chain(overrides).filter(|(part, ..)| part.method.keeps_zeros()) {
        let mut layers = matching(part.layers.as_deref().unwrap_or_default());
        if name == "sparsity" {
            layers.retain(|layer| !overridden.contains(layer));
        }
        let wrong: Vec<_> = layers.iter().filter_map(|layer| source.violations.get_key_value(*layer)).collect();
        let key = |key: &str| format!("{name}.{key}");
        if let Some((layer, why)) = wrong.first() {
            let others = match wrong.len() {
                1 => String::new(),
                count => format!(" (and {} more)", count - 1),
            };
            let problem = format!(
                "\"{layer}\"{others} is not 2:4 in {}, whose zeros the method \"{}\" keeps: {why}; leave it out, or \
                 prune the model first: twofour prune",
                from.display(),
                part.method.name()
            );
            m.add(section.place("layers"), key("layers"), problem);
        } else if layers.is_empty() && name == "sparsity" && settings.overrides.is_empty() {
            let problem = format!(
                "found \"{}\", which keeps the zeros of {}, but no linear layer is 2:4 there; prune it first: twofour \
                 prune",
                part.method.name(),
                from.display()
            );
            m.add(section.place("method"), key("method"), problem);
        }
        if part.mask.is_some_and(|mask| mask != MaskRule::Magnitude) {
            let problem = "the mask is that of the zeros of the model that training starts from";
            m.add(section.place("mask"), key("mask"), problem);
        }
        if part.begin.is_some_and(|begin| begin > 0.0) {
            let problem = "zeros are kept from the first step on";
            m.add(section.place("begin"), key("begin"), problem);
        }
    }
}

/// Notes trial runs of a run that starts from a model.
pub(super) fn check_trials(recipe: &Recipe, sections: &Sections<'_>, m: &mut Mistakes) {
    let searches = recipe.sparsity.decay.is_some_and(|decay| decay.strength().is_none());
    if recipe.model.from.is_some() && searches {
        let problem = "found \"auto\", whose trial runs begin with random weights; with model.from, give a number";
        m.add(sections.sparsity.place("decay"), "sparsity.decay", problem);
    }
}
