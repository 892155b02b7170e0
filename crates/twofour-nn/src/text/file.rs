//! Text files.

use std::{
    fs::{self, File, FileType},
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError, mpsc},
    thread,
    time::Duration,
};

use super::TextError;
use crate::Result;

/// A file of text, of which parts are read when they are needed. A stream, such as a pipe, is read when it is opened.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("text.txt");
/// # std::fs::write(&path, "two of every four")?;
/// let text = twofour_nn::text::TextFile::open(&path, &|| false)?;
/// assert_eq!((text.bytes(), text.read(7..12, &|| false)?), (17, b"every".to_vec()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TextFile {
    path: PathBuf,
    source: Source,
    bytes: u64,
}

#[derive(Debug)]
enum Source {
    File(Mutex<File>),
    Memory(Vec<u8>),
}

impl TextFile {
    /// The most bytes of a stream.
    pub const MAX_STREAM: u64 = 256 << 20;

    /// Bytes that are read at once.
    const PART: usize = 1 << 20;

    /// Opens a file, or reads a stream to its end. `stop` is asked again and again, and ends the reading where it is
    /// true.
    ///
    /// # Errors
    /// [`TextError`] for a path that is no file and no stream, or a stream of more than [`TextFile::MAX_STREAM`] bytes;
    /// [`twofour::Error::Interrupted`].
    pub fn open(path: impl AsRef<Path>, stop: &dyn Fn() -> bool) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let io = |source| TextError::Io { path: path.clone(), source };
        let metadata = fs::metadata(&path).map_err(io)?;
        if let Some(kind) = unreadable(metadata.file_type()) {
            let reason = format!("{kind}, where a file of text is required");
            return Err(TextError::NotText { path, reason }.into());
        }
        // The system's own files have no length.
        if metadata.is_file() && metadata.len() > 0 {
            let source = Source::File(Mutex::new(File::open(&path).map_err(io)?));
            return Ok(TextFile { path, source, bytes: metadata.len() });
        }
        let read = stream(&path, stop)?;
        Ok(TextFile { path, bytes: read.len() as u64, source: Source::Memory(read) })
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of the file. `stop` is as in [`TextFile::open`].
    ///
    /// # Errors
    /// [`TextError`] for bytes that are not there, or not enough memory for them; [`twofour::Error::Interrupted`].
    pub fn read(&self, range: Range<u64>, stop: &dyn Fn() -> bool) -> Result<Vec<u8>> {
        let io = |source| TextError::Io { path: self.path.clone(), source };
        if range.start > range.end || range.end > self.bytes {
            let beyond = io::Error::new(io::ErrorKind::UnexpectedEof, "bytes beyond its end");
            return Err(io(beyond).into());
        }
        let bytes = range.end - range.start;
        let memory = || TextError::Memory { path: self.path.clone(), bytes };
        let length = usize::try_from(bytes).map_err(|_| memory())?;
        let mut read = vec![];
        read.try_reserve_exact(length).map_err(|_| memory())?;
        match &self.source {
            Source::Memory(all) => read.extend_from_slice(&all[range.start as usize..range.end as usize]),
            Source::File(file) => {
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                file.seek(SeekFrom::Start(range.start)).map_err(io)?;
                while read.len() < length {
                    expect_no(stop)?;
                    let part = (length - read.len()).min(Self::PART) as u64;
                    if (&mut *file).take(part).read_to_end(&mut read).map_err(io)? == 0 {
                        let short = io::Error::new(io::ErrorKind::UnexpectedEof, "it became shorter while it was read");
                        return Err(io(short).into());
                    }
                }
            }
        }
        Ok(read)
    }

    /// The whole text. `stop` is as in [`TextFile::open`].
    ///
    /// # Errors
    /// Those of [`TextFile::read`]; more than `most` bytes, none, or bytes that are no UTF-8.
    pub fn text(&self, most: u64, stop: &dyn Fn() -> bool) -> Result<String> {
        let not = |reason: String| TextError::NotText { path: self.path.clone(), reason };
        if self.bytes > most {
            let reason = format!("{} bytes of text, more than the {most} that are read; give a part of it", self.bytes);
            return Err(not(reason).into());
        }
        if self.bytes == 0 {
            return Err(not("the text is empty".to_owned()).into());
        }
        let read = self.read(0..self.bytes, stop)?;
        String::from_utf8(read).map_err(|error| self.no_utf8(error.utf8_error().valid_up_to() as u64).into())
    }

    /// Bytes of the file as text, without those at either end that belong to a character which the range cuts, and
    /// where they begin.
    ///
    /// # Errors
    /// Those of [`TextFile::read`]; bytes that are no UTF-8.
    pub fn characters(&self, range: Range<u64>, stop: &dyn Fn() -> bool) -> Result<(String, u64)> {
        let (begin, end) = (range.start, range.end);
        let mut read = self.read(range, stop)?;
        let is_continued = |byte: &&u8| **byte & 0b1100_0000 == 0b1000_0000;
        let skipped = if begin == 0 { 0 } else { read.iter().take(3).take_while(is_continued).count() };
        read.drain(..skipped);
        let begin = begin + skipped as u64;
        match String::from_utf8(read) {
            Ok(text) => Ok((text, begin)),
            Err(error) => {
                let fault = error.utf8_error();
                if fault.error_len().is_some() || end == self.bytes {
                    return Err(self.no_utf8(begin + fault.valid_up_to() as u64).into());
                }
                let mut read = error.into_bytes();
                read.truncate(fault.valid_up_to());
                let text = String::from_utf8(read).map_err(|_| self.no_utf8(begin))?;
                Ok((text, begin))
            }
        }
    }

    fn no_utf8(&self, byte: u64) -> TextError {
        let reason = format!("not UTF-8 at byte {byte}, where text in UTF-8 is required");
        TextError::NotText { path: self.path.clone(), reason }
    }
}

/// What a path names that no text is read from.
fn unreadable(kind: FileType) -> Option<&'static str> {
    if kind.is_dir() {
        return Some("a directory");
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt as _;
        if kind.is_char_device() || kind.is_block_device() {
            return Some("a device");
        }
        if kind.is_socket() {
            return Some("a socket");
        }
    }
    None
}

fn expect_no(stop: &dyn Fn() -> bool) -> Result<()> {
    if stop() { Err(twofour::Error::Interrupted.into()) } else { Ok(()) }
}

/// Everything that a stream has, which may take as long as its writer likes.
fn stream(path: &Path, stop: &dyn Fn() -> bool) -> Result<Vec<u8>> {
    let io = |source| TextError::Io { path: path.to_owned(), source };
    let (sender, parts) = mpsc::sync_channel::<io::Result<Vec<u8>>>(1);
    let own = path.to_owned();
    // A read that waits cannot be ended: the thread is left alone with it.
    let read = move || {
        let mut file = match File::open(own) {
            Ok(file) => file,
            Err(error) => return drop(sender.send(Err(error))),
        };
        loop {
            let mut part = vec![];
            let read = (&mut file).take(TextFile::PART as u64).read_to_end(&mut part).map(|_| part);
            let is_last = read.as_ref().map_or(true, Vec::is_empty);
            if sender.send(read).is_err() || is_last {
                return;
            }
        }
    };
    let started = thread::Builder::new().name("text".to_owned()).spawn(read);
    started.map_err(|error| TextError::NotText {
        path: path.to_owned(),
        reason: format!("the thread that reads a stream does not start: {error}; write it to a file"),
    })?;
    let mut all: Vec<u8> = vec![];
    loop {
        expect_no(stop)?;
        match parts.recv_timeout(Duration::from_millis(50)) {
            Ok(part) => {
                let part = part.map_err(io)?;
                let bytes = (all.len() + part.len()) as u64;
                if bytes > TextFile::MAX_STREAM {
                    let reason = format!(
                        "a stream of more than {} bytes; write it to a file, of which parts are read",
                        TextFile::MAX_STREAM
                    );
                    return Err(TextError::NotText { path: path.to_owned(), reason }.into());
                }
                all.try_reserve(part.len()).map_err(|_| TextError::Memory { path: path.to_owned(), bytes })?;
                all.extend(part);
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return Ok(all),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(content: &[u8]) -> (tempfile::TempDir, TextFile) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text.txt");
        fs::write(&path, content).unwrap();
        let text = TextFile::open(path, &|| false).unwrap();
        (folder, text)
    }

    #[test]
    fn parts_are_read_whole_characters_at_a_time() {
        let content = "aä€😀b".repeat(3);
        let (_folder, text) = text(content.as_bytes());
        assert_eq!(text.text(1 << 10, &|| false).unwrap(), content);
        for begin in 0..content.len() {
            for end in begin..=content.len() {
                let (found, at) = text.characters(begin as u64..end as u64, &|| false).unwrap();
                let is_inside = |(place, c): &(usize, char)| *place >= begin && place + c.len_utf8() <= end;
                let expected: Vec<(usize, char)> = content.char_indices().filter(is_inside).collect();
                assert_eq!(found, expected.iter().map(|(_, c)| *c).collect::<String>(), "{begin}..{end}");
                assert!(expected.first().is_none_or(|(place, _)| *place as u64 == at), "{begin}..{end}");
            }
        }
        assert!(text.read(0..content.len() as u64 + 1, &|| false).is_err());
    }

    #[test]
    fn what_is_no_text_is_said_with_its_place() {
        let (folder, damaged) = text(b"abc\xFFdef");
        for error in [damaged.text(99, &|| false).unwrap_err(), damaged.characters(0..7, &|| false).unwrap_err()] {
            assert!(error.to_string().contains("not UTF-8 at byte 3"), "{error}");
        }
        let error = damaged.text(6, &|| false).unwrap_err().to_string();
        assert!(error.contains("7 bytes of text, more than the 6"), "{error}");
        let error = TextFile::open(folder.path(), &|| false).unwrap_err().to_string();
        assert!(error.contains("a directory"), "{error}");
        assert!(TextFile::open(folder.path().join("absent"), &|| false).is_err());
        assert!(text(b"").1.text(9, &|| false).unwrap_err().to_string().contains("empty"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn devices_are_refused_and_streams_end() {
        let error = TextFile::open("/dev/zero", &|| false).unwrap_err().to_string();
        assert!(error.contains("a device"), "{error}");
        // A file of the system has no length.
        let version = TextFile::open("/proc/version", &|| false).unwrap();
        assert_eq!(version.text(1 << 16, &|| false).unwrap(), fs::read_to_string("/proc/version").unwrap());
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_is_read_to_its_end_and_one_without_a_writer_can_be_left() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = |name: &str| {
            let path = folder.path().join(name);
            std::process::Command::new("mkfifo").arg(&path).status().is_ok_and(|made| made.success()).then_some(path)
        };
        let (Some(lonely), Some(path)) = (pipe("lonely"), pipe("pipe")) else {
            eprintln!("skipped: there is no mkfifo");
            return;
        };
        let asked = std::cell::Cell::new(0);
        let stop = || {
            asked.set(asked.get() + 1);
            asked.get() > 2
        };
        let error = TextFile::open(&lonely, &stop).unwrap_err();
        assert!(matches!(error, crate::Error::Core(twofour::Error::Interrupted)), "{error}");
        let content = "two of every four ".repeat(100_000);
        let (own, expected) = (path.clone(), content.clone());
        let writer = thread::spawn(move || fs::write(own, content));
        let read = TextFile::open(&path, &|| false).unwrap();
        writer.join().unwrap().unwrap();
        assert!(read.text(1 << 30, &|| false).unwrap() == expected);
    }
}
