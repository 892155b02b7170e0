//! The choice of the fastest engine, and its cache.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use super::{Engine, Libraries, Measured, Trial, choice_file::ChoiceFile};
use crate::{
    Device, Error, Result,
    cache::Cache,
    problem::{GemmProblem, Int4Problem},
    raw::gemm::{digest::choice_digest, int4},
};

/// The measurements of a problem: the best time of each engine, or of each kind of methods, fastest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredChoice<P = GemmProblem, How = Engine> {
    pub(super) problem: P,
    pub(super) measured: Vec<Measured<How>>,
}

impl<P: Copy, How> MeasuredChoice<P, How> {
    /// Returns the problem.
    pub fn problem(&self) -> P {
        self.problem
    }

    /// Returns the fastest.
    pub fn best(&self) -> &Measured<How> {
        &self.measured[0]
    }

    /// Returns the best of each engine or kind of methods, fastest first.
    pub fn measured(&self) -> &[Measured<How>] {
        &self.measured
    }
}

impl MeasuredChoice {
    /// Returns the best measurement of the engine with this name.
    pub fn of(&self, name: &str) -> Option<&Measured> {
        self.measured.iter().find(|measured| measured.how.name() == name)
    }
}

/// Writes the reasons of the choice in one sentence.
impl<P: Copy, How> fmt::Display for MeasuredChoice<P, How>
where
    Measured<How>: fmt::Display,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let best = self.best();
        write!(f, "{best}")?;
        for other in &self.measured[1..] {
            write!(f, "; {other}, takes {:.2} times as long", other.us / best.us)?;
        }
        Ok(())
    }
}

/// Chooses the fastest engine for problems on one device. Clones share their cache.
#[derive(Debug, Clone)]
pub struct Dispatcher(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) device: Device,
    libraries: Libraries,
    choices: ChoiceFile<GemmProblem, Engine>,
    pub(super) int4: ChoiceFile<Int4Problem, int4::Int4Method>,
}

/// The version of the cache file's format and of the measurement. Another version of the kernels or of the model has
/// another name, too.
const VERSION: u32 = 18;

impl Dispatcher {
    /// Opens the libraries that are installed, and the choices in the user's cache.
    pub fn open(device: &Device) -> Self {
        Self::with_cache(device, &Cache::of_user())
    }

    /// Opens the libraries that are installed, and the choices in `cache`. A file that cannot be read is ignored.
    pub fn with_cache(device: &Device, cache: &Cache) -> Self {
        let libraries = Libraries::found(device);
        let told = |version: Option<String>| version.unwrap_or_else(|| "none".into());
        let dense = libraries.dense.as_ref().map(|dense| format!("{:?}", dense.version()));
        let sparse = libraries.sparse.as_ref().and_then(|sparse| sparse.version().ok()).map(|v| format!("{v:?}"));
        let name = device.name().unwrap_or_else(|_| "unknown".into());
        let driver = device.driver_version().map(|v| format!("{v:?}")).ok();
        let crate_version = env!("CARGO_PKG_VERSION");
        let (libraries_told, kernels) = ([driver, dense, sparse].map(told).join(" "), choice_digest());
        let what = format!("{name} {libraries_told} {crate_version} v{VERSION} {kernels}");
        let stem: String = what.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect();
        let file = |kind: &str| cache.folder().join(format!("{kind}-{stem}.json"));
        let (choices, int4) = (ChoiceFile::read(file("choices")), ChoiceFile::read(file("int4-choices")));
        Self(Arc::new(Inner { device: device.clone(), libraries, choices, int4 }))
    }

    /// Returns the fastest engine for a problem, from the cache, or measured on random data and then cached. Measuring
    /// takes about a second, and memory for a few copies of the problem's tensors. A problem with an epilogue is
    /// measured with one of its kind: a bias along the result's contiguous axis, scales of features and tokens, GELU.
    ///
    /// # Errors
    /// [`Error::Product`], [`Error::MixedElements`] and [`Error::Dimension`] for a problem that no kernel supports;
    /// [`Error::NoEngine`]; those of planning and launching.
    pub fn choose(&self, problem: GemmProblem) -> Result<MeasuredChoice> {
        if let Some(choice) = self.0.choices.of(problem) {
            return Ok(choice);
        }
        self.choose_by(&Trial::random(&self.0.device, &self.0.libraries, problem)?)
    }

    /// Returns the fastest engine for a trial's problem, from the cache, or measured with the trial's tensors and then
    /// cached.
    ///
    /// # Errors
    /// Those of [`Dispatcher::choose`].
    pub fn choose_by(&self, trial: &Trial) -> Result<MeasuredChoice> {
        let problem = trial.problem();
        self.0.choices.of_or_by(problem, || trial.measure())?.ok_or(Error::NoEngine { problem })
    }

    /// Returns the libraries that are installed.
    pub fn libraries(&self) -> &Libraries {
        &self.0.libraries
    }

    /// Returns the path of the file that caches choices.
    pub fn file(&self) -> &std::path::Path {
        self.0.choices.file()
    }
}
