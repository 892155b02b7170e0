//! The folder of a training run.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File, OpenOptions, TryLockError},
    io::{ErrorKind, Read, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde_json::Value;
use twofour::file::{Overwrite, expect_replaceable, write_whole};
use twofour_nn::{
    model::SavedModel,
    recipe::{Recipe, Tokenizer},
};

use super::{decay, outcome, run, tokens};
use crate::exit::{Usage, UsageList};

/// The recipe of the run, by which its folder is recognized.
const RECIPE: &str = "recipe.toml";

/// The file that the process which trains in the folder holds locked, with its number.
const LOCK: &str = "lock";

/// What the run writes there.
const WRITTEN: [&str; 7] =
    [RECIPE, run::METRICS, run::REPORT, run::PICTURE, decay::FILE, outcome::MODEL, SavedModel::DIRECTORY];

/// A folder that this process trains in. Others are refused while this lives, and no longer, however the process ends.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    _lock: File,
}

impl Folder {
    /// Opens a folder that is missing, empty, or holds a run, and locks it.
    ///
    /// # Errors
    /// [`Usage`] for a folder with anything else in it, a path that is not a folder, or one in which another process
    /// trains. None is changed.
    pub(super) fn open(path: &Path) -> Result<Folder> {
        let at = || path.display().to_string();
        match fs::read_dir(path) {
            Ok(entries) => {
                let names: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.file_name())).collect();
                // Text is encoded before the recipe is written.
                let is_locked = names.iter().any(|name| name == LOCK);
                let is_own = |name: &OsStr| is_trace(name) || is_locked && name == tokens::FILE;
                if names.iter().any(|name| !is_own(name)) && fs::symlink_metadata(path.join(RECIPE)).is_err() {
                    bail!(Usage(format!(
                        "{}: is not empty and holds no training run; nothing was changed, choose another folder with \
                         -o",
                        path.display()
                    )));
                }
            }
            Err(e) if e.kind() == ErrorKind::NotFound => fs::create_dir_all(path).with_context(at)?,
            Err(e) if e.kind() == ErrorKind::NotADirectory => {
                bail!(Usage(format!("{}: is a file, not a folder; choose another with -o", path.display())))
            }
            Err(e) => return Err(e).with_context(at),
        }
        let folder = Folder { path: path.to_owned(), _lock: lock(path)? };
        // At the end of a long run it would be late.
        for name in WRITTEN {
            let path = folder.file(name);
            if !path.is_dir() || path.is_symlink() {
                expect_replaceable(&path, Overwrite::Yes)?;
            }
        }
        Ok(folder)
    }

    /// The path of a file or folder in the run's folder.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that a run in the folder has the same recipe. Nothing is changed.
    ///
    /// # Errors
    /// [`Usage`] with the keys that differ.
    pub(super) fn expect_same(&self, recipe: &Recipe) -> Result<()> {
        let Some(text) = self.recipe()? else { return Ok(()) };
        let path = self.file(RECIPE);
        let own = Recipe::parse(&text, Path::new(""), &[]).map_err(|mistakes| {
            let what = format!("{}: changed by hand, or of another version of twofour", path.display());
            UsageList::of_mistakes(what, &mistakes)
        })?;
        let differing = differences(&own, &absolute(recipe)?)?;
        // A recipe that nothing was done by is no run.
        if differing.is_empty() || !self.has_begun() && is_as_written(&own, &text)? {
            return Ok(());
        }
        bail!(UsageList {
            heading: format!(
                "{} is the recipe of another run; choose another folder with -o, or make these the same:",
                path.display()
            ),
            items: differing,
        })
    }

    /// Makes the folder that of the recipe, which [`Folder::expect_same`] has let pass: writes it, unless the folder
    /// has a checkpoint to go on from, or a file by somebody else that says the same.
    ///
    /// # Errors
    /// Those of the file system.
    pub(super) fn adopt(&self, recipe: &Recipe) -> Result<()> {
        let new = toml::to_string(&absolute(recipe)?).context("writing the recipe")?;
        if let Some(text) = self.recipe()? {
            let own = Recipe::parse(&text, Path::new(""), &[])?;
            if text == new || self.has_checkpoint() || !is_as_written(&own, &text)? {
                return Ok(());
            }
        }
        self.write(RECIPE, new.as_bytes())
    }

    /// The text of the folder's recipe, where it has one.
    fn recipe(&self) -> Result<Option<String>> {
        let path = self.file(RECIPE);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e).with_context(|| path.display().to_string()),
        }
    }

    fn has_checkpoint(&self) -> bool {
        !run::checkpoints(&self.path).is_empty()
    }

    /// Whether steps or trial runs were done in the folder.
    fn has_begun(&self) -> bool {
        let has_steps = fs::metadata(self.file(run::METRICS)).is_ok_and(|file| file.len() > 0);
        has_steps || self.has_checkpoint() || self.file(decay::FILE).exists()
    }

    /// Writes a file atomically.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        Ok(write_whole(self.file(name), Overwrite::Yes, bytes)?)
    }

    /// Writes JSON atomically.
    pub(super) fn write_json(&self, name: &str, value: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(value).with_context(|| format!("writing {name}"))?;
        text.push(b'\n');
        self.write(name, &text)
    }
}

/// Whether a process that was killed before it wrote the recipe leaves a file of this name.
fn is_trace(name: &OsStr) -> bool {
    let name = name.to_string_lossy();
    name == LOCK || name.starts_with('.') && name.ends_with(".tmp")
}

fn lock(folder: &Path) -> Result<File> {
    let path = folder.join(LOCK);
    let at = || path.display().to_string();
    expect_replaceable(&path, Overwrite::Yes)?;
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).with_context(at)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            file.read_to_string(&mut holder).with_context(at)?;
            bail!(Usage(format!(
                "{}: process {} trains in this folder; wait for it, stop it, or choose another folder with -o",
                folder.display(),
                holder.trim()
            )));
        }
        Err(TryLockError::Error(error)) => return Err(error).with_context(at),
    }
    file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id())).with_context(at)?;
    Ok(file)
}

/// Whether a recipe's text is as this program writes it, and so not somebody's own file.
fn is_as_written(recipe: &Recipe, text: &str) -> Result<bool> {
    Ok(toml::to_string(recipe).context("comparing recipes")? == text)
}

/// The recipe with paths that hold wherever the copy is read.
fn absolute(recipe: &Recipe) -> Result<Recipe> {
    let mut recipe = recipe.clone();
    let tokenizer = match &mut recipe.data.tokenizer {
        Tokenizer::File(path) => Some(path),
        _ => None,
    };
    let images = recipe.data.images.iter_mut().chain(&mut recipe.data.labels);
    let texts = recipe.data.text.iter_mut().chain(&mut recipe.data.questions);
    let teacher = recipe.distillation.as_mut().map(|own| &mut own.teacher);
    for path in texts.chain(images).chain(tokenizer).chain(&mut recipe.model.from).chain(teacher) {
        *path = std::path::absolute(&path).with_context(|| path.display().to_string())?;
    }
    Ok(recipe)
}

/// The keys of a recipe's data.
const DATA_FILES: [&str; 4] = ["data.text", "data.questions", "data.images", "data.labels"];

/// The keys in which two recipes differ, with both values. Text, questions and images are not compared by their paths
/// but by their bytes, which the checkpoint knows.
fn differences(own: &Recipe, given: &Recipe) -> Result<Vec<String>> {
    let [own, given] = [own, given].map(|recipe| -> Result<BTreeMap<String, Value>> {
        let mut flat = BTreeMap::new();
        flatten(String::new(), serde_json::to_value(recipe).context("comparing recipes")?, &mut flat);
        flat.retain(|key, value| !DATA_FILES.iter().any(|name| key.starts_with(name)) && !value.is_null());
        Ok(flat)
    });
    let (own, given) = (own?, given?);
    let keys: std::collections::BTreeSet<&String> = own.keys().chain(given.keys()).collect();
    let word = |value: Option<&Value>| value.map_or("absent".to_owned(), Value::to_string);
    let differing = keys.into_iter().filter(|key| own.get(*key) != given.get(*key));
    Ok(differing.map(|key| format!("{key}: {} there, {} here", word(own.get(key)), word(given.get(key)))).collect())
}

fn flatten(path: String, value: Value, into: &mut BTreeMap<String, Value>) {
    match value {
        Value::Object(entries) => {
            for (key, value) in entries {
                let path = if path.is_empty() { key } else { format!("{path}.{key}") };
                flatten(path, value, into);
            }
        }
        value => {
            into.insert(path, value);
        }
    }
}
