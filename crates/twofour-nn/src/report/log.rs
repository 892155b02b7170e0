//! `metrics.jsonl` while it is written.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use super::StepMetrics;

/// A file of metrics that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MetricsError {
    /// The file system refuses.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A line before the step where training goes on is not that step's.
    #[error("{}: line {line} is not the metrics of step {step}; the file was changed or damaged", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The step that it should hold.
        step: u64,
    },
}

/// An append-only file with one JSON object for each step.
///
/// A run that goes on from a checkpoint cuts the file back to the checkpoint's step, and then writes the same lines that the process
/// before it wrote, or would have written, but for `tokens_per_s`.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: BufWriter<File>,
}

impl MetricsLog {
    /// Opens the file, keeps the lines of the first `steps` steps, cuts off the rest, and returns what it keeps.
    ///
    /// # Errors
    /// Those of the file system; a line that is not the next step's.
    pub fn open(path: &Path, steps: u64) -> Result<(MetricsLog, Vec<StepMetrics>), MetricsError> {
        let io = |source| MetricsError::Io { path: path.to_owned(), source };
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(io)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(io)?;
        let (mut kept, mut lines) = (0, Vec::new());
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let step = lines.len() as u64;
            if step == steps {
                break;
            }
            let metrics = serde_json::from_slice::<StepMetrics>(line).ok();
            let Some(metrics) = metrics.filter(|metrics| metrics.step == step && line.ends_with(b"\n")) else {
                return Err(MetricsError::Damaged { path: path.to_owned(), line: lines.len() + 1, step });
            };
            kept += line.len() as u64;
            lines.push(metrics);
        }
        if (lines.len() as u64) < steps {
            let step = lines.len() as u64;
            return Err(MetricsError::Damaged { path: path.to_owned(), line: lines.len() + 1, step });
        }
        file.set_len(kept).and_then(|()| file.seek(SeekFrom::End(0))).map_err(io)?;
        Ok((MetricsLog { path: path.to_owned(), file: BufWriter::new(file) }, lines))
    }

    /// Appends a step.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn append(&mut self, metrics: &StepMetrics) -> Result<(), MetricsError> {
        let written = serde_json::to_writer(&mut self.file, metrics).map_err(io::Error::from);
        let written = written.and_then(|()| self.file.write_all(b"\n"));
        written.map_err(|source| MetricsError::Io { path: self.path.clone(), source })
    }

    /// Writes what is buffered, so that readers see it.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn flush(&mut self) -> Result<(), MetricsError> {
        self.file.flush().map_err(|source| MetricsError::Io { path: self.path.clone(), source })
    }

    /// Writes what is buffered to the disk: before a checkpoint that counts on these lines.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn sync(&mut self) -> Result<(), MetricsError> {
        self.flush()?;
        self.file.get_ref().sync_data().map_err(|source| MetricsError::Io { path: self.path.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: Some(5.0 / (step + 1) as f64),
            learning_rate: 1e-3,
            gradient_norm: Some(1.0),
            skipped: step == 2,
            flip_rate: 0.25,
            observed_flip_rate: None,
            decay: None,
            val_loss: step.is_multiple_of(2).then_some(4.0),
            val_accuracy: None,
            layers: Default::default(),
            tokens_per_s: 10.0,
        }
    }

    #[test]
    fn a_file_is_cut_back_to_a_step_and_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let write = |from: u64, to: u64| {
            let (mut log, before) = MetricsLog::open(&path, from).unwrap();
            assert_eq!(before, (0..from).map(step).collect::<Vec<_>>());
            (from..to).for_each(|number| log.append(&step(number)).unwrap());
            log.sync().unwrap();
        };
        write(0, 7);
        let whole = std::fs::read(&path).unwrap();
        write(3, 7);
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        // A line that was being written when the process was killed.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"step\":7,\"lo").unwrap();
        write(5, 7);
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        write(0, 0);
        assert!(std::fs::read(&path).unwrap().is_empty());
    }

    #[test]
    fn lines_that_a_checkpoint_counts_on_must_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let (mut log, _) = MetricsLog::open(&path, 0).unwrap();
        for number in [0, 2] {
            log.append(&step(number)).unwrap();
        }
        log.flush().unwrap();
        for steps in [2, 9] {
            let error = MetricsLog::open(&path, steps).unwrap_err();
            assert!(matches!(error, MetricsError::Damaged { line: 2, step: 1, .. }), "{error}");
        }
        MetricsLog::open(&path, 1).unwrap();
        assert!(matches!(MetricsLog::open(&path, 2).unwrap_err(), MetricsError::Damaged { line: 2, .. }));
    }
}
