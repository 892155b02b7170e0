//! What was measured, in memory and on disk.

use std::{
    collections::HashMap,
    fmt::Debug,
    hash::Hash,
    io::Write,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::{Serialize, de::DeserializeOwned};

/// A choice for a problem.
pub(super) trait Whole: Clone + Serialize + DeserializeOwned {
    type Problem: Copy + Eq + Hash + Debug;

    fn problem(&self) -> Self::Problem;

    /// Whether there is anything to choose: whoever edits a file may have left nothing.
    fn is_whole(&self) -> bool;
}

/// Choices, and the file they are kept in.
#[derive(Debug)]
pub(super) struct Remembered<C: Whole> {
    file: PathBuf,
    choices: Mutex<HashMap<C::Problem, C>>,
}

impl<C: Whole> Remembered<C> {
    /// Those of a file. One that cannot be read is as good as none.
    pub(super) fn read(file: PathBuf) -> Self {
        let found: Vec<C> =
            std::fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        let whole = found.into_iter().filter(C::is_whole).map(|choice| (choice.problem(), choice));
        Self { choices: Mutex::new(whole.collect()), file }
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    pub(super) fn of(&self, problem: C::Problem) -> Option<C> {
        self.lock().get(&problem).cloned()
    }

    /// Remembers a choice, also for the next process, if it can be written: else that one will measure again.
    pub(super) fn keep(&self, choice: C) -> C {
        let mut choices = self.lock();
        choices.insert(choice.problem(), choice.clone());
        let _ = self.write(&choices);
        choice
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<C::Problem, C>> {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes another file and renames it: whoever reads meanwhile reads a whole one.
    fn write(&self, choices: &HashMap<C::Problem, C>) -> std::io::Result<()> {
        let mut choices: Vec<&C> = choices.values().collect();
        choices.sort_by_key(|choice| format!("{:?}", choice.problem()));
        let folder = self.file.parent().unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        serde_json::to_writer_pretty(&mut file, &choices)?;
        file.flush()?;
        file.persist(&self.file)?;
        Ok(())
    }
}
