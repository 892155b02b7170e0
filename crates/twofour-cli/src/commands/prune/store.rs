//! Parts of weights on disk, in one file without a name: the system frees it when the process ends, however it ends.

use std::{
    cell::Cell,
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use bytemuck::Pod;
use twofour::{Error, Result};

/// A file that grows, on the file system of the output.
#[derive(Debug)]
pub(super) struct Store {
    directory: PathBuf,
    file: File,
    end: Cell<u64>,
}

/// Where something lies in a [`Store`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    begin: u64,
    bytes: usize,
}

impl Store {
    /// An empty store on the file system of `directory`.
    pub(super) fn create_in(directory: &Path) -> Result<Self> {
        let failed = |source| Error::Io {
            path: directory.to_owned(),
            action: "making a temporary file for adjusted weights there",
            source,
        };
        let file = tempfile::tempfile_in(directory).map_err(failed)?;
        Ok(Store { directory: directory.to_owned(), file, end: Cell::new(0) })
    }

    /// Appends bytes.
    pub(super) fn write(&self, bytes: &[u8]) -> Result<Place> {
        let (place, mut file) = (Place { begin: self.end.get(), bytes: bytes.len() }, &self.file);
        let outcome = file.seek(SeekFrom::Start(place.begin)).and_then(|_| file.write_all(bytes));
        outcome.map_err(|source| self.failed("writing an adjusted weight to a temporary file there", source))?;
        self.end.set(place.begin + bytes.len() as u64);
        Ok(place)
    }

    /// Reads what was written, as elements.
    pub(super) fn read<T: Pod>(&self, place: Place) -> Result<Vec<T>> {
        let (mut bytes, mut file) = (vec![0; place.bytes], &self.file);
        let outcome = file.seek(SeekFrom::Start(place.begin)).and_then(|_| file.read_exact(&mut bytes));
        outcome.map_err(|source| self.failed("reading an adjusted weight from a temporary file there", source))?;
        Ok(bytemuck::allocation::pod_collect_to_vec(&bytes))
    }

    fn failed(&self, action: &'static str, source: std::io::Error) -> Error {
        Error::Io { path: self.directory.clone(), action, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_in_any_order_and_the_directory_stays_empty() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::create_in(directory.path()).unwrap();
        let (floats, none) = ([1.5f32, -0.0, f32::NAN], store.write(&[]).unwrap());
        let a = store.write(bytemuck::cast_slice(&floats)).unwrap();
        let b = store.write(&[7, 8, 255]).unwrap();
        assert_eq!(store.read::<i8>(b).unwrap(), [7, 8, -1]);
        let read: Vec<u32> = store.read(a).unwrap();
        assert_eq!(read, floats.map(f32::to_bits));
        assert!(store.read::<f32>(none).unwrap().is_empty());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        assert!(Store::create_in(&directory.path().join("absent")).unwrap_err().to_string().contains("absent"));
    }
}
