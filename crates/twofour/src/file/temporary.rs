//! The file behind an output that is not complete yet.
//!
//! On Linux the file has no name where the file system supports that (`O_TMPFILE`): the system frees it when the
//! process dies, however it dies, and [`Temporary::publish`] gives it its final name (`linkat`).
//!
//! Elsewhere it has a name between [`TEMP_PREFIX`] and [`TEMP_SUFFIX`], and the process holds a lock on it until it has
//! its final name. The system releases the lock when the process dies. So a file of such a name that can be locked is
//! stale, and [`remove_stale`] deletes it before the next output is begun in that directory.

use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io,
    path::Path,
};

use tempfile::TempPath;

use super::{Overwrite, writer::directory_of};

/// The beginning of the name of a file that is being written, where it needs a name. The end is [`TEMP_SUFFIX`]. A
/// killed process may leave such a file; the next output that is begun in the same directory removes it.
pub const TEMP_PREFIX: &str = ".twofour-";

/// The end of the name of a file that is being written.
pub const TEMP_SUFFIX: &str = ".tmp";

/// A file that disappears unless it is published.
#[derive(Debug)]
pub(super) struct Temporary {
    file: File,
    /// `None` for a file without a name.
    name: Option<TempPath>,
}

impl Temporary {
    /// Creates an empty file on the file system of `directory`, and removes stale ones from there.
    pub(super) fn create_in(directory: &Path) -> io::Result<Self> {
        remove_stale(directory);
        match unnamed(directory) {
            Some(file) => Ok(Temporary { file, name: None }),
            None => Self::named(directory),
        }
    }

    /// Creates a locked file with a temporary name.
    pub(super) fn named(directory: &Path) -> io::Result<Self> {
        loop {
            let (file, name) = builder().tempfile_in(directory)?.into_parts();
            let ours = match file.try_lock() {
                // `remove_stale` in another process may have locked and deleted the file before we locked it.
                Ok(()) => fs::symlink_metadata(&name).is_ok(),
                Err(fs::TryLockError::WouldBlock) => false,
                // Without locks on this file system, `remove_stale` cannot lock the file either, and leaves it alone.
                Err(fs::TryLockError::Error(_)) => true,
            };
            if ours {
                return Ok(Temporary { file, name: Some(name) });
            }
        }
    }

    /// The open file.
    pub(super) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// The open file, for writes that name their place.
    pub(super) fn as_file(&self) -> &File {
        &self.file
    }

    /// Moves the file to `path`, in one step. Its contents must be on the disk already.
    ///
    /// An error of kind [`io::ErrorKind::AlreadyExists`] means that `path` exists and `overwrite` does not allow to
    /// replace it.
    pub(super) fn publish(self, path: &Path, overwrite: Overwrite) -> io::Result<()> {
        // `file` lives, and with it the lock, until the final name is there.
        let Temporary { file, name } = self;
        match name {
            Some(name) => rename(name, path, overwrite),
            None => publish_unnamed(&file, path, overwrite),
        }
    }
}

/// Names for temporary files.
fn builder() -> tempfile::Builder<'static, 'static> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(TEMP_PREFIX).suffix(TEMP_SUFFIX);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        // The permissions of an ordinary new file, less the umask; tempfile's default is the owner's only.
        builder.permissions(fs::Permissions::from_mode(0o666));
    }
    builder
}

fn rename(name: TempPath, path: &Path, overwrite: Overwrite) -> io::Result<()> {
    match overwrite {
        Overwrite::Yes => name.persist(path),
        Overwrite::No => name.persist_noclobber(path),
    }
    .map_err(|e| e.error)
}

/// Whether this is the name of a file that is being written.
pub(super) fn is_temporary(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| name.starts_with(TEMP_PREFIX) && name.ends_with(TEMP_SUFFIX))
}

/// Deletes the files that killed processes have left in a directory; a file that a living process writes is locked and
/// stays. What cannot be deleted does no harm, so errors are ignored.
fn remove_stale(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        if !is_temporary(&name) || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        // For writing, because NFS grants an exclusive lock only then.
        let Ok(file) = OpenOptions::new().read(true).write(true).open(entry.path()) else { continue };
        if file.try_lock().is_ok() {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A file without a name that can be given one later, where the system has that.
#[cfg(target_os = "linux")]
fn unnamed(directory: &Path) -> Option<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o666).custom_flags(rustix::fs::OFlags::TMPFILE.bits().cast_signed());
    let file = options.open(directory).ok()?;
    // Without /proc it could not be linked later.
    fs::symlink_metadata(descriptor(&file)).is_ok().then_some(file)
}

#[cfg(not(target_os = "linux"))]
fn unnamed(_: &Path) -> Option<File> {
    None
}

/// The path of an open file, with or without a name.
#[cfg(target_os = "linux")]
fn descriptor(file: &File) -> std::path::PathBuf {
    use std::os::fd::AsRawFd;
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Gives a file without a name that name, unless it exists.
#[cfg(target_os = "linux")]
fn link(file: &File, path: &Path) -> io::Result<()> {
    use rustix::fs::{AtFlags, CWD, linkat};
    Ok(linkat(CWD, descriptor(file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
}

#[cfg(not(target_os = "linux"))]
fn link(_: &File, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

fn publish_unnamed(file: &File, path: &Path, overwrite: Overwrite) -> io::Result<()> {
    match (link(file, path), overwrite) {
        (Ok(()), _) => Ok(()),
        (Err(e), Overwrite::No) if e.kind() == io::ErrorKind::AlreadyExists => Err(e),
        // linkat cannot replace a name. A process that is killed between the two steps leaves a complete, unlocked
        // file.
        (Err(e), Overwrite::Yes) if e.kind() == io::ErrorKind::AlreadyExists => {
            let _ = file.try_lock();
            let linked = builder().make_in(directory_of(path), |name| link(file, name))?;
            rename(linked.into_temp_path(), path, overwrite)
        }
        // A file system that has files without names and no hard links.
        (Err(_), _) => copy(file, directory_of(path))?.publish(path, overwrite),
    }
}

/// A named copy of a file, on the disk.
fn copy(mut file: &File, directory: &Path) -> io::Result<Temporary> {
    use io::Seek;
    let mut copy = Temporary::named(directory)?;
    file.rewind()?;
    io::copy(&mut file, copy.file())?;
    copy.file().sync_all()?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn entries(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Each kind of file: named, and without a name where this system has that.
    fn every_kind(directory: &Path) -> Vec<Temporary> {
        let mut kinds = vec![Temporary::named(directory).unwrap()];
        match unnamed(directory) {
            Some(file) => kinds.push(Temporary { file, name: None }),
            None => eprintln!("skipped in part: this file system has no files without a name"),
        }
        kinds
    }

    #[test]
    fn every_kind_is_published_in_one_step() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        for overwrite in [Overwrite::No, Overwrite::Yes] {
            for (kind, mut temporary) in every_kind(at).into_iter().enumerate() {
                let path = at.join(format!("{overwrite:?}{kind}"));
                if overwrite == Overwrite::Yes {
                    fs::write(&path, "old").unwrap();
                }
                temporary.file().write_all(b"new").unwrap();
                temporary.publish(&path, overwrite).unwrap();
                assert_eq!(fs::read(&path).unwrap(), b"new");
            }
            for (kind, temporary) in every_kind(at).into_iter().enumerate() {
                let path = at.join(format!("{overwrite:?}{kind}"));
                let error = temporary.publish(&path, Overwrite::No).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
                assert_eq!(fs::read(&path).unwrap(), b"new");
            }
        }
        assert!(entries(at).iter().all(|name| !name.starts_with(TEMP_PREFIX)), "{:?}", entries(at));
    }

    #[test]
    fn a_copy_has_the_contents_and_a_name() {
        let directory = tempfile::tempdir().unwrap();
        for (kind, mut temporary) in every_kind(directory.path()).into_iter().enumerate() {
            temporary.file().write_all(b"contents").unwrap();
            let path = directory.path().join(kind.to_string());
            copy(temporary.file(), directory.path()).unwrap().publish(&path, Overwrite::No).unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"contents");
        }
    }

    #[test]
    fn stale_files_go_and_live_ones_stay() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        let live = Temporary::named(at).unwrap();
        let other = [".twofour-directory.tmp", ".twofour-x", "x.tmp"];
        fs::create_dir(at.join(other[0])).unwrap();
        fs::write(at.join(other[1]), "").unwrap();
        fs::write(at.join(other[2]), "").unwrap();
        fs::write(at.join(".twofour-stale.tmp"), "").unwrap();
        assert_eq!(entries(at).len(), 5);
        let another = Temporary::create_in(at).unwrap();
        let left = entries(at);
        assert!(!left.contains(&".twofour-stale.tmp".to_owned()), "{left:?}");
        assert!(other.iter().all(|name| left.contains(&(*name).to_owned())), "{left:?}");
        live.publish(&at.join("out"), Overwrite::No).unwrap();
        drop(another);
        assert_eq!(entries(at).len(), 4);
    }

    const DIRECTORY: &str = "TWOFOUR_TEST_NAMED_IN";

    /// The lock of a process that is killed is released, and the next output removes the file.
    #[test]
    #[cfg(unix)]
    #[cfg_attr(miri, ignore = "starts a process")]
    fn a_named_file_of_a_killed_process_is_removed_by_the_next_output() {
        let directory = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "file::temporary::tests::holding_a_named_file", "--ignored"])
            .env(DIRECTORY, directory.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let began = std::time::Instant::now();
        while !directory.path().join("ready").exists() {
            assert!(began.elapsed() < std::time::Duration::from_secs(60), "the child does not begin");
            assert!(child.try_wait().unwrap().is_none(), "the child ended");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        drop(Temporary::create_in(directory.path()).unwrap());
        assert_eq!(entries(directory.path()).len(), 2, "the file of a living process was removed");
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(entries(directory.path()).len(), 2);
        drop(Temporary::create_in(directory.path()).unwrap());
        assert_eq!(entries(directory.path()), ["ready"]);
    }

    #[test]
    #[ignore = "run by a_named_file_of_a_killed_process_is_removed_by_the_next_output, and killed"]
    fn holding_a_named_file() {
        let Some(directory) = std::env::var_os(DIRECTORY) else { return };
        let directory = Path::new(&directory);
        let _held = Temporary::named(directory).unwrap();
        fs::write(directory.join("ready"), "").unwrap();
        std::thread::sleep(std::time::Duration::from_secs(120));
    }
}
