//! Files of images and of their labels in the IDX format, MNIST's (LeCun, Cortes and Burges).

use std::{
    fs::File,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
};

use flate2::bufread::MultiGzDecoder;

/// What is wrong with an IDX file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdxError {
    /// It cannot be read, or its gzip stream is damaged.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: std::io::Error,
    },
    /// It does not begin with an IDX file's number.
    #[error("{}: begins with {found:02x?}, and {what} begin with {expected}; name an IDX file, as it is or in \
             gzip", path.display())]
    Magic {
        /// The file.
        path: PathBuf,
        /// Images or labels.
        what: &'static str,
        /// What such files begin with.
        expected: &'static str,
        /// The first bytes.
        found: Vec<u8>,
    },
    /// Its sizes are zero or absurd.
    #[error("{}: its sizes are {sizes:?}; expected from 1 to 2^40 values", path.display())]
    Sizes {
        /// The file.
        path: PathBuf,
        /// The sizes.
        sizes: Vec<u32>,
    },
    /// It has another length than its sizes require.
    #[error("{}: {found} bytes after the sizes {sizes:?}, which require {expected}; the file is \
             {}", path.display(), if found < expected { "truncated" } else { "longer than an IDX file" })]
    Length {
        /// The file.
        path: PathBuf,
        /// The sizes.
        sizes: Vec<u32>,
        /// Bytes that they require.
        expected: u64,
        /// Bytes that are there; one more than required where there are more.
        found: u64,
    },
    /// Images and labels of different numbers.
    #[error("{} has {images} images, and {} has {labels} labels; expected one label for each \
             image", images_path.display(), labels_path.display())]
    Counts {
        /// The file of images.
        images_path: PathBuf,
        /// Their number.
        images: usize,
        /// The file of labels.
        labels_path: PathBuf,
        /// Their number.
        labels: usize,
    },
    /// A label that is no class.
    #[error("{}: label {label} of image {index}, but there are {classes} classes, from 0", path.display())]
    Label {
        /// The file of labels.
        path: PathBuf,
        /// The label.
        label: u8,
        /// Its place, from 0.
        index: usize,
        /// Number of classes.
        classes: usize,
    },
}

/// The most values of a file.
const MOST: u64 = 1 << 40;

/// The contents of an IDX file of bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Idx {
    /// The sizes, from the slowest to the fastest.
    pub sizes: Vec<usize>,
    /// The values.
    pub values: Vec<u8>,
}

impl Idx {
    /// Reads a file of images: `[images, rows, columns]`, or `[images, rows, columns, channels]`, as it is or in gzip.
    ///
    /// # Errors
    /// A file that cannot be read, is no such file, or has another length than its sizes require.
    pub fn images(path: &Path) -> Result<Self, IdxError> {
        Self::images_from(open(path)?, path)
    }

    /// Reads a file of labels: `[images]`, as it is or in gzip.
    ///
    /// # Errors
    /// Those of [`Idx::images`].
    pub fn labels(path: &Path) -> Result<Self, IdxError> {
        Self::labels_from(open(path)?, path)
    }

    /// [`Idx::images`], from the contents of a file; `path` is for errors.
    ///
    /// # Errors
    /// Those of [`Idx::images`].
    pub fn images_from(contents: impl BufRead, path: &Path) -> Result<Self, IdxError> {
        Self::read(contents, path, ("images", "00 00 08 03 or 00 00 08 04"), &[3, 4])
    }

    /// [`Idx::labels`], from the contents of a file; `path` is for errors.
    ///
    /// # Errors
    /// Those of [`Idx::images`].
    pub fn labels_from(contents: impl BufRead, path: &Path) -> Result<Self, IdxError> {
        Self::read(contents, path, ("labels", "00 00 08 01"), &[1])
    }

    fn read(
        mut contents: impl BufRead,
        path: &Path,
        kind: (&'static str, &'static str),
        dimensions: &[u8],
    ) -> Result<Self, IdxError> {
        let start = contents.fill_buf().map_err(|source| IdxError::Io { path: path.to_owned(), source })?;
        match start.starts_with(&[0x1F, 0x8B]) {
            true => Self::parse(path, MultiGzDecoder::new(contents), kind, dimensions),
            false => Self::parse(path, contents, kind, dimensions),
        }
    }

    /// Reads a file's contents; `path` is for errors. Memory grows with what is there, not with what the sizes say.
    fn parse(
        path: &Path,
        mut from: impl Read,
        (what, expected): (&'static str, &'static str),
        dimensions: &[u8],
    ) -> Result<Self, IdxError> {
        let io = |source| IdxError::Io { path: path.to_owned(), source };
        let mut start = Vec::new();
        from.by_ref().take(4).read_to_end(&mut start).map_err(io)?;
        let count = match *start {
            [0, 0, 8, count] if dimensions.contains(&count) => usize::from(count),
            _ => return Err(IdxError::Magic { path: path.to_owned(), what, expected, found: start }),
        };
        let mut header = Vec::new();
        from.by_ref().take(4 * count as u64).read_to_end(&mut header).map_err(io)?;
        let sizes: Vec<u32> = header.as_chunks::<4>().0.iter().map(|bytes| u32::from_be_bytes(*bytes)).collect();
        if sizes.len() < count {
            let (expected, found) = (4 * count as u64, header.len() as u64);
            return Err(IdxError::Length { path: path.to_owned(), sizes, expected, found });
        }
        let product = sizes.iter().try_fold(1u64, |all, size| all.checked_mul(u64::from(*size)));
        let Some(expected) = product.filter(|values| (1..=MOST).contains(values)) else {
            return Err(IdxError::Sizes { path: path.to_owned(), sizes });
        };
        let mut values = Vec::new();
        from.take(expected + 1).read_to_end(&mut values).map_err(io)?;
        if values.len() as u64 != expected {
            let found = values.len() as u64;
            return Err(IdxError::Length { path: path.to_owned(), sizes, expected, found });
        }
        Ok(Idx { sizes: sizes.into_iter().map(|size| size as usize).collect(), values })
    }
}

fn open(path: &Path) -> Result<BufReader<File>, IdxError> {
    File::open(path).map(BufReader::new).map_err(|source| IdxError::Io { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn idx(kind: u8, sizes: &[u32], values: &[u8]) -> Vec<u8> {
        let sizes = sizes.iter().flat_map(|size| size.to_be_bytes());
        [0, 0, 8, kind].into_iter().chain(sizes).chain(values.iter().copied()).collect()
    }

    fn images(bytes: &[u8]) -> Result<Idx, IdxError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        Idx::images(file.path())
    }

    #[test]
    fn plain_and_gzip_files_are_read() {
        let bytes = idx(3, &[2, 1, 3], &[1, 2, 3, 4, 5, 6]);
        let mut gzip = flate2::write::GzEncoder::new(vec![], flate2::Compression::default());
        gzip.write_all(&bytes).unwrap();
        for bytes in [bytes, gzip.finish().unwrap()] {
            assert_eq!(images(&bytes).unwrap(), Idx { sizes: vec![2, 1, 3], values: vec![1, 2, 3, 4, 5, 6] });
        }
    }

    #[test]
    fn damaged_files_are_refused_by_what_is_wrong() {
        let good = idx(3, &[2, 1, 3], &[1, 2, 3, 4, 5, 6]);
        for cut in 4..good.len() {
            assert!(matches!(images(&good[..cut]), Err(IdxError::Length { .. })), "{cut}");
        }
        assert!(matches!(images(&good[..3]), Err(IdxError::Magic { .. })));
        assert!(matches!(images(&[good.as_slice(), &[0]].concat()), Err(IdxError::Length { .. })));
        assert!(matches!(images(b"P5 28 28 255"), Err(IdxError::Magic { .. })));
        assert!(matches!(images(&idx(1, &[2], &[0, 1])), Err(IdxError::Magic { what: "images", .. })));
        assert!(matches!(images(&idx(3, &[0, 28, 28], &[])), Err(IdxError::Sizes { .. })));
        assert!(matches!(images(&idx(4, &[u32::MAX; 4], &[])), Err(IdxError::Sizes { .. })));
        // Sizes of a TiB, and no values: nothing is allocated by them.
        assert!(matches!(images(&idx(3, &[1 << 20, 1 << 10, 1 << 10], &[])), Err(IdxError::Length { .. })));
        let mut gzip = flate2::write::GzEncoder::new(vec![], flate2::Compression::default());
        gzip.write_all(&good).unwrap();
        let gzip = gzip.finish().unwrap();
        assert!(matches!(images(&gzip[..gzip.len() - 9]), Err(IdxError::Io { .. })));
        assert!(matches!(Idx::images("absent".as_ref()), Err(IdxError::Io { .. })));
    }
}
