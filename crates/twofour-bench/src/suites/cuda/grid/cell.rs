//! The times of one cell of the grid.
//!
//! Every kernel of a contender runs once or twice, and those close to the fastest are interleaved. The finalists of all
//! contenders are then interleaved in shuffled order, first in rounds by which a dispatcher would choose, then in
//! rounds that count. The number of rounds follows from a cell's time budget, so that a launch of 20 ms is measured
//! less often than one of 10 µs.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Result;
use cudarc::driver::CudaStream;
use rayon::prelude::*;
use twofour_cuda::{
    Device, Error,
    compare::{Contender, Engine, Libraries, PLANNING, Product, REST, Time, Timer, Trial, TrialTensors},
    raw::gemm::{Gemm, GemmMethod},
};

use super::{
    super::sample::read,
    layers::{GridCell, GridEpilogue},
    row::{Fault, GridRow, Unmeasured},
};

/// Time of a round of one contender besides its launch: the L2 flush and the synchronization.
const BETWEEN_US: f64 = 130.0;

/// A kernel whose first launch takes longer is not launched a second time before the comparison: loading it takes far
/// less.
const LONG_US: f64 = 2000.0;

/// A kernel that takes longer than this many times the fastest of its contender is dropped after its first launches.
const CLOSE: f64 = 1.3;

/// A stage of a cell: its time budget, and the fewest and the most rounds.
#[derive(Debug, Clone, Copy)]
struct Stage {
    budget_us: f64,
    least: u32,
    most: u32,
}

/// The kernels of one contender.
const SCREENING: Stage = Stage { budget_us: 30e3, least: 3, most: 7 };

/// The finalists, as a dispatcher would choose.
const CHOOSING: Stage = Stage { budget_us: 30e3, least: 5, most: 11 };

/// Rounds that count; the most is the command's.
const FINAL: Stage = Stage { budget_us: 80e3, least: 7, most: 0 };

impl Stage {
    /// Returns the number of rounds for contenders with these times.
    fn rounds(self, times_us: impl Iterator<Item = f64>) -> u32 {
        let round_us: f64 = times_us.map(|us| us + BETWEEN_US).sum();
        ((self.budget_us / round_us) as u32).clamp(self.least, self.most.max(self.least))
    }
}

/// The most kernels of a contender that are compared with each other, and with those of other contenders.
#[derive(Debug, Clone, Copy)]
struct Kept {
    screened: usize,
    finalists: usize,
}

const OURS: Kept = Kept { screened: 12, finalists: 2 };
const DENSE: Kept = Kept { screened: 8, finalists: 2 };
const SPARSE: Kept = Kept { screened: 8, finalists: 1 };

/// The measurements of a cell.
#[derive(Debug, Default)]
pub(crate) struct CellTimes {
    /// One row for each contender, and one for the dispatcher's choice.
    pub(crate) rows: Vec<GridRow>,
    /// Kernels that were excluded.
    pub(crate) faults: Vec<Fault>,
}

/// A planned GEMM, and its time so far.
struct Candidate {
    engine: Engine,
    product: Product,
    us: f64,
}

/// Measures cells on one stream.
#[derive(Debug)]
pub(crate) struct GridTimer<'a> {
    device: &'a Device,
    libraries: &'a Libraries,
    timer: Timer<'a>,
    stream: &'a Arc<CudaStream>,
    /// Rounds that count, at most.
    rounds: u32,
    /// How long kernels have kept the device busy since its last rest.
    busy_us: f64,
}

impl<'a> GridTimer<'a> {
    /// Returns a measurer with at most `rounds` rounds that count.
    pub(crate) fn new(
        device: &'a Device,
        libraries: &'a Libraries,
        stream: &'a Arc<CudaStream>,
        rounds: u32,
    ) -> Result<Self> {
        let timer = Timer::new(device, stream)?;
        Ok(Self { device, libraries, timer, stream, rounds, busy_us: 0.0 })
    }

    /// Returns random tensors for the weight of a cell, once the kernels that may be measured for that weight's cells
    /// are loaded. Those that are not in the cache are compiled on all cores.
    ///
    /// # Errors
    /// Those of [`TrialTensors::random`].
    pub(crate) fn tensors(&self, first: &GridCell<'_>, cells: &[GridCell<'_>]) -> Result<TrialTensors, Error> {
        let begun = Instant::now();
        let tensors = TrialTensors::random(self.stream, first.problem(first.most_tokens))?;
        let random = begun.elapsed();
        let likely = |cell: &GridCell<'_>| {
            let problem = cell.problem(cell.tokens);
            let methods = GemmMethod::likely(problem, self.device.architecture());
            methods.into_iter().map(|method| (problem, method)).collect::<Vec<_>>()
        };
        let methods: Vec<_> = cells.iter().flat_map(likely).collect();
        // Errors come up again where the kernel is to run.
        methods.par_iter().for_each(|(problem, method)| drop(Gemm::with(self.device, *problem, *method)));
        tracing::debug!(?random, loaded = ?begun.elapsed() - random, methods = methods.len(), "weight {first}");
        Ok(tensors)
    }

    /// Measures a cell with the tensors of its weight.
    pub(crate) fn cell(&mut self, cell: &GridCell<'_>, tensors: &Arc<TrialTensors>) -> Result<CellTimes> {
        let begun = Instant::now();
        let trial = &Trial::with_tensors(self.device, self.libraries, tensors, cell.tokens)?;
        let problem = trial.problem();
        let engines = self.libraries.engines(self.device, problem);
        let of = |name: &'static str| engines.iter().copied().filter(move |engine| engine.name() == name);
        let listed = begun.elapsed();
        let mut finalists = self.fastest(trial, of("twofour"), OURS)?;
        let ours = begun.elapsed();
        let unmeasured = Engine::TwoFour(GemmMethod::best(problem, self.device.architecture(), self.device.sms())?);
        if !finalists.iter().any(|candidate| candidate.engine == unmeasured) {
            let product = trial.product(unmeasured)?;
            let us = self.first_launches(trial, &product)?;
            finalists.push(Candidate { engine: unmeasured, product, us });
        }
        finalists.extend(self.fastest(trial, of("cublaslt"), DENSE)?);
        let dense = begun.elapsed();
        finalists.extend(self.fastest(trial, of("cusparselt"), SPARSE)?);
        let sparse = begun.elapsed();
        let faults = self.exclude_different(cell, trial, &mut finalists)?;
        let compared = begun.elapsed();

        std::thread::sleep(Duration::from_secs_f64(self.busy_us * 1e-6).min(REST));
        self.busy_us = 0.0;
        let chosen_by = self.interleave(trial, &finalists, CHOOSING)?;
        let times = self.interleave(trial, &finalists, Stage { most: self.rounds, ..FINAL })?;
        let rows = rows(cell, &finalists, &times, &chosen_by, unmeasured);
        let (all, engines) = (begun.elapsed(), engines.len());
        tracing::debug!(?listed, ?ours, ?dense, ?sparse, ?compared, ?all, engines, "{cell}");
        Ok(CellTimes { rows, faults })
    }

    /// Returns the fastest kernels of a contender. Algorithms that a library rejects are left out, and those that are
    /// left when [`PLANNING`] is over.
    fn fastest(
        &mut self,
        trial: &Trial,
        engines: impl Iterator<Item = Engine>,
        kept: Kept,
    ) -> Result<Vec<Candidate>, Error> {
        let mut candidates = Vec::new();
        let begun = Instant::now();
        for engine in engines {
            if begun.elapsed() > PLANNING {
                break;
            }
            let tried = trial.product(engine).and_then(|product| {
                let us = self.first_launches(trial, &product)?;
                Ok(Candidate { engine, product, us })
            });
            match tried {
                Ok(candidate) => candidates.push(candidate),
                Err(Error::Vendor { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let fastest_first = |a: &Candidate, b: &Candidate| a.us.total_cmp(&b.us);
        candidates.sort_by(fastest_first);
        let least = candidates.first().map_or(0.0, |candidate| candidate.us);
        candidates.retain(|candidate| candidate.us <= CLOSE * least);
        candidates.truncate(kept.screened);
        if candidates.len() > kept.finalists {
            let times = self.interleave(trial, &candidates, SCREENING)?;
            candidates.iter_mut().zip(times).for_each(|(candidate, time)| candidate.us = time.us);
            candidates.sort_by(fastest_first);
            candidates.truncate(kept.finalists);
        }
        Ok(candidates)
    }

    /// Returns the microseconds of a GEMM's second launch, or of its first if that takes long.
    fn first_launches(&mut self, trial: &Trial, product: &Product) -> Result<f64, Error> {
        let mut contenders = [trial.contender(product)];
        let mut us = self.timer.interleave(&mut contenders, 0, 1)?[0].us;
        self.busy_us += us;
        if us < LONG_US {
            us = self.timer.interleave(&mut contenders, 0, 1)?[0].us;
            self.busy_us += us;
        }
        Ok(us)
    }

    fn interleave(&mut self, trial: &Trial, candidates: &[Candidate], stage: Stage) -> Result<Vec<Time>, Error> {
        let rounds = stage.rounds(candidates.iter().map(|candidate| candidate.us));
        let mut contenders: Vec<Contender<'_>> = candidates.iter().map(|c| trial.contender(&c.product)).collect();
        let times = self.timer.interleave(&mut contenders, 0, rounds)?;
        self.busy_us += f64::from(rounds) * times.iter().map(|time| time.us).sum::<f64>();
        Ok(times)
    }

    /// Removes candidates whose results differ from the dense ones, or from the first candidate's where there is no
    /// dense one.
    fn exclude_different(
        &mut self,
        cell: &GridCell<'_>,
        trial: &Trial,
        candidates: &mut Vec<Candidate>,
    ) -> Result<Vec<Fault>> {
        let mut results = Vec::new();
        for candidate in candidates.iter() {
            self.first_launches(trial, &candidate.product)?;
            results.push(self.sample(trial, candidate.engine)?);
        }
        let is_dense = |candidate: &Candidate| matches!(candidate.engine, Engine::CublasLt(_));
        let reference = candidates.iter().position(is_dense).unwrap_or(0);
        let tolerance = Tolerance::of(cell);
        let mut faults = Vec::new();
        let mut place = 0;
        candidates.retain(|candidate| {
            let found = &results[place];
            place += 1;
            let Some(difference) = tolerance.difference(found, &results[reference]) else { return true };
            faults.push(Fault {
                dtype: cell.element.to_string(),
                shape: cell.shape(),
                contender: candidate.engine.name().to_owned(),
                kernel: candidate.product.kernel(),
                difference,
            });
            false
        });
        Ok(faults)
    }

    /// Returns the first and the last results of an engine's last launch.
    fn sample(&self, trial: &Trial, engine: Engine) -> Result<Vec<f64>> {
        const PART: usize = 1 << 16;
        let problem = trial.problem();
        let all = problem.features * problem.tokens;
        let part = all.min(PART);
        let mut sample = read(self.stream, trial.out(engine), 0..part, problem.output)?;
        sample.extend(read(self.stream, trial.out(engine), all - part..all, problem.output)?);
        Ok(sample)
    }
}

/// The largest difference between results of different kernels, divided by the mean magnitude of results; and what
/// comes on top, divided by a result's own magnitude.
#[derive(Debug, Clone, Copy)]
struct Tolerance {
    of_mean: f64,
    of_result: f64,
}

/// Two units in the last place of bf16: where an epilogue is a kernel of its own, results are rounded twice.
const ROUNDED_TWICE: f64 = 1.0 / 64.0;

impl Tolerance {
    /// Hopper accumulates 8-bit floats with fewer bits than f32 has, so kernels with another order of additions differ
    /// more.
    fn of(cell: &GridCell<'_>) -> Self {
        let is_float = !matches!(cell.element, twofour_cuda::DataType::I8);
        let of_mean = if cell.element.bytes() == 1 && is_float { 0.3 } else { 0.05 };
        let of_result = if cell.epilogue == GridEpilogue::None { 0.0 } else { ROUNDED_TWICE };
        Self { of_mean, of_result }
    }

    /// Returns a description of results that differ by more, or `None` for those that agree.
    fn difference(self, found: &[f64], expected: &[f64]) -> Option<String> {
        let size = expected.iter().map(|v| v.abs()).sum::<f64>() / expected.len().max(1) as f64;
        // A comparison with NaN is false: such a result is a difference.
        let alike = |(a, b): (&f64, &f64)| (a - b).abs() <= self.of_mean * size + self.of_result * b.abs();
        if found.iter().zip(expected).all(alike) {
            return None;
        }
        let apart = found.iter().zip(expected).map(|(a, b)| (a - b).abs());
        let most = apart.fold(0.0, |most: f64, apart| if most.is_nan() || apart < most { most } else { apart });
        Some(format!("up to {most:.4} where results are {size:.4} on average"))
    }
}

/// Returns the rows of a cell: each contender's fastest kernel by the times that count, and the dispatcher's choice
/// with its own.
fn rows(
    cell: &GridCell<'_>,
    finalists: &[Candidate],
    times: &[Time],
    chosen_by: &[Time],
    unmeasured: Engine,
) -> Vec<GridRow> {
    let best_of = |name: &str| times.iter().filter(|time| time.contender == name).min_by(|a, b| a.us.total_cmp(&b.us));
    let model = finalists.iter().position(|candidate| candidate.engine == unmeasured).map(|place| &times[place]);
    let mut rows = Vec::new();
    for name in ["cublaslt", "cusparselt", "twofour"] {
        let Some(time) = best_of(name) else { continue };
        let unmeasured = model.filter(|_| name == "twofour").map(|model| Unmeasured {
            kernel: model.kernel.clone(),
            us: thousandths(model.us),
            over_best: thousandths(model.us / time.us),
        });
        rows.push(GridRow { unmeasured, ..row(cell, name, time) });
    }
    let places = 0..times.len();
    if let Some(place) = places.min_by(|a, b| chosen_by[*a].us.total_cmp(&chosen_by[*b].us)) {
        rows.push(row(cell, "dispatch", &times[place]));
    }
    rows
}

fn row(cell: &GridCell<'_>, contender: &str, time: &Time) -> GridRow {
    let problem = cell.problem(cell.tokens);
    let (elements, width) = (cell.layer.elements(), cell.element.bytes());
    let is_dense = time.contender == "cublaslt";
    let bytes = if is_dense { elements * width } else { elements * width / 2 + elements / 8 };
    GridRow {
        dtype: cell.element.to_string(),
        output: problem.output.to_string(),
        shape: cell.shape(),
        contender: contender.to_owned(),
        kernel: time.kernel.clone(),
        us: thousandths(time.us),
        min_us: thousandths(time.min_us),
        max_us: thousandths(time.max_us),
        tflops: thousandths(2.0 * elements as f64 * cell.tokens as f64 / time.us * 1e-6),
        gb_per_s: thousandths(bytes as f64 / time.us * 1e-3),
        unmeasured: None,
        layers: cell.layer.names.clone(),
    }
}

/// Rounded to three decimals: more are noise, and twice the file.
fn thousandths(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_follow_from_the_budget() {
        let stage = Stage { budget_us: 30e3, least: 3, most: 7 };
        assert_eq!(stage.rounds([10.0; 24].into_iter()), 7);
        assert_eq!(stage.rounds([500.0; 10].into_iter()), 4);
        assert_eq!(stage.rounds([20e3; 24].into_iter()), 3);
        // The command's most may be less than a stage's least.
        assert_eq!(Stage { most: 5, ..FINAL }.rounds([10.0].into_iter()), FINAL.least);
        assert_eq!(Stage { most: 30, ..FINAL }.rounds([10.0; 6].into_iter()), 30);
    }

    #[test]
    fn different_results_are_told_apart_from_rounding() {
        let tolerance = Tolerance { of_mean: 0.05, of_result: 0.0 };
        // 100 rounded twice may be 100.5, and where results are rounded once that is a difference.
        let twice = Tolerance { of_result: ROUNDED_TWICE, ..tolerance };
        let many = |last: f64| [vec![1.0; 999], vec![last]].concat();
        assert_eq!(twice.difference(&many(100.5), &many(100.0)), None);
        assert!(tolerance.difference(&many(100.5), &many(100.0)).is_some());
        assert!(twice.difference(&many(102.0), &many(100.0)).is_some());
        assert_eq!(tolerance.difference(&[1.0, -1.01, 0.0], &[1.0, -1.0, 0.01]), None);
        let text = tolerance.difference(&[1.0, 1.0], &[1.0, -1.0]).unwrap();
        assert!(text.contains("2.0000") && text.contains("1.0000 on average"), "{text}");
        assert!(tolerance.difference(&[f64::NAN, 1.0], &[1.0, 1.0]).unwrap().contains("NaN"));
    }
}
