//! The suite `grid`: the linear layers of models in use, at token counts from decode to prefill.
//!
//! | file | what |
//! |---|---|
//! | `layers` | weights of models, and the cells: a weight, a data type and a number of tokens |
//! | `shapes` | the file of `--shapes` |
//! | `cell` | the times of one cell |
//! | `row` | the record of a cell |
//! | `record` | the JSON, which a later run continues |
//! | `session` | measuring what is left until time is up |
//! | `cells` | speedups by cell and by group of weights |
//! | `heat_map`, `color` | the picture, and its color scale |

mod cell;
mod cells;
mod color;
mod heat_map;
mod layers;
mod record;
mod row;
mod session;
mod shapes;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;
use twofour::file::{Overwrite, write_whole};
use twofour_cli::{
    exit::{Usage, Verdict},
    interrupt, measure,
    present::{Screen, table::Table, units},
};
use twofour_cuda::{Device, Error, compare::TrialTensors};

use self::{
    cell::GridTimer,
    cells::{Against, Group, Summary, cells, dtypes},
    layers::{GridCell, grid_cells, grid_layers},
    session::{Session, Step},
};
use super::{libraries::Libraries, suite::RunOptions};
use crate::output;

pub(in crate::suites) use heat_map::heat_map;
pub(super) use layers::GridEpilogue;
pub(in crate::suites) use record::GridRecord;

/// Measure the linear layers of models in use
///
/// The layers of GPT-2, BERT, ViT, Llama, Qwen and Mixtral, fused and single, at 1 to 16384 tokens in bf16 and up to
/// 8192 in f16, e4m3 and i8: our fastest kernel, cuBLASLt's and cuSPARSELt's, a dispatcher's choice, and the choice of
/// the cost model without measurement. About 2,100 cells. The JSON is written every few seconds, and a later run with
/// the same -o FILE measures only what is missing there (--force begins anew); a heat map is written beside it as .svg
/// (`twofour-bench draw` draws it again).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  twofour-bench cuda grid --limit 240 -o grid.json       # again and again until all cells are there
  twofour-bench cuda grid --epilogue bias --shapes layers.txt -o bias.json")]
pub(crate) struct Grid {
    /// Weights instead of the models': `OUT IN [NAME]` on each line, or a JSON list of [OUT, IN, "NAME"]
    #[arg(long, value_name = "FILE")]
    shapes: Option<PathBuf>,

    /// Epilogue of the GEMMs; with one, cuSPARSELt is left out
    #[arg(long, value_enum, value_name = "EPILOGUE", default_value_t)]
    epilogue: GridEpilogue,

    /// Seconds after which no further cell begins
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,

    #[command(flatten)]
    runs: RunOptions,
}

impl Grid {
    /// Measures what the file lacks.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let begun = Instant::now();
        let layers = self.shapes.as_deref().map_or_else(|| Ok(grid_layers()), shapes::read)?;
        let cells = grid_cells(&layers, self.epilogue);
        self.expect_files()?;
        let device = Device::open(self.runs.gpu.device)?;
        let installed = Libraries::open(&device);
        installed.missing().into_iter().for_each(|missing| screen.warn(missing));
        let libraries = twofour_cuda::compare::Libraries::found(&device);
        let mut record = GridRecord::new(measure::gpu(&device)?, installed.versions()?, self.epilogue, self.told());
        if let Some(path) = self.runs.output.file().filter(|_| !self.runs.output.is_forced()) {
            record.continue_from(path)?;
        }
        let stream = device.context().new_stream()?;
        let mut measurer = Measurer {
            timer: GridTimer::new(&device, &libraries, &stream, self.runs.rounds)?,
            cells: &cells,
            weight: None,
        };
        let mut progress = screen.progress();
        let guard = interrupt::guard();
        let until = self.limit.map(|seconds| begun + Duration::from_secs(seconds.into()));
        let session = Session { cells: &cells, file: self.runs.output.file(), until };
        let ended = session.run(&mut record, |cell, done| {
            progress.steps(&cell.to_string(), done as u64, cells.len() as u64);
            measurer.measure(cell)
        });
        drop((progress, guard));
        if let Some(path) = self.runs.output.file() {
            write_whole(picture_of(path), Overwrite::Yes, heat_map(&record).as_bytes())?;
        }
        let ended = ended?;
        tell(&record, screen)?;
        let share = begun.elapsed().as_secs_f64() / ended.measured.max(1) as f64;
        screen.line(format!("\n{} measured, {share:.2} s each", units::plural(ended.measured, "cell")))?;
        if ended.left > 0 {
            let how =
                if self.runs.output.file().is_some() { "the same command continues" } else { "-o FILE keeps them" };
            screen.line(format!("{} left: {how}", units::plural(ended.left, "cell")))?;
        }
        screen.json(&record)?;
        for fault in &record.faults {
            let [tokens, inputs, out] = fault.shape;
            let (dtype, contender, kernel) = (&fault.dtype, &fault.contender, &fault.kernel);
            screen.warn(format!(
                "{dtype} [{out}, {inputs}], {tokens} tokens: {contender} ({kernel}) was excluded: its results differ, \
                 {}",
                fault.difference
            ));
        }
        Ok(if record.faults.is_empty() { Verdict::Yes } else { Verdict::No })
    }

    /// Returns an error for files that cannot be written, before anything is measured.
    fn expect_files(&self) -> Result<()> {
        let Some(path) = self.runs.output.file() else { return Ok(()) };
        output::expect_file(path)?;
        let picture = picture_of(path);
        if picture == path {
            bail!(Usage(format!("-o {}: name the JSON; the picture is written beside it", path.display())));
        }
        output::expect_file(&picture)?;
        if picture.exists() && !path.exists() && !self.runs.output.is_forced() {
            bail!(Usage(format!("{} exists; replace it with --force", picture.display())));
        }
        Ok(())
    }

    /// The command as one would type it again.
    fn told(&self) -> String {
        let mut told = self.runs.told("grid");
        if let Some(shapes) = &self.shapes {
            told.push_str(&format!(" --shapes {}", shapes.display()));
        }
        if self.epilogue != GridEpilogue::None {
            told.push_str(&format!(" --epilogue {}", self.epilogue.name()));
        }
        told
    }
}

/// Where the picture of a JSON file is.
pub(in crate::suites) fn picture_of(json: &Path) -> PathBuf {
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
    let mut table =
        Table::of(["weights", "dtype"], ["cells", "over dense: worst", "mean", "over cuSPARSELt: worst", "mean"]);
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
