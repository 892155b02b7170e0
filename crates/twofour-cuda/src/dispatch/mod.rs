//! Choosing the fastest engine. A choice is measured once per device, library version and problem, and cached on disk; it can be printed with its reasons.
//!
//! ```no_run
//! # fn main() -> Result<(), twofour_cuda::Error> {
//! use twofour_cuda::{Device, DataType, dispatch::Dispatcher, problem::{GemmProblem, Order, XOrder}};
//! let dispatcher = Dispatcher::open(&Device::open(0)?);
//! let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, 4096, 512, 4096);
//! println!("{}", dispatcher.choose(problem)?);
//! // The weight gradient, accumulated into the output.
//! let gradient = GemmProblem { x: XOrder::ReductionFirst, order: Order::FeaturesFirst, accumulate: true, ..problem };
//! println!("{}", dispatcher.choose(gradient)?);
//! # Ok(()) }
//! ```
//!
//! For int4 weights, which have methods but no engines, see [`Dispatcher::choose_int4`].

mod four_bits;
mod remembered;

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

pub use four_bits::{Int4Choice, Int4Measured};
use remembered::Remembered;

use crate::{
    Device, Error, Result,
    cache::Cache,
    libraries::Libraries,
    measure::Trial,
    problem::{GemmProblem, Int4Problem},
    raw::{engine::Engine, gemm::int4},
};

pub use crate::measure::Measured;

/// The measurements of a problem: the best time of each engine, or of each kind of methods, fastest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredChoice<P = GemmProblem, How = Engine> {
    problem: P,
    measured: Vec<Measured<How>>,
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
pub struct Dispatcher(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Device,
    libraries: Libraries,
    choices: Remembered<GemmProblem, Engine>,
    int4: Remembered<Int4Problem, int4::Int4Method>,
}

/// The version of the cache file: it must change when the format, the measurement or the time of a kernel changes.
const VERSION: u32 = 17;

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
        let what = format!("{name} {} {} {} {crate_version} v{VERSION}", told(driver), told(dense), told(sparse));
        let stem: String = what.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).collect();
        let file = |kind: &str| cache.folder().join(format!("{kind}-{stem}.json"));
        let (choices, int4) = (Remembered::read(file("choices")), Remembered::read(file("int4-choices")));
        Self(Arc::new(Inner { device: device.clone(), libraries, choices, int4 }))
    }

    /// Returns the fastest engine for a problem, from the cache, or measured on random data and then cached. Measuring takes about a second, and
    /// memory for a few copies of the problem's tensors. A problem with an epilogue is measured with one of its kind: a bias along the result's contiguous axis, scales of
    /// features and tokens, GELU.
    ///
    /// # Errors
    /// [`Error::Product`], [`Error::MixedElements`] and [`Error::Dimension`] for a problem that no kernel supports; [`Error::NoEngine`]; those of
    /// planning and launching.
    pub fn choose(&self, problem: GemmProblem) -> Result<MeasuredChoice> {
        if let Some(choice) = self.0.choices.of(problem) {
            return Ok(choice);
        }
        self.choose_by(&Trial::random(&self.0.device, &self.0.libraries, problem)?)
    }

    /// Returns the fastest engine for a trial's problem, from the cache, or measured with the trial's tensors and then cached.
    ///
    /// # Errors
    /// Those of [`Dispatcher::choose`].
    #[doc(hidden)]
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
