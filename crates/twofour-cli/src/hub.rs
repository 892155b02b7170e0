//! Models by their names on the Hugging Face hub.
//!
//! A model is downloaded once into the cache that Python's `huggingface_hub` uses. `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN`
//! and `HF_HUB_OFFLINE` mean what they mean there.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use hf_hub::{
    Cache, Repo, RepoType,
    api::{
        Progress as Download,
        sync::{ApiBuilder, ApiRepo},
    },
};

use twofour_nn::model::{Checkpoint, SavedModel};

use crate::present::{Progress, Screen};

/// A repository of the hub: `OWNER/NAME`, or `OWNER/NAME@REVISION` with a branch, a tag or a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Name {
    repository: String,
    revision: String,
}

impl Name {
    /// The name that a text is, unless it can only be a path.
    fn of(text: &str) -> Option<Self> {
        let (repository, revision) = text.split_once('@').unwrap_or((text, "main"));
        let (owner, name) = repository.split_once('/')?;
        let is_plain = |part: &str| {
            part.starts_with(|c: char| c.is_ascii_alphanumeric())
                && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        };
        let ends = [".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".json", ".toml"];
        let is_file = ends.iter().any(|end| name.ends_with(end));
        let is_name = is_plain(owner) && is_plain(name) && !is_file && is_plain(revision);
        is_name.then(|| Name { repository: repository.into(), revision: revision.into() })
    }

    fn at(&self, revision: &str) -> Repo {
        Repo::with_revision(self.repository.clone(), RepoType::Model, revision.into())
    }
}

/// Whether a model is made of this file of a repository: its configuration, its tokenizer and its safetensors, in the
/// root or, of a model of sentence-transformers, in the folder of a module, as `2_Dense/`; weights of PyTorch where
/// they have no safetensors beside them.
fn is_of_model(file: &str, all: &[&str]) -> bool {
    let is_text = [".json", ".txt", ".model"].iter().any(|end| file.ends_with(end));
    let is_safe = file.ends_with(".safetensors");
    let safe = || all.iter().filter(|other| other.ends_with(".safetensors"));
    let Some((folder, name)) = file.split_once('/') else {
        let is_torch = file.starts_with("pytorch_model") && file.ends_with(".bin");
        return is_text || is_safe || is_torch && safe().all(|other| other.contains('/'));
    };
    let number = folder.split_once('_').map_or("", |(number, _)| number);
    let is_module = all.contains(&"modules.json") && !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    let has_safe = || safe().any(|other| other.starts_with(&format!("{folder}/")));
    is_module && !name.contains('/') && (is_text || is_safe || name.ends_with(".bin") && !has_safe())
}

/// The path of a model on this machine: the path that was given, or of the folder of a training run the checkpoint in
/// it, or, where nothing is there and it can be a name on the hub, the downloaded snapshot.
///
/// # Errors
/// The hub does not answer, or has no such model; the repository has no weights; offline, the model is not in the
/// cache.
pub(crate) fn locate(model: &Path, screen: &Screen) -> Result<PathBuf> {
    let name = match model.to_str().and_then(Name::of) {
        Some(name) if model.symlink_metadata().is_err() => name,
        _ => {
            let inside = model.join(SavedModel::DIRECTORY);
            let is_run = !Checkpoint::is_at(model) && Checkpoint::is_at(&inside);
            return Ok(if is_run { inside } else { model.to_owned() });
        }
    };
    if env::var("HF_HUB_OFFLINE")
        .is_ok_and(|value| matches!(value.to_lowercase().as_str(), "1" | "true" | "yes" | "on"))
    {
        return cached(&name);
    }
    download(&name, screen).with_context(|| {
        format!(
            "{}: nothing is at this path, and it could not be had from the hub; a model that asks for consent requires \
             a token in HF_TOKEN",
            model.display()
        )
    })
}

/// The snapshot that an earlier download left.
fn cached(name: &Name) -> Result<PathBuf> {
    match Cache::from_env().repo(name.at(&name.revision)).get("config.json") {
        Some(config) => Ok(directory_of(&config)),
        None => bail!(
            "{}@{}: nothing is at this path, and the hub's cache has no such model; HF_HUB_OFFLINE is set, so it was \
             not downloaded",
            name.repository,
            name.revision
        ),
    }
}

fn download(name: &Name, screen: &Screen) -> Result<PathBuf> {
    let mut builder = ApiBuilder::from_env();
    if let Ok(token) = env::var("HF_TOKEN") {
        builder = builder.with_token(Some(token));
    }
    let api = builder.build()?;
    let info = api.repo(name.at(&name.revision)).info()?;
    let all: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let files: Vec<&str> = all.iter().copied().filter(|file| is_of_model(file, &all)).collect();
    if !files.iter().any(|file| [".safetensors", ".bin"].iter().any(|end| file.ends_with(end)) && !file.contains('/')) {
        let others: Vec<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).take(8).collect();
        bail!("the repository has no .safetensors and no pytorch_model.bin in its root; it has {}", others.join(", "));
    }
    // All files of one commit, whatever is pushed meanwhile.
    let commit = api.repo(name.at(&info.sha));
    let mut config = None;
    for file in files {
        let path = fetch(&commit, &info.sha, name, file, screen).with_context(|| format!("downloading {file}"))?;
        if file == "config.json" {
            config = Some(path);
        }
    }
    // The branch as of now, by which it is found offline.
    Cache::from_env().repo(name.at(&name.revision)).create_ref(&info.sha)?;
    config.map(|path| directory_of(&path)).context("the repository has no config.json")
}

fn fetch(commit: &ApiRepo, sha: &str, name: &Name, file: &str, screen: &Screen) -> Result<PathBuf> {
    if let Some(path) = Cache::from_env().repo(name.at(sha)).get(file) {
        return Ok(path);
    }
    let shown = Shown { progress: screen.progress(), file: file.to_owned(), done: 0, total: 0 };
    Ok(commit.download_with_progress(file, shown)?)
}

fn directory_of(file: &Path) -> PathBuf {
    file.parent().unwrap_or(Path::new(".")).to_owned()
}

/// The progress of one file.
#[derive(Debug)]
struct Shown {
    progress: Progress,
    file: String,
    done: u64,
    total: u64,
}

impl Download for Shown {
    fn init(&mut self, size: usize, _: &str) {
        self.total = size as u64;
    }

    fn update(&mut self, size: usize) {
        self.done += size as u64;
        self.progress.bytes(&self.file, self.done, self.total);
    }

    fn finish(&mut self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(repository: &str, revision: &str) -> Option<Name> {
        Some(Name { repository: repository.into(), revision: revision.into() })
    }

    #[test]
    fn names_of_the_hub_are_told_from_paths() {
        assert_eq!(Name::of("Qwen/Qwen2.5-0.5B"), name("Qwen/Qwen2.5-0.5B", "main"));
        assert_eq!(Name::of("owner/name@v1.0"), name("owner/name", "v1.0"));
        for path in [
            "model",
            "./a/b",
            "../a/b",
            "/a/b",
            "a/b/c",
            "a/b/",
            "a/model.safetensors",
            "~/a",
            "a/b c",
            "",
            "/",
            "a/",
            "/b",
            "a/b@",
            "a/.b",
        ] {
            assert_eq!(Name::of(path), None, "{path}");
        }
    }

    #[test]
    fn a_model_is_what_the_root_and_its_modules_hold() {
        let dense = [
            "model.safetensors",
            "modules.json",
            "2_Dense/model.safetensors",
            "2_Dense/pytorch_model.bin",
            "3_Dense/pytorch_model.bin",
        ];
        for file in [
            "config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.model",
            "vocab.txt",
            "1_Pooling/config.json",
            "2_Dense/model.safetensors",
            "3_Dense/pytorch_model.bin",
        ] {
            assert!(is_of_model(file, &dense), "{file}");
            assert_eq!(is_of_model(file, &[]), !file.contains('/'), "{file}");
        }
        for file in [
            "onnx/model.safetensors",
            "pytorch_model.bin",
            ".gitattributes",
            "README.md",
            "2_Dense/pytorch_model.bin",
            "0_Transformer/onnx/model.safetensors",
        ] {
            assert!(!is_of_model(file, &dense), "{file}");
        }
        assert!(is_of_model("pytorch_model-00001-of-00002.bin", &["config.json", "onnx/model.safetensors"]));
        assert!(!is_of_model("training_args.bin", &["config.json"]));
    }
}
