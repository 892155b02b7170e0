//! An on-disk cache of machine code: each source is compiled once per architecture and compiler.
//!
//! A file begins with its contents' SHA-256, and its name depends on all inputs of the contents. A damaged file is
//! ignored. Files are written under a temporary name and renamed, so that processes that compile the same kernel
//! concurrently do not interfere.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};
use twofour::file::{Overwrite, write_whole};

use crate::{
    Architecture, Error, Result,
    compiler::{Compiled, Compiler},
    source::Source,
};

/// The version of the cache: it must change when the files' layout or the compiler's options change.
const VERSION: u32 = 1;

/// A folder of machine code.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// Returns a cache in a folder, which is created when code is stored.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Returns the user's cache: `TWOFOUR_CACHE`, or `twofour` in `XDG_CACHE_HOME`, in `~/.cache`, or in the folder for
    /// temporary files.
    pub fn of_user() -> Self {
        let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = variable("TWOFOUR_CACHE").unwrap_or_else(|| {
            let home = variable("HOME").map(|home| home.join(".cache"));
            variable("XDG_CACHE_HOME").or(home).unwrap_or_else(std::env::temp_dir).join("twofour")
        });
        Self { folder }
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the machine code of a source that is on disk, undamaged. Without a compiler, code compiled by any
    /// version is accepted.
    pub fn get(&self, source: &Source, architecture: Architecture) -> Option<Vec<u8>> {
        match Compiler::find() {
            Some(compiler) => read(&self.path(source, architecture, &version(compiler))),
            None => self.of_any_compiler(source, architecture),
        }
    }

    /// Returns the machine code of a source, from disk as [`Cache::get`], or compiled and stored.
    ///
    /// If the folder is read-only or full, code is not stored and the next call compiles again.
    ///
    /// # Errors
    /// [`Error::NoCompiler`] where the code must be compiled and there is no compiler; [`Error::Compile`].
    pub fn code(&self, source: &Source, architecture: Architecture) -> Result<Vec<u8>> {
        if let Some(code) = self.get(source, architecture) {
            return Ok(code);
        }
        let compiler = Compiler::find().ok_or(Error::NoCompiler { kernel: source.name().to_owned(), architecture })?;
        let code = compiler.compile(source, architecture)?.code;
        // A process that cannot store code compiles again next time.
        let _ = self.keep(source, architecture, compiler, &code);
        Ok(code)
    }

    /// Compiles a source, regardless of the cache, and stores the code.
    ///
    /// # Errors
    /// [`Error::NoCompiler`], [`Error::Compile`], and [`Error::Io`] and [`Error::Core`] where the file cannot be
    /// written.
    pub fn compile(&self, source: &Source, architecture: Architecture) -> Result<Compiled> {
        let compiler = Compiler::find().ok_or(Error::NoCompiler { kernel: source.name().to_owned(), architecture })?;
        let compiled = compiler.compile(source, architecture)?;
        self.keep(source, architecture, compiler, &compiled.code)?;
        Ok(compiled)
    }

    fn keep(&self, source: &Source, architecture: Architecture, compiler: Compiler, code: &[u8]) -> Result<()> {
        let path = self.path(source, architecture, &version(compiler));
        let failed = |source| Error::Io { path: self.folder.clone(), action: "creating", source };
        std::fs::create_dir_all(&self.folder).map_err(failed)?;
        Ok(write_whole(path, Overwrite::Yes, &[Sha256::digest(code).as_slice(), code].concat())?)
    }

    fn of_any_compiler(&self, source: &Source, architecture: Architecture) -> Option<Vec<u8>> {
        let start = stem(source, architecture);
        let mut paths: Vec<PathBuf> = std::fs::read_dir(&self.folder).ok()?.flatten().map(|file| file.path()).collect();
        paths.retain(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&start)));
        paths.sort();
        paths.iter().rev().find_map(|path| read(path))
    }

    fn path(&self, source: &Source, architecture: Architecture, version: &str) -> PathBuf {
        self.folder.join(format!("{}{version}.cubin", stem(source, architecture)))
    }
}

fn stem(source: &Source, architecture: Architecture) -> String {
    let digest: String = source.digest()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{architecture}-{digest}-v{VERSION}-", source.name())
}

fn version(compiler: Compiler) -> String {
    let (major, minor) = compiler.version();
    format!("nvrtc{major:03}.{minor:03}")
}

/// Returns the contents of a file whose checksum is correct.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    let code = bytes.split_off(bytes.len().min(32));
    (!code.is_empty() && Sha256::digest(&code)[..] == bytes[..]).then_some(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keep(cache: &Cache, code: &[u8]) -> PathBuf {
        let path = cache.path(&one(), Architecture::SM_90, "nvrtc013.000");
        std::fs::create_dir_all(cache.folder()).unwrap();
        let mut file = Sha256::digest(code).to_vec();
        file.extend(code);
        std::fs::write(&path, file).unwrap();
        path
    }

    fn one() -> Source {
        Source::new("one".into(), crate::source::Support::ALL).define("__global__ void one() {}")
    }

    #[test]
    fn damaged_files_are_as_good_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("deep/down"));
        let path = keep(&cache, b"machine code");
        assert_eq!(read(&path).unwrap(), b"machine code");
        let whole = std::fs::read(&path).unwrap();
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert_eq!(read(&path), None, "cut to {len}");
        }
        for byte in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[byte] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(read(&path), None, "byte {byte}");
        }
    }

    #[test]
    fn without_a_compiler_the_newest_code_will_do() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path());
        assert_eq!(cache.of_any_compiler(&one(), Architecture::SM_90), None);
        keep(&cache, b"old");
        let newer = cache.path(&one(), Architecture::SM_90, "nvrtc013.002");
        std::fs::rename(keep(&cache, b"new"), &newer).unwrap();
        keep(&cache, b"old");
        assert_eq!(cache.of_any_compiler(&one(), Architecture::SM_90).unwrap(), b"new");
        std::fs::write(&newer, b"damaged").unwrap();
        assert_eq!(cache.of_any_compiler(&one(), Architecture::SM_90).unwrap(), b"old");
        assert_eq!(cache.of_any_compiler(&one(), Architecture::SM_80), None);
    }
}
