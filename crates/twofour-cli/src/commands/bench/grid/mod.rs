//! `twofour bench cuda --suite grid`.
//!
//! | file | what |
//! |---|---|
//! | `shapes` | the file of `--shapes` |
//! | `record` | the JSON, which a later run continues |
//! | `sitting` | measuring what is left until time is up |
//! | `cells` | speedups by cell and by group of weights |
//! | `heat_map`, `color` | the picture, and its color scale |

mod cells;
mod color;
mod heat_map;
mod record;
mod shapes;
mod sitting;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use twofour::file::{Overwrite, write_whole};
use twofour_cuda::{Device, Error, measure::TrialTensors};

use self::{
    cells::{Against, Group, Summary, cells, dtypes},
    sitting::{Sitting, Step},
};
use super::{
    cuda_answer::Versions,
    output::{self, Output},
};
use crate::{
    exit::{Usage, Verdict},
    interrupt,
    measure::cuda::{self, GridCell, GridEpilogue, GridTimer},
    present::{
        Screen,
        table::{Align, Table},
        units,
    },
};

pub(super) use heat_map::heat_map;
pub(super) use record::GridRecord;

/// The command's options.
#[derive(Debug)]
pub(super) struct GridOptions<'a> {
    /// Number of the device.
    pub(super) device: usize,
    /// Rounds that count, at most.
    pub(super) rounds: u32,
    /// A file of weights instead of the models'.
    pub(super) shapes: Option<&'a Path>,
    /// What the GEMMs do with their sums.
    pub(super) epilogue: GridEpilogue,
    /// When to stop.
    pub(super) limit: Option<Duration>,
    /// Where the JSON goes.
    pub(super) output: &'a Output,
}

impl GridOptions<'_> {
    /// Measures what the file lacks.
    pub(super) fn run(&self, screen: &mut Screen) -> Result<Verdict> {
        let begun = Instant::now();
        let layers = self.shapes.map_or_else(|| Ok(cuda::grid_layers()), shapes::read)?;
        let cells = cuda::grid_cells(&layers, self.epilogue);
        self.expect_files()?;
        let device = Device::open(self.device)?;
        let installed = cuda::Libraries::open(&device);
        installed.missing().into_iter().for_each(|missing| screen.warn(missing));
        let [cublaslt, cusparselt] = installed.versions()?;
        let libraries = twofour_cuda::libraries::Libraries::found(&device);
        let mut record =
            GridRecord::new(cuda::gpu(&device)?, Versions { cublaslt, cusparselt }, self.epilogue, self.told());
        if let Some(path) = self.output.file().filter(|_| !self.output.is_forced()) {
            record.continue_from(path)?;
        }
        let stream = device.context().new_stream()?;
        let mut measurer =
            Measurer { timer: GridTimer::new(&device, &libraries, &stream, self.rounds)?, cells: &cells, weight: None };
        let mut progress = screen.progress();
        let guard = interrupt::guard();
        let sitting = Sitting { cells: &cells, file: self.output.file(), until: self.limit.map(|limit| begun + limit) };
        let ended = sitting.run(&mut record, |cell, done| {
            progress.steps(&cell.to_string(), done as u64, cells.len() as u64);
            measurer.measure(cell)
        });
        drop((progress, guard));
        if let Some(path) = self.output.file() {
            write_whole(picture_of(path), Overwrite::Yes, heat_map(&record).as_bytes())?;
        }
        let ended = ended?;
        tell(&record, screen)?;
        let share = begun.elapsed().as_secs_f64() / ended.measured.max(1) as f64;
        screen.line(format!("\n{} measured, {share:.2} s each", units::plural(ended.measured, "cell")))?;
        if ended.left > 0 {
            let how = if self.output.file().is_some() { "the same command continues" } else { "-o FILE keeps them" };
            screen.line(format!("{} left: {how}", units::plural(ended.left, "cell")))?;
        }
        screen.json(&record)?;
        for fault in &record.faults {
            let [tokens, inputs, out] = fault.shape;
            let (dtype, contender, kernel) = (&fault.dtype, &fault.contender, &fault.kernel);
            screen.warn(format!(
                "{dtype} [{out}, {inputs}], {tokens} tokens: {contender} ({kernel}) was excluded: its results differ, {}",
                fault.difference
            ));
        }
        Ok(if record.faults.is_empty() { Verdict::Yes } else { Verdict::No })
    }

    /// Returns an error for files that cannot be written, before anything is measured.
    fn expect_files(&self) -> Result<()> {
        let Some(path) = self.output.file() else { return Ok(()) };
        output::expect_file(path)?;
        let picture = picture_of(path);
        if picture == path {
            bail!(Usage(format!("-o {}: name the JSON; the picture is written beside it", path.display())));
        }
        output::expect_file(&picture)?;
        if picture.exists() && !path.exists() && !self.output.is_forced() {
            bail!(Usage(format!("{} exists; replace it with --force", picture.display())));
        }
        Ok(())
    }

    /// The command as one would type it again.
    fn told(&self) -> String {
        let mut told = format!("twofour bench cuda --suite grid --device {} --rounds {}", self.device, self.rounds);
        if let Some(shapes) = self.shapes {
            told.push_str(&format!(" --shapes {}", shapes.display()));
        }
        if self.epilogue != GridEpilogue::None {
            told.push_str(&format!(" --epilogue {}", self.epilogue.name()));
        }
        told
    }
}

/// Where the picture of a JSON file is.
pub(super) fn picture_of(json: &Path) -> PathBuf {
    json.with_extension("svg")
}

/// Measures cells, and keeps the tensors of the weight that they share.
struct Measurer<'a> {
    timer: GridTimer<'a>,
    cells: &'a [GridCell<'a>],
    /// The last weight's cell, and its tensors or why there are none.
    weight: Option<(GridCell<'a>, Result<Arc<TrialTensors>, String>)>,
}

impl<'a> Measurer<'a> {
    fn measure(&mut self, cell: &GridCell<'a>) -> Result<Step> {
        let tensors = match &self.weight {
            Some((last, tensors)) if last.has_weight_of(cell) => tensors.clone(),
            _ => {
                // Before there is memory for the next.
                self.weight = None;
                let of_weight: Vec<_> = self.cells.iter().filter(|other| other.has_weight_of(cell)).cloned().collect();
                let tensors = match self.timer.tensors(cell, &of_weight) {
                    Ok(tensors) => Ok(Arc::new(tensors)),
                    Err(error) => Err(reason(error)?),
                };
                self.weight = Some((cell.clone(), tensors.clone()));
                tensors
            }
        };
        match tensors {
            Ok(tensors) => match self.timer.cell(cell, &tensors) {
                Ok(times) => Ok(Step::Measured(times)),
                Err(error) => match error.downcast::<Error>() {
                    Ok(error) => Ok(Step::Unsupported(reason(error)?)),
                    Err(error) => Err(error),
                },
            },
            Err(reason) => Ok(Step::Unsupported(reason)),
        }
    }
}

/// Returns why kernels do not support a problem; other errors are returned as errors.
fn reason(error: Error) -> Result<String, Error> {
    let is_of_problem = matches!(
        error,
        Error::Multiple { .. }
            | Error::Dimension { .. }
            | Error::Product { .. }
            | Error::Random(_)
            | Error::Unsupported { .. }
            | Error::OutOfMemory { .. }
    );
    if is_of_problem { Ok(error.to_string()) } else { Err(error) }
}

/// Prints the summary.
fn tell(record: &GridRecord, screen: &mut Screen) -> Result<()> {
    screen.line(format!("{}, {}\n", record.machine.gpu, record.machine.architecture))?;
    let cells = cells(&record.rows);
    let mut table = Table::new([
        ("weights", Align::Left),
        ("dtype", Align::Left),
        ("cells", Align::Right),
        ("over dense: worst", Align::Right),
        ("mean", Align::Right),
        ("over cuSPARSELt: worst", Align::Right),
        ("mean", Align::Right),
    ]);
    for dtype in dtypes(&cells) {
        for group in Group::ALL {
            let of_group: Vec<_> = cells.iter().filter(|c| c.dtype == dtype && c.group() == group).collect();
            if of_group.is_empty() {
                continue;
            }
            let mut line = vec![group.name().to_owned(), dtype.to_owned(), of_group.len().to_string()];
            for against in [Against::Dense, Against::CusparseLt] {
                let summary = Summary::of(of_group.iter().copied(), against);
                let figure =
                    |of: fn(&Summary) -> f64| summary.as_ref().map_or("-".to_owned(), |s| units::factor(of(s)));
                line.extend([figure(|summary| summary.worst), figure(|summary| summary.mean)]);
            }
            table.row(line);
        }
    }
    screen.line(table)?;
    for unsupported in &record.unsupported {
        let [out, inputs] = unsupported.weight;
        screen.line(format!("not measured: {} [{out}, {inputs}]: {}", unsupported.dtype, unsupported.reason))?;
    }
    screen.line("\nMedians, geometric means. cuSPARSELt: over the cells that it has a kernel for.")
}
