//! Which engine is fastest: measured once for a device, a library's version and a problem, remembered on disk, and explained.
//!
//! ```no_run
//! # fn main() -> Result<(), twofour_cuda::Error> {
//! use twofour_cuda::{Device, Element, dispatch::Dispatcher, gemm::{Order, Problem, XOrder}};
//! let dispatcher = Dispatcher::open(&Device::open(0)?);
//! let problem = Problem {
//!     element: Element::BF16,
//!     output: Element::BF16,
//!     features: 4096,
//!     tokens: 512,
//!     reduction: 4096,
//!     x: XOrder::TokensFirst,
//!     order: Order::TokensFirst,
//!     epilogue: false,
//! };
//! println!("{}", dispatcher.choose(problem)?);
//! # Ok(()) }
//! ```
//!
//! For four-bit weights, which have methods and no engines, see [`Dispatcher::choose_int4`].

mod int4;
mod remembered;

use std::{fmt, sync::Arc};

use cudarc::driver::CudaStream;
use serde::{Deserialize, Serialize};

pub use int4::{Int4Choice, Int4Measured};
use remembered::{Remembered, Whole};

use crate::{
    Device, Error, Result,
    cache::Cache,
    engine::{Engine, Libraries, Product, Weight, expect_plain},
    gemm::Problem,
    measure::Trial,
};

/// What one engine took at best.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Who, and how.
    pub engine: Engine,
    /// The kernel's name, as far as the engine tells it.
    pub kernel: String,
    /// Median of device time, microseconds.
    pub us: f64,
}

/// What was measured for a problem: each engine at its best, the fastest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    problem: Problem,
    measured: Vec<Measured>,
}

impl Choice {
    /// The problem.
    pub fn problem(&self) -> Problem {
        self.problem
    }

    /// The fastest.
    pub fn best(&self) -> &Measured {
        &self.measured[0]
    }

    /// Each engine at its best, the fastest first.
    pub fn measured(&self) -> &[Measured] {
        &self.measured
    }

    /// What an engine of that name took at best.
    pub fn of(&self, name: &str) -> Option<&Measured> {
        self.measured.iter().find(|measured| measured.engine.name() == name)
    }
}

/// Why the choice fell as it did, in a sentence.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let best = self.best();
        write!(f, "{} ({}), {:.1} us", best.engine.name(), best.kernel, best.us)?;
        for other in &self.measured[1..] {
            let slower = other.us / best.us;
            write!(
                f,
                "; {} ({}), {:.1} us, takes {slower:.2} times as long",
                other.engine.name(),
                other.kernel,
                other.us
            )?;
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
    choices: Remembered<Choice>,
    int4: Remembered<Int4Choice>,
}

impl Whole for Choice {
    type Problem = Problem;

    fn problem(&self) -> Problem {
        self.problem
    }

    fn is_whole(&self) -> bool {
        !self.measured.is_empty()
    }
}

/// Changes when what is remembered does, or how it is measured.
const VERSION: u32 = 5;

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
    /// [`Error::NotCompared`] for a problem with an epilogue or features first, [`Error::NoEngine`]; those of planning and launching.
    pub fn choose(&self, problem: Problem) -> Result<Choice> {
        expect_plain(problem)?;
        if let Some(choice) = self.0.choices.of(problem) {
            return Ok(choice);
        }
        self.choose_by(&Trial::random(&self.0.device, &self.0.libraries, problem)?)
    }

    /// The same, measured with the tensors of a trial if it has to be.
    ///
    /// # Errors
    /// Those of [`Dispatcher::choose`].
    pub fn choose_by(&self, trial: &Trial) -> Result<Choice> {
        let problem = trial.problem();
        expect_plain(problem)?;
        if let Some(choice) = self.0.choices.of(problem) {
            return Ok(choice);
        }
        let mut measured = trial.measure()?;
        if measured.is_empty() {
            return Err(Error::NoEngine { problem });
        }
        measured.sort_by(|a, b| a.us.total_cmp(&b.us));
        Ok(self.0.choices.keep(Choice { problem, measured }))
    }

    /// The product by the fastest engine.
    ///
    /// # Errors
    /// Those of [`Dispatcher::choose`] and [`Product::new`].
    ///
    /// # Safety
    /// That of [`Product::new`].
    pub unsafe fn product(&self, stream: &Arc<CudaStream>, problem: Problem, weight: Weight) -> Result<Product> {
        let engine = self.choose(problem)?.best().engine;
        // SAFETY: the caller's.
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
