//! What every suite of GPU kernels has.

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use twofour_cli::{
    device::ComputeDevice,
    exit::Verdict,
    measure::{self, Gpu},
    present::{Screen, progress::Progress, table::Table},
};
use twofour_cuda::Device;

use super::libraries::{Libraries, Versions};
use crate::output::Output;

/// A comparison of kernels, whose options are its fields.
pub(crate) trait Suite: Args {
    /// Its name on the command line.
    const NAME: &'static str;

    /// What the table's figures are.
    const NOTE: &'static str;

    /// Whether NVIDIA's libraries are baselines, so that their versions are recorded and a missing one is told.
    const HAS_LIBRARIES: bool = false;

    /// The figures of one baseline, as the JSON has them.
    type Row: Serialize;

    /// Checks the options before a device is opened.
    ///
    /// # Errors
    /// [`Usage`](twofour_cli::exit::Usage) for those that name nothing that can be measured.
    fn expect_valid(&self) -> Result<()> {
        Ok(())
    }

    /// Measures.
    ///
    /// # Errors
    /// Those of the kernels and of the driver.
    fn measure(&self, bench: &mut Bench<'_>) -> Result<Vec<Self::Row>>;

    /// Returns the table of the rows.
    fn table(rows: &[Self::Row]) -> Table;

    /// Returns the suite's options as one would type them again, each behind a space.
    fn told(&self) -> String;
}

/// What a suite measures with.
pub(crate) struct Bench<'a> {
    /// The device.
    pub(crate) device: &'a Device,
    /// NVIDIA's libraries.
    pub(crate) libraries: &'a Libraries,
    /// Runs of each baseline that count.
    pub(crate) rounds: u32,
    progress: &'a mut Progress,
}

impl Bench<'_> {
    /// Shows what is measured next: `done` of `all`.
    pub(crate) fn begin(&mut self, what: &str, done: usize, all: usize) {
        self.progress.steps(what, done as u64, all as u64);
    }
}

#[derive(Debug, Args)]
pub(crate) struct OnGpu<S: Suite> {
    #[command(flatten)]
    runs: RunOptions,

    // Last, because the help is the doc comment of what is flattened last.
    #[command(flatten)]
    suite: S,
}

/// Where and how often kernels are timed, and the destination of the JSON.
#[derive(Debug, Args)]
pub(super) struct RunOptions {
    #[command(flatten)]
    pub(super) gpu: GpuOption,

    /// Runs of each kernel that count; the suite grid gives long launches fewer
    #[arg(long, default_value_t = 30, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(5..=10_000))]
    pub(super) rounds: u32,

    #[command(flatten)]
    pub(super) output: Output,
}

impl RunOptions {
    /// Returns the command of a suite as one would type it again, without what the suite adds.
    pub(super) fn told(&self, suite: &str) -> String {
        format!("twofour-bench cuda {suite} --device {} --rounds {}", self.gpu.device, self.rounds)
    }
}

#[derive(Debug, Args)]
pub(super) struct GpuOption {
    /// The GPU: cuda, or cuda:NUMBER
    #[arg(long, default_value = "cuda", value_name = "DEVICE", value_parser = number)]
    pub(super) device: usize,
}

/// The number of a GPU, which may stand alone.
fn number(text: &str) -> Result<usize, String> {
    if let Ok(number) = text.parse() {
        return Ok(number);
    }
    match text.parse::<ComputeDevice>()? {
        ComputeDevice::Cuda(numbers) if numbers.len() == 1 => Ok(numbers[0]),
        ComputeDevice::Cuda(_) => Err("kernels are measured on one GPU, as in cuda:0".to_owned()),
        ComputeDevice::Cpu => Err("these are kernels of a GPU; `twofour-bench cpu` measures the CPU".to_owned()),
    }
}

/// The answer; `bench/tables/readme_tables.py` reads its JSON.
#[derive(Debug, Serialize)]
struct Answer<R> {
    machine: Gpu,
    /// Versions of the libraries that were measured too.
    #[serde(skip_serializing_if = "Option::is_none")]
    libraries: Option<Versions>,
    command: String,
    rows: Vec<R>,
}

impl<S: Suite> OnGpu<S> {
    /// Runs the suite.
    pub(super) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        self.suite.expect_valid()?;
        self.runs.output.expect_writable()?;
        let device = Device::open(self.runs.gpu.device)?;
        let libraries = Libraries::open(&device);
        let mut versions = None;
        if S::HAS_LIBRARIES {
            libraries.missing().into_iter().for_each(|missing| screen.warn(missing));
            versions = Some(libraries.versions()?);
        }
        let mut progress = screen.progress();
        let mut bench =
            Bench { device: &device, libraries: &libraries, rounds: self.runs.rounds, progress: &mut progress };
        let rows = self.suite.measure(&mut bench)?;
        drop(progress);
        let command = format!("{}{}", self.runs.told(S::NAME), self.suite.told());
        let answer = Answer { machine: measure::gpu(&device)?, libraries: versions, command, rows };
        let Gpu { gpu, architecture, .. } = &answer.machine;
        screen.line(format!("{gpu}, {architecture}\n"))?;
        screen.line(S::table(&answer.rows))?;
        screen.line(format!("\n{}", S::NOTE))?;
        screen.json(&answer)?;
        self.runs.output.write(&answer)?;
        Ok(Verdict::Yes)
    }
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn a_gpu_is_named_as_elsewhere_or_by_its_number() {
        assert_eq!(["0", "3", "cuda", "cuda:2"].map(number), [Ok(0), Ok(3), Ok(0), Ok(2)]);
        assert!(["cpu", "cuda:0,1", "-1", "gpu", ""].map(number).iter().all(Result::is_err));
    }
}
