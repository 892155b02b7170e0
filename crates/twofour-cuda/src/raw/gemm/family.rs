//! What a kernel family provides, and how its methods are planned and launched.

use std::{
    fmt::{self, Debug},
    sync::Arc,
};

use crate::{
    Architecture, Device, Error, Result, Stream, TileScheduler,
    device::{Kernel, Launch},
    problem::{GemmProblem, Int4Problem},
    source::{Source, Support},
};

use super::{Epilogue, GemmOperands, cost::FamilyTimes, int4::Int4Operands};

/// The problems of a format of weights: [`GemmProblem`] for weights of one element type each, [`Int4Problem`] for int4
/// weights.
pub(super) trait Problem: Copy + Debug + Send + Sync + 'static {
    /// The device pointers of a call.
    type Operands: Copy;
}

impl Problem for GemmProblem {
    type Operands = GemmOperands;
}

impl Problem for Int4Problem {
    type Operands = Int4Operands;
}

/// A kernel family for a format of weights. A value is one of its methods: the tile or shape with which a kernel
/// computes a problem.
///
/// A family is a folder, and a line in [`super::families`].
pub(super) trait KernelFamily<P: Problem>: Copy + Debug + PartialEq + Send + Sync + 'static {
    /// The kernel's name in its source.
    const ENTRY: &'static str;

    /// What the kernels require of an architecture.
    const SUPPORT: Support = Support::ALL;

    /// Whether TMA reads X, whose rows are then multiples of 16 bytes; other kernels read whole steps of the reduction.
    const READS_BY_TMA: bool = false;

    /// The coefficients of [`KernelFamily::cost`].
    const TIMES: &'static [&'static FamilyTimes] = &[];

    /// The kernel's parameter, in its memory layout.
    type Parameters;

    /// Returns the source of every kernel.
    fn sources() -> Vec<Source>;

    /// Returns the methods among which one is chosen for a problem; none for a problem or an architecture that is
    /// another family's.
    fn methods(problem: P, architecture: Architecture) -> Vec<Self>;

    /// Returns the method that balances the work best over the SMs, or `None` for a problem that families further down
    /// in the table compute better. It is for what the model of time has no coefficients for.
    fn preferred(_problem: P, _architecture: Architecture, _sms: u32) -> Option<Self> {
        None
    }

    /// Returns the estimated time of a problem in microseconds, or `None` where there are no coefficients
    /// ([`super::cost`]).
    fn cost(self, _problem: P, _architecture: Architecture) -> Option<f64> {
        None
    }

    /// Returns an error for a problem that the method does not compute.
    fn expect(self, problem: P, architecture: Architecture) -> Result<()> {
        Self::SUPPORT.expect("GEMM by this family of kernels", architecture)?;
        if Self::methods(problem, architecture).contains(&self) { Ok(()) } else { Err(not_computed(self, problem)) }
    }

    /// Returns the launch configuration on a device with so many SMs.
    fn launch(self, problem: P, sms: u32) -> Launch;

    /// Returns the launch configuration for [`TileScheduler::Hardware`], where it is another one.
    fn launch_by_hardware(self, _problem: P) -> Option<Launch> {
        None
    }

    /// Returns the launch configuration for a device that holds so many CTAs of the kernel at once.
    fn resident(self, launch: Launch, _at_once: impl FnOnce() -> Result<u32>) -> Result<Launch> {
        Ok(launch)
    }

    /// Returns whether TMA stores results, which requires an output aligned to 16 bytes.
    fn stores_by_tma(self, _problem: P) -> bool {
        false
    }

    /// Returns the source of the kernel for a problem.
    fn source(self, problem: P) -> Source;

    /// Returns the name of the kernel for a problem, which includes the tile or shape.
    fn kernel(self, problem: P) -> String;

    /// Returns the parameter of a call.
    ///
    /// # Errors
    /// [`Error::Driver`] where the driver rejects a tensor map.
    fn parameters(self, problem: P, operands: P::Operands, epilogue: Epilogue) -> Result<Self::Parameters>;
}

/// A family for a format of weights, in the table.
pub(super) struct Family {
    /// Returns [`KernelFamily::sources`].
    pub(super) sources: fn() -> Vec<Source>,
    /// [`KernelFamily::TIMES`].
    pub(super) times: &'static [&'static FamilyTimes],
}

impl Family {
    /// Returns the entry of a family.
    pub(super) const fn of<P: Problem, F: KernelFamily<P>>() -> Self {
        Self { sources: F::sources, times: F::TIMES }
    }
}

/// Returns the error for a method that does not compute a problem.
pub(super) fn not_computed(method: impl Debug, problem: impl Debug) -> Error {
    Error::Method { method: format!("{method:?}"), problem: format!("{problem:?}") }
}

/// A planned GEMM: its kernel is loaded and its launch configuration is fixed.
pub(super) trait Plan<P: Problem>: Debug + Send + Sync {
    /// Launches the kernel.
    ///
    /// # Errors
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what the problem reads and writes until the stream has passed this call, and nothing
    /// else writes there; the stream is of the plan's device.
    unsafe fn run(&self, stream: Stream, operands: P::Operands, epilogue: Epilogue) -> Result<()>;

    /// Returns the kernel's name, which includes its tile or shape.
    fn kernel(&self) -> String;
}

struct Planned<P, F> {
    problem: P,
    method: F,
    kernel: Kernel,
    launch: Launch,
    by_hardware: Option<Launch>,
}

impl<P: Debug, F: Debug> fmt::Debug for Planned<P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Planned").field("problem", &self.problem).field("method", &self.method).finish()
    }
}

/// A method of any family.
pub(super) trait Method<P: Problem> {
    /// Returns [`KernelFamily::cost`].
    fn cost(&self, problem: P, architecture: Architecture) -> Option<f64>;

    /// Returns [`KernelFamily::launch`] and [`KernelFamily::launch_by_hardware`].
    fn launches(&self, problem: P, sms: u32) -> (Launch, Option<Launch>);

    /// Returns [`KernelFamily::READS_BY_TMA`].
    fn reads_by_tma(&self) -> bool;

    /// Returns [`KernelFamily::stores_by_tma`].
    fn stores_by_tma(&self, problem: P) -> bool;

    /// Loads the kernel, and plans its launch.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Method`], [`Error::Launch`]; those of compiling and loading.
    fn plan(&self, device: &Device, problem: P) -> Result<Arc<dyn Plan<P>>>;
}

impl<P: Problem, F: KernelFamily<P>> Method<P> for F {
    fn cost(&self, problem: P, architecture: Architecture) -> Option<f64> {
        KernelFamily::cost(*self, problem, architecture)
    }

    fn launches(&self, problem: P, sms: u32) -> (Launch, Option<Launch>) {
        (self.launch(problem, sms), self.launch_by_hardware(problem))
    }

    fn reads_by_tma(&self) -> bool {
        F::READS_BY_TMA
    }

    fn stores_by_tma(&self, problem: P) -> bool {
        KernelFamily::stores_by_tma(*self, problem)
    }

    fn plan(&self, device: &Device, problem: P) -> Result<Arc<dyn Plan<P>>> {
        let method = *self;
        method.expect(problem, device.architecture())?;
        let (launch, by_hardware) = self.launches(problem, device.sms());
        launch.expect_within(device.architecture())?;
        let kernel = device.kernel(&method.source(problem), F::ENTRY)?;
        kernel.allow_shared()?;
        let at_once = || Ok(kernel.blocks_per_sm(launch.block, launch.shared)? * device.sms());
        let launch = method.resident(launch, at_once)?;
        Ok(Arc::new(Planned { problem, method, kernel, launch, by_hardware }))
    }
}

impl<P: Problem, F: KernelFamily<P>> Plan<P> for Planned<P, F> {
    unsafe fn run(&self, stream: Stream, operands: P::Operands, epilogue: Epilogue) -> Result<()> {
        let parameters = self.method.parameters(self.problem, operands, epilogue)?;
        let launch = match (self.kernel.device().tile_scheduler(), self.by_hardware) {
            (TileScheduler::Hardware, Some(launch)) => launch,
            _ => self.launch,
        };
        // SAFETY: the structure has the kernel's layout, and pointers and stream are valid as this function requires.
        unsafe { self.kernel.launch(stream, launch, &parameters) }
    }

    fn kernel(&self) -> String {
        self.method.kernel(self.problem)
    }
}
