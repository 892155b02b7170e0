//! The suite `sweep`: every method of the GEMM on a grid, to fit the cost model and to see which methods win nowhere.

use std::{
    collections::HashSet,
    fs::{self, OpenOptions},
    io::Write,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Args;
use rayon::prelude::*;
use serde_json::{Value, json};
use twofour_cli::{
    exit::{Usage, Verdict},
    interrupt,
    measure::Shape,
    present::{Screen, units},
};
use twofour_cuda::{
    DataType, Device,
    compare::{Engine, Libraries, Timer, Trial},
    problem::GemmProblem,
    raw::gemm::{Gemm, GemmMethod},
};

use super::{grid::GridEpilogue, suite::GpuOption};

/// Rounds of a case.
const ROUNDS: u32 = 5;

/// cuBLASLt's first algorithms of a case.
const DENSE: usize = 4;

/// Time every method of the GEMM on a grid of shapes
///
/// Writes one JSON object a line: the case, and each kernel's name and microseconds, beside cuBLASLt's first
/// algorithms. A later run with the same FILE appends what is missing there.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  twofour-bench cuda sweep sweep.jsonl --shape 4096x14336 --tokens 1,64,512 --dtype bf16,i8")]
pub(crate) struct Sweep {
    /// The file of the results
    file: PathBuf,

    /// Output by input features of a weight; may be repeated
    #[arg(long, value_name = "OUTxIN", required = true)]
    shape: Vec<Shape>,

    /// Numbers of tokens
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LIST",
        required = true,
        value_parser = clap::value_parser!(u32).range(1..=1 << 20)
    )]
    tokens: Vec<u32>,

    /// Data types of W and X
    #[arg(long, value_delimiter = ',', value_name = "LIST", default_value = "bf16", value_parser = element)]
    dtype: Vec<DataType>,

    /// Epilogue of the GEMMs
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST", default_value = "none")]
    epilogue: Vec<GridEpilogue>,

    /// Seconds after which no further case begins
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,

    #[command(flatten)]
    gpu: GpuOption,
}

fn element(name: &str) -> Result<DataType, String> {
    let known = [DataType::BF16, DataType::F16, DataType::E4M3, DataType::I8];
    known.into_iter().find(|element| element.name() == name).ok_or("expected bf16, f16, e4m3 or i8".to_owned())
}

/// A GEMM, and its name in the file.
struct Case {
    name: String,
    problem: GemmProblem,
}

impl Sweep {
    /// Runs the suite.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let begun = Instant::now();
        let shown = self.file.display().to_string();
        let there = fs::read_to_string(&self.file).unwrap_or_default();
        let name = |line: &str| Some(serde_json::from_str::<Value>(line).ok()?["case"].as_str()?.to_owned());
        let there: HashSet<String> = there.lines().filter_map(name).collect();
        let cases = self.cases().into_iter().filter(|case| !there.contains(&case.name)).collect::<Vec<_>>();
        let device = Device::open(self.gpu.device)?;
        let libraries = Libraries::found(&device);
        let mut file = OpenOptions::new().create(true).append(true).open(&self.file);
        let file = file.as_mut().map_err(|error| Usage(format!("{shown}: {error}")))?;
        let mut progress = screen.progress();
        let mut done = 0;
        for case in &cases {
            interrupt::check()?;
            if self.limit.is_some_and(|limit| begun.elapsed() > Duration::from_secs(limit.into())) {
                break;
            }
            progress.steps(&case.name, done as u64, cases.len() as u64);
            let times = case.times(&device, &libraries).with_context(|| case.name.clone())?;
            writeln!(file, "{}", json!({ "case": case.name, "times": times })).with_context(|| shown.clone())?;
            done += 1;
        }
        drop(progress);
        screen.line(format!("{} measured, {} left", units::plural(done, "case"), cases.len() - done))?;
        screen.json(&json!({ "measured": done, "left": cases.len() - done }))?;
        Ok(Verdict::Yes)
    }

    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &element in &self.dtype {
            let output = if element.bytes() == 2 { element } else { DataType::BF16 };
            for &shape in &self.shape {
                for &tokens in &self.tokens {
                    for &epilogue in &self.epilogue {
                        let plain = GemmProblem::plain(element, output, shape.out, tokens as usize, shape.inputs);
                        cases.push(Case {
                            name: format!("{element} {shape} {tokens} {}", epilogue.name()),
                            problem: GemmProblem { epilogue: epilogue.kind(), ..plain },
                        });
                    }
                }
            }
        }
        cases
    }
}

impl Case {
    /// Name, kernel and microseconds of every method, and of cuBLASLt's first algorithms.
    fn times(&self, device: &Device, libraries: &Libraries) -> Result<Vec<Value>> {
        let methods = GemmMethod::all(self.problem, device.architecture());
        // Kernels that the cache lacks are compiled on all cores; errors come up again below.
        methods.par_iter().for_each(|method| drop(Gemm::with(device, self.problem, *method)));
        let trial = Trial::random(device, libraries, self.problem)?;
        let engines = methods.into_iter().map(Engine::TwoFour).chain((0..DENSE).map(Engine::CublasLt));
        let products: Vec<_> = engines.filter_map(|engine| trial.product(engine).ok()).collect();
        let mut contenders: Vec<_> = products.iter().map(|product| trial.contender(product)).collect();
        let times = Timer::new(device, trial.stream())?.alternate(&mut contenders, ROUNDS)?;
        Ok(times.iter().map(|time| json!([time.contender, time.kernel, time.us])).collect())
    }
}
