//! `metrics.jsonl` while it is written.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufWriter, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use twofour::file::{Overwrite, expect_replaceable, write_whole};

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
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// It cannot be replaced.
    #[error(transparent)]
    File(#[from] twofour::Error),
}

/// An append-only file with one JSON object for each step.
///
/// A run that goes on from a checkpoint cuts the file back to the checkpoint's step, and then writes the same lines
/// that the process before it wrote, or would have written, but for `tokens_per_s`.
#[derive(Debug)]
pub struct MetricsLog {
    path: PathBuf,
    file: BufWriter<File>,
}

impl MetricsLog {
    /// Opens the file, keeps the lines of the first `steps` steps, removes the others, and returns what it keeps. Lines
    /// that are damaged or missing are left out.
    ///
    /// # Errors
    /// Those of the file system and of [`expect_replaceable`].
    pub fn open(path: &Path, steps: u64) -> Result<(MetricsLog, Vec<StepMetrics>), MetricsError> {
        let io = |source| MetricsError::Io { path: path.to_owned(), source };
        expect_replaceable(path, Overwrite::Yes)?;
        let bytes = match fs::read(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
            read => read.map_err(io)?,
        };
        let (mut kept, mut lines) = (Vec::new(), Vec::<StepMetrics>::new());
        for line in bytes.split_inclusive(|byte| *byte == b'\n').filter(|line| line.ends_with(b"\n")) {
            let next = lines.last().map_or(0, |last| last.step + 1);
            let metrics = serde_json::from_slice::<StepMetrics>(line).ok();
            if let Some(metrics) = metrics.filter(|metrics| (next..steps).contains(&metrics.step)) {
                kept.extend_from_slice(line);
                lines.push(metrics);
            }
        }
        if !bytes.starts_with(&kept) {
            write_whole(path, Overwrite::Yes, &kept)?;
        }
        let mut file = OpenOptions::new().write(true).create(true).truncate(false).open(path).map_err(io)?;
        file.set_len(kept.len() as u64).and_then(|()| file.seek(SeekFrom::End(0))).map_err(io)?;
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
    fn damaged_lines_are_left_out_and_the_file_is_whole_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let whole: Vec<String> = (0..9).map(|n| serde_json::to_string(&step(n)).unwrap() + "\n").collect();
        let kept = |steps: u64| {
            let (mut log, lines) = MetricsLog::open(&path, steps).unwrap();
            log.append(&step(steps)).unwrap();
            log.sync().unwrap();
            let found = std::fs::read_to_string(&path).unwrap();
            let numbers: Vec<u64> = lines.iter().map(|line| line.step).collect();
            let expected = numbers.iter().chain([&steps]).map(|n| whole[*n as usize].as_str());
            assert_eq!(found, expected.collect::<String>());
            numbers
        };
        let write = |damage: &dyn Fn(&mut Vec<Vec<u8>>)| {
            let mut lines: Vec<Vec<u8>> = whole.iter().map(|line| line.clone().into_bytes()).collect();
            damage(&mut lines);
            std::fs::write(&path, lines.concat()).unwrap();
        };
        write(&|lines| lines[2][4] = 0);
        assert_eq!(kept(6), [0, 1, 3, 4, 5]);
        write(&|lines| lines[3] = b"\xFF\xFE{".to_vec());
        // The line after one that has lost its end is lost with it.
        assert_eq!(kept(6), [0, 1, 2, 5]);
        write(&|lines| lines.truncate(3));
        assert_eq!(kept(6), [0, 1, 2]);
        write(&|lines| lines.swap(1, 2));
        assert_eq!(kept(4), [0, 2, 3]);
        write(&|lines| lines.clear());
        assert!(kept(5).is_empty());
        std::fs::remove_file(&path).unwrap();
        assert!(kept(2).is_empty());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
