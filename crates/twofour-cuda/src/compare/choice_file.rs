//! Measured choices, in memory and on disk.

use std::{
    collections::HashMap,
    fmt::Debug,
    hash::Hash,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use serde::{Serialize, de::DeserializeOwned};
use twofour::file::{Overwrite, write_whole};

use super::{Measured, MeasuredChoice};
use crate::{Error, Result};

/// Choices, and the file that caches them.
#[derive(Debug)]
pub(super) struct ChoiceFile<P, How> {
    file: PathBuf,
    choices: Mutex<HashMap<P, MeasuredChoice<P, How>>>,
}

impl<P, How> ChoiceFile<P, How>
where
    P: Copy + Eq + Hash + Debug + Serialize + DeserializeOwned,
    How: Clone + Serialize + DeserializeOwned,
{
    /// Reads the choices of a file. A file that cannot be read is ignored.
    pub(super) fn read(file: PathBuf) -> Self {
        let found: Vec<MeasuredChoice<P, How>> =
            std::fs::read(&file).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        // A file edited by hand may hold an empty choice.
        let whole = found.into_iter().filter(|choice| !choice.measured.is_empty());
        let choices = whole.map(|choice| (choice.problem, choice)).collect();
        Self { choices: Mutex::new(choices), file }
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    pub(super) fn of(&self, problem: P) -> Option<MeasuredChoice<P, How>> {
        self.lock().get(&problem).cloned()
    }

    /// Returns the cached choice, or else measures and caches it. Returns `None` where `measure` returns no times.
    pub(super) fn of_or_by(
        &self,
        problem: P,
        measure: impl FnOnce() -> Result<Vec<Measured<How>>>,
    ) -> Result<Option<MeasuredChoice<P, How>>> {
        if let Some(choice) = self.of(problem) {
            return Ok(Some(choice));
        }
        let mut measured = measure()?;
        if measured.is_empty() {
            return Ok(None);
        }
        measured.sort_by(|a, b| a.us.total_cmp(&b.us));
        let choice = MeasuredChoice { problem, measured };
        let mut choices = self.lock();
        choices.insert(problem, choice.clone());
        // If the file cannot be written, the next process measures again.
        let _ = self.write(&choices);
        Ok(Some(choice))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<P, MeasuredChoice<P, How>>> {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes the file in one step, so that concurrent readers see a complete one.
    fn write(&self, choices: &HashMap<P, MeasuredChoice<P, How>>) -> Result<()> {
        let mut choices: Vec<_> = choices.values().collect();
        choices.sort_by_key(|choice| format!("{:?}", choice.problem));
        let folder = self.file.parent().unwrap_or(Path::new("."));
        let failed = |action| move |source| Error::Io { path: folder.to_owned(), action, source };
        std::fs::create_dir_all(folder).map_err(failed("creating"))?;
        let text = serde_json::to_vec_pretty(&choices).map_err(|error| failed("writing JSON to it")(error.into()))?;
        Ok(write_whole(&self.file, Overwrite::Yes, &text)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(how: u8, us: f64) -> Measured<u8> {
        Measured { how, kernel: format!("kernel {how}"), us }
    }

    #[test]
    fn what_was_measured_once_is_remembered_here_and_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("below").join("choices.json");
        let remembered = ChoiceFile::<u32, u8>::read(file.clone());
        // A JSON parser that is inexact in the last place reads the first of these times as another number.
        let choice =
            remembered.of_or_by(7, || Ok(vec![measured(1, 51.231998950242996), measured(2, 1.0)])).unwrap().unwrap();
        assert_eq!((choice.best().how, choice.measured().len()), (2, 2));
        let again = |remembered: &ChoiceFile<u32, u8>| remembered.of_or_by(7, || panic!("measured twice")).unwrap();
        assert_eq!(again(&remembered), Some(choice.clone()));
        assert_eq!(again(&ChoiceFile::read(file.clone())), Some(choice));
        assert_eq!(remembered.of_or_by(8, || Ok(Vec::new())).unwrap(), None);

        // A damaged file is ignored, and so is an empty choice.
        for text in ["[{", r#"[{"problem": 7, "measured": []}]"#] {
            std::fs::write(&file, text).unwrap();
            assert_eq!(ChoiceFile::<u32, u8>::read(file.clone()).of(7), None, "{text}");
        }
    }
}
