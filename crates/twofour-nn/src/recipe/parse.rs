//! From a recipe's text to its settings.

use std::path::{Path, PathBuf};

use super::{
    DataSettings, Mistakes, ModelKind, ModelSettings, Override, Place, Recipe, SparsitySettings, Tokenizer,
    TrainingSettings, check, distillation, encoder,
    sections::{Sections, path_of, read_files, read_validation, refuse},
    start::{self, Start},
};
use crate::settings::{LARGEST, Section, parse, suggestion};

const SECTIONS: [&str; 5] = ["model", "data", "training", "sparsity", "distillation"];

impl Recipe {
    /// Reads a recipe's text, with values replaced by the overrides. Paths in the recipe are relative to `folder`;
    /// those of overrides to the working directory. The model that training starts from and the tokenizer are looked
    /// into, where the recipe names some; text is not.
    ///
    /// # Errors
    /// Every mistake: syntax, unknown keys and names with near misses, values out of range, settings that exclude each
    /// other, layers that the model does not have, a model or a tokenizer that cannot be read or contradicts the
    /// recipe.
    ///
    /// ```
    /// use twofour_nn::recipe::Recipe;
    /// let model = "[model]\nlayers = 2\nwidht = 64\nheads = 4\ncontext = 32\n";
    /// let text = format!("{model}[data]\ntext = 'a.txt'\n[training]\nsteps = 0\n");
    /// let mistakes = Recipe::parse(&text, ".".as_ref(), &[]).unwrap_err();
    /// let lines: Vec<String> = mistakes.iter().map(ToString::to_string).collect();
    /// assert_eq!(lines[0], "line 1: model.width: is missing: width of the residual stream");
    /// assert_eq!(lines[1], "line 3: model.widht: unknown key; did you mean `width`?");
    /// assert_eq!(lines[2], "line 9: training.steps: found 0, expected a whole number from 1 to 1099511627776");
    /// ```
    pub fn parse(text: &str, folder: &Path, overrides: &[Override]) -> Result<Recipe, Mistakes> {
        let ParsedRecipe { recipe, mistakes, .. } = ParsedRecipe::new(text, folder, overrides);
        mistakes.or(recipe)
    }
}

/// A recipe with all that is wrong with it. Where a value is wrong, its default or a small one stands for it.
pub(super) struct ParsedRecipe {
    pub(super) recipe: Recipe,
    pub(super) mistakes: Mistakes,
    /// The place of each path of `data.text`, or of `data.questions`.
    pub(super) text_places: Vec<Place>,
}

impl ParsedRecipe {
    pub(super) fn new(text: &str, folder: &Path, overrides: &[Override]) -> ParsedRecipe {
        let mut mistakes = Mistakes::default();
        let m = &mut mistakes;
        let root = parse(text, overrides, m);
        for (key, node) in &root {
            if !SECTIONS.contains(&key.as_str()) {
                let problem = format!("unknown section; {}", suggestion(key, SECTIONS));
                m.add(node.place.clone(), key.clone(), problem);
            }
        }
        let [model, data, training, sparsity, distillation] = SECTIONS.map(|name| Section::new(&root, name, m));
        let mut sparsity = sparsity;
        let sparsifier = sparsity.table("sparsifier", "sparsity.sparsifier", m);
        let mut overrides = sparsity.tables("override", "sparsity.override", m);
        let tables = overrides.iter_mut().map(|own| own.table("sparsifier", "sparsity.override.sparsifier", m));
        let override_sparsifiers = tables.collect();
        let mut sections =
            Sections { model, data, training, sparsity, distillation, sparsifier, overrides, override_sparsifiers };
        let (from, start) = start::open(&mut sections.model, folder, m);
        let model = match (&start, &from) {
            (Some(Start::Decoder(saved)), Some(from)) => start::sizes(saved, from, &mut sections.model, m),
            (Some(Start::Encoder(saved)), Some(from)) => encoder::sizes(saved, from, &mut sections.model, m),
            _ => read_model(&mut sections.model, from, m),
        };
        let (data, text_places) = match model.kind {
            ModelKind::Vit => (read_images(&mut sections.data, folder, m), vec![]),
            ModelKind::Bert => encoder::read_data(&mut sections.data, &model, folder, m),
            ModelKind::Gpt | ModelKind::Llama => read_text(&mut sections.data, folder, start.as_ref(), m),
        };
        let training = TrainingSettings::read(&mut sections.training, m);
        let Sections { sparsity, sparsifier, overrides, override_sparsifiers, .. } = &mut sections;
        let sparsity = SparsitySettings::read((sparsity, sparsifier), (overrides, override_sparsifiers), m);
        let source = match &start {
            Some(Start::Encoder(saved)) => encoder::source(saved, &model, &sparsity, &sections, m),
            Some(Start::Decoder(saved)) => start::source((&model, &data, &sparsity), Some(saved), &sections, m),
            None => start::source((&model, &data, &sparsity), None, &sections, m),
        };
        let distillation = distillation::read(&mut sections.distillation, folder, m);
        let mut recipe = Recipe { model, data, training, sparsity, distillation, source };
        check::check(&recipe, &sections, m);
        distillation::check(&mut recipe, &sections, m);
        let Sections {
            model, data, training, sparsity, distillation, sparsifier, overrides, override_sparsifiers, ..
        } = sections;
        let all = [model, data, training, sparsity, distillation, sparsifier].into_iter().chain(overrides);
        all.chain(override_sparsifiers).for_each(|section| section.end(m));
        ParsedRecipe { recipe, mistakes, text_places }
    }
}

/// The model of a recipe. One that starts from a model which cannot be opened takes its sizes from there.
fn read_model(s: &mut Section<'_>, from: Option<PathBuf>, m: &mut Mistakes) -> ModelSettings {
    let kind: ModelKind = s.choice("kind", m).unwrap_or_default();
    let is_vit = kind == ModelKind::Vit;
    if kind == ModelKind::Bert {
        return encoder::read_model(s, from, m);
    }
    if is_vit {
        refuse(s, "model", &["context"], "a \"vit\" has none: image and patch decide the number of its tokens", m);
    }
    let mut size = |key, what: Option<&str>| {
        let value = s.integer(key, 1, LARGEST, m).map(|value| value as usize);
        match what.filter(|_| from.is_none()) {
            Some(what) => Some(s.required(key, what, value, 1, m)),
            None => value,
        }
    };
    ModelSettings {
        kind,
        layers: size("layers", Some("number of layers")).unwrap_or(1),
        width: size("width", Some("width of the residual stream")).unwrap_or(1),
        heads: size("heads", Some("heads of attention")).unwrap_or(1),
        kv_heads: size("kv_heads", None),
        context: match kind {
            ModelKind::Vit => 0,
            _ => size("context", Some("the longest sequence, in tokens")).unwrap_or(1),
        },
        feed_forward: size("feed_forward", None),
        image: size("image", is_vit.then_some("height and width of the images, in pixels")).filter(|_| is_vit),
        patch: size("patch", is_vit.then_some("height and width of a patch, in pixels")).filter(|_| is_vit),
        channels: size("channels", None).filter(|_| is_vit),
        classes: size("classes", is_vit.then_some("number of classes")).filter(|_| is_vit),
        pooling: s.choice("pooling", m).filter(|_| is_vit),
        task: None,
        from,
    }
}

/// The images of a vision transformer.
fn read_images(s: &mut Section<'_>, folder: &Path, m: &mut Mistakes) -> DataSettings {
    let mut file = |key, what| {
        let file = s.text(key, m);
        let (file, place) = s.required(key, what, file.map(Some), None, m)?;
        Some(path_of(&file, &place, folder))
    };
    let images = file("images", "an IDX file of images to train on");
    let labels = file("labels", "an IDX file with their classes");
    let why = "a \"vit\" learns from images: give data.images and data.labels";
    refuse(s, "data", &["text", "questions"], why, m);
    // The default is in every recipe that is written.
    if let Some((_, place)) = s.text("tokenizer", m).filter(|(name, _)| name != "bytes") {
        m.add(place, "data.tokenizer", why);
    }
    let validation = read_validation(s, m);
    DataSettings { text: vec![], questions: vec![], images, labels, tokenizer: Tokenizer::Bytes, validation }
}

/// The text of a decoder, with the place of each file.
fn read_text(
    s: &mut Section<'_>,
    folder: &Path,
    start: Option<&Start>,
    m: &mut Mistakes,
) -> (DataSettings, Vec<Place>) {
    refuse(s, "data", &["images", "labels"], "only a \"vit\" has it", m);
    refuse(s, "data", &["questions"], "only a \"bert\" that learns answers has it", m);
    let (text, places) = read_files(s, "text", "text files to train on", folder, m);
    let saved = match start {
        Some(Start::Decoder(saved)) => Some(saved.as_ref()),
        _ => None,
    };
    let settings = DataSettings {
        text,
        questions: vec![],
        images: None,
        labels: None,
        tokenizer: start::tokenizer(s, folder, saved, m),
        validation: read_validation(s, m),
    };
    (settings, places)
}
