//! Measuring what is left of a grid until time is up.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Result;
use twofour::file::{Overwrite, write_whole};
use twofour_cli::interrupt;

use super::{cell::CellTimes, layers::GridCell, record::GridRecord};

/// How often the file is written: a process that is killed loses no more.
const SAVE_EVERY: Duration = Duration::from_secs(3);

/// The outcome of a cell.
#[derive(Debug)]
pub(super) enum Step {
    /// Its times.
    Measured(CellTimes),
    /// Why kernels do not support it.
    Unsupported(String),
}

/// One run over the cells of a grid.
#[derive(Debug)]
pub(super) struct Session<'a> {
    pub(super) cells: &'a [GridCell<'a>],
    /// Where results are kept.
    pub(super) file: Option<&'a Path>,
    /// When no further cell is begun.
    pub(super) until: Option<Instant>,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ended {
    /// Cells measured by this run.
    pub(super) measured: usize,
    /// Cells that time did not suffice for.
    pub(super) left: usize,
}

impl<'a> Session<'a> {
    /// Measures each cell that the record lacks. `measure` is called with the cell and how many are done.
    ///
    /// What was measured is in the file whatever the result.
    ///
    /// # Errors
    /// Those of `measure`, of writing, and [`interrupt::Interrupted`].
    pub(super) fn run(
        &self,
        record: &mut GridRecord,
        mut measure: impl FnMut(&GridCell<'a>, usize) -> Result<Step>,
    ) -> Result<Ended> {
        let ended = self.cells_left(record, &mut measure);
        self.save(record)?;
        ended
    }

    fn cells_left(
        &self,
        record: &mut GridRecord,
        measure: &mut impl FnMut(&GridCell<'a>, usize) -> Result<Step>,
    ) -> Result<Ended> {
        let finished = record.finished();
        let is_finished = |cell: &GridCell<'_>| finished.contains(&(cell.element.to_string(), cell.shape()));
        let mut left: Vec<&GridCell<'a>> = self.cells.iter().filter(|cell| !is_finished(cell)).collect();
        left.reverse();
        let mut saved = Instant::now();
        let mut measured = 0;
        while let Some(cell) = left.last() {
            interrupt::check()?;
            if self.until.is_some_and(|until| Instant::now() >= until) {
                break;
            }
            match measure(cell, self.cells.len() - left.len())? {
                Step::Measured(times) => {
                    record.add(times);
                    measured += 1;
                }
                Step::Unsupported(reason) => record.add_unsupported(cell, reason),
            }
            left.pop();
            if saved.elapsed() >= SAVE_EVERY {
                self.save(record)?;
                saved = Instant::now();
            }
        }
        Ok(Ended { measured, left: left.len() })
    }

    fn save(&self, record: &GridRecord) -> Result<()> {
        let Some(path) = self.file else { return Ok(()) };
        Ok(write_whole(path, Overwrite::Yes, record.json()?.as_bytes())?)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use anyhow::bail;
    use twofour_cli::{exit::Usage, measure::Gpu};

    use super::{
        super::{
            super::libraries::Versions,
            cells::tests::row,
            layers::{GridEpilogue, GridLayer, grid_cells},
        },
        *,
    };

    fn record() -> GridRecord {
        let gpu = Gpu {
            gpu: "a GPU".into(),
            architecture: "sm_90a".into(),
            multiprocessors: 132,
            driver: "13.0".into(),
            nvrtc: None,
        };
        let versions = Versions { cublaslt: "13.1.0".into(), cusparselt: "0.8.0".into() };
        GridRecord::new(gpu, versions, GridEpilogue::None, "a command".into())
    }

    fn layers() -> Vec<GridLayer> {
        GridLayer::distinct([("a".to_owned(), [64, 128]), ("b".to_owned(), [128, 192])])
    }

    fn times(cell: &GridCell<'_>) -> CellTimes {
        let us = cell.tokens as f64;
        let of = |contender, us| row(&cell.element.to_string(), cell.shape(), contender, us);
        CellTimes { rows: vec![of("cublaslt", us), of("twofour", us / 2.0)], faults: Vec::new() }
    }

    /// Runs with a measurement that says no after so many cells, and returns what it was called with.
    fn run(path: &Path, most: usize) -> (Result<Ended>, Vec<String>, GridRecord) {
        let layers = layers();
        let cells = grid_cells(&layers, GridEpilogue::None);
        let mut record = record();
        record.continue_from(path).unwrap();
        let mut asked = Vec::new();
        let session = Session { cells: &cells, file: Some(path), until: None };
        let ended = session.run(&mut record, |cell, done| {
            if asked.len() == most {
                bail!("no more");
            }
            assert_eq!(done, record_index(&cells, cell));
            asked.push(cell.to_string());
            Ok(Step::Measured(times(cell)))
        });
        (ended, asked, record)
    }

    fn record_index(cells: &[GridCell<'_>], cell: &GridCell<'_>) -> usize {
        cells.iter().position(|other| other.to_string() == cell.to_string()).unwrap()
    }

    #[test]
    fn a_run_continues_where_another_ended() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("grid.json");
        let all = 2 * (21 + 3 * 11);
        let (ended, first, record) = run(&path, 10);
        assert_eq!(ended.unwrap_err().to_string(), "no more");
        assert_eq!((first.len(), record.finished().len()), (10, 10));
        assert_eq!(GridRecord::read(&path).unwrap().rows, record.rows, "an error does not lose what was measured");
        let (ended, second, record) = run(&path, usize::MAX);
        assert_eq!(ended.unwrap(), Ended { measured: all - 10, left: 0 });
        assert!(second.iter().all(|cell| !first.contains(cell)));
        assert_eq!(record.rows.len(), 2 * all);
        let (ended, third, _) = run(&path, usize::MAX);
        assert_eq!((ended.unwrap(), third.len()), (Ended { measured: 0, left: 0 }, 0));
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().filter(|line| line.contains("\"contender\"")).count(), 2 * all);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
    }

    #[test]
    fn time_ends_a_run_between_cells() {
        let layers = layers();
        let cells = grid_cells(&layers, GridEpilogue::None);
        let mut record = record();
        let session = Session { cells: &cells, file: None, until: Some(Instant::now() + Duration::from_millis(20)) };
        let ended = session.run(&mut record, |cell, _| {
            std::thread::sleep(Duration::from_millis(7));
            Ok(Step::Measured(times(cell)))
        });
        let ended = ended.unwrap();
        assert!((1..=3).contains(&ended.measured), "{ended:?}");
        assert_eq!(ended.measured + ended.left, cells.len());
        let over = Session { until: Some(Instant::now()), ..session };
        assert_eq!(over.run(&mut record, |_, _| bail!("not called")).unwrap().measured, 0);
    }

    #[test]
    fn weights_that_kernels_do_not_take_are_noted_once_and_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("grid.json");
        let layers = layers();
        let cells = grid_cells(&layers, GridEpilogue::None);
        let session = Session { cells: &cells, file: Some(&path), until: None };
        let mut asked = 0;
        for _ in 0..2 {
            let mut record = record();
            record.continue_from(&path).unwrap();
            let ended = session.run(&mut record, |_, _| {
                asked += 1;
                Ok(Step::Unsupported("no".into()))
            });
            assert_eq!(ended.unwrap(), Ended { measured: 0, left: 0 });
            assert_eq!((record.unsupported.len(), record.rows.len()), (2 * 4, 0));
        }
        assert_eq!(asked, 2 * cells.len());
    }

    #[test]
    fn results_of_another_machine_or_other_kernels_are_not_continued() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("grid.json");
        let changed = |change: &dyn Fn(&mut GridRecord)| {
            let mut record = record();
            change(&mut record);
            record
        };
        for (earlier, named) in [
            (changed(&|record| record.machine.gpu = "another GPU".into()), "GPU another GPU"),
            (changed(&|record| record.machine.driver = "12.0".into()), "driver 12.0"),
            (changed(&|record| record.libraries.cusparselt = "0.7.0".into()), "cuSPARSELt 0.7.0"),
            (changed(&|record| record.kernels = "other".into()), "kernels other"),
            (changed(&|record| record.epilogue = GridEpilogue::BiasGelu), "epilogue bias-gelu"),
        ] {
            fs::write(&path, earlier.json().unwrap()).unwrap();
            let error = record().continue_from(&path).unwrap_err();
            let text = error.to_string();
            assert!(error.is::<Usage>() && text.contains(named) && text.contains("--force"), "{text}");
        }
        let mut compiled = record();
        compiled.machine.nvrtc = Some("13.0".into());
        fs::write(&path, compiled.json().unwrap()).unwrap();
        record().continue_from(&path).expect("kernels from the cache are the same kernels");
        fs::write(&path, "{\"rows\": [").unwrap();
        let error = record().continue_from(&path).unwrap_err();
        assert!(error.is::<Usage>() && error.to_string().contains("line 1"), "{error}");
    }
}
