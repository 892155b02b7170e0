//! Which engine is fastest: measured once for a device, a library's version and a problem, remembered on disk, and explained.
//!
//! ```no_run
//! # fn main() -> Result<(), twofour_cuda::Error> {
//! use twofour_cuda::{Device, DataType, dispatch::Dispatcher, gemm::{Order, Problem, XOrder}};
//! let dispatcher = Dispatcher::open(&Device::open(0)?);
//! let problem = Problem::plain(DataType::BF16, DataType::BF16, 4096, 512, 4096);
//! println!("{}", dispatcher.choose(problem)?);
//! // The gradient of a weight, added to what is there.
//! let gradient = Problem { x: XOrder::ReductionFirst, order: Order::FeaturesFirst, accumulate: true, ..problem };
//! println!("{}", dispatcher.choose(gradient)?);
//! # Ok(()) }
//! ```
//!
//! For four-bit weights, which have methods and no engines, see [`Dispatcher::choose_int4`].

mod four_bits;
mod remembered;

use std::{fmt, sync::Arc};

use cudarc::driver::CudaStream;
use serde::{Deserialize, Serialize};

pub use four_bits::{Int4Choice, Int4Measured};
use remembered::Remembered;

use crate::{
    Device, Error, Result,
    cache::Cache,
    engine::{Engine, KeptForm, Product, Weight},
    gemm::{GemmProblem, int4},
    libraries::Libraries,
    measure::Trial,
};

pub use crate::measure::Measured;

/// What was measured for a problem: each engine at its best, or each kind of methods, the fastest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MeasuredChoice<P = GemmProblem, How = Engine> {
    problem: P,
    measured: Vec<Measured<How>>,
}

impl<P: Copy, How> MeasuredChoice<P, How> {
    /// The problem.
    pub fn problem(&self) -> P {
        self.problem
    }

    /// The fastest.
    pub fn best(&self) -> &Measured<How> {
        &self.measured[0]
    }

    /// Each at its best, the fastest first.
    pub fn measured(&self) -> &[Measured<How>] {
        &self.measured
    }
}

impl MeasuredChoice {
    /// What an engine of that name took at best.
    pub fn of(&self, name: &str) -> Option<&Measured> {
        self.measured.iter().find(|measured| measured.how.name() == name)
    }
}

/// Why the choice fell as it did, in a sentence.
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

/// Chooses engines on one device. Clones share what they remember.
#[derive(Debug, Clone)]
pub struct Dispatcher(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    device: Device,
    libraries: Libraries,
    choices: Remembered<GemmProblem, Engine>,
    int4: Remembered<int4::Int4Problem, int4::Int4Method>,
}

/// Changes when what is remembered does, or how it is measured.
const VERSION: u32 = 13;

impl Dispatcher {
    /// With the libraries that are there, and what the user's cache remembers of them.
    pub fn open(device: &Device) -> Self {
        Self::with_cache(device, &Cache::of_user())
    }

    /// The same with a cache of the caller's. A file that cannot be read is as good as none.
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

    /// The fastest engine for a problem: remembered, or measured with random data and then remembered. Measuring takes a second or so, and memory for
    /// the problem's tensors and a few more.
    ///
    /// # Errors
    /// [`Error::Product`], [`Error::MixedElements`] and [`Error::Dimension`] for a problem that no kernel takes, [`Error::NoEngine`]; those of planning and launching.
    pub fn choose(&self, problem: GemmProblem) -> Result<MeasuredChoice> {
        if let Some(choice) = self.0.choices.of(problem) {
            return Ok(choice);
        }
        self.choose_by(&Trial::random(&self.0.device, &self.0.libraries, problem)?)
    }

    /// The same, measured with the tensors of a trial if it has to be.
    ///
    /// # Errors
    /// Those of [`Dispatcher::choose`].
    #[doc(hidden)]
    pub fn choose_by(&self, trial: &Trial) -> Result<MeasuredChoice> {
        let problem = trial.problem();
        self.0.choices.of_or_by(problem, || trial.measure())?.ok_or(Error::NoEngine { problem })
    }

    /// The product by the fastest engine that the weight's forms allow, and that needs no other to be kept than `kept` says.
    ///
    /// # Errors
    /// Those of [`Dispatcher::choose`] and [`Product::new`]; [`Error::NoEngineForForm`] where no engine is left.
    ///
    /// # Safety
    /// That of [`Product::new`].
    pub unsafe fn product(
        &self,
        stream: &Arc<CudaStream>,
        problem: GemmProblem,
        weight: Weight,
        kept: KeptForm,
    ) -> Result<Product> {
        let choice = self.choose(problem)?;
        // Other engines read or compress the dense weight.
        let has_form = |engine: Engine| weight.dense.is_some() || matches!(engine, Engine::TwoFour(_));
        let engine = choice.measured().iter().map(|measured| measured.how);
        let engine = engine.into_iter().find(|engine| kept.allows(*engine) && has_form(*engine));
        let engine = engine.ok_or(Error::NoEngineForForm { problem, dense: kept == KeptForm::Dense })?;
        // SAFETY: the weight is valid and 2:4, and read as long as this function requires.
        unsafe { Product::new(&self.0.device, &self.0.libraries, stream, problem, engine, weight) }
    }

    /// The libraries that are there.
    pub fn libraries(&self) -> &Libraries {
        &self.0.libraries
    }

    /// The file that choices are remembered in.
    pub fn file(&self) -> &std::path::Path {
        self.0.choices.file()
    }
}
