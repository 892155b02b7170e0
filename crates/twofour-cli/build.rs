//! Gathers the project's own source and documents: the text that `twofour quickstart` trains on.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

fn main() -> io::Result<()> {
    let own = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or_else(|| io::Error::other("not run by cargo"))?);
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or_else(|| io::Error::other("not run by cargo"))?);
    // In the repository all crates and documents are there; in a published package, only this crate.
    let root = own.join("../..");
    let places = if root.join("crates").is_dir() {
        ["crates", "docs", "fuzz/fuzz_targets", "bench", "README.md", "CONTRIBUTING.md"].map(|p| root.join(p)).to_vec()
    } else {
        vec![own.join("src"), own.join("tests"), own.join("build.rs")]
    };
    let mut files = Vec::new();
    for place in places.iter().filter(|place| place.exists()) {
        println!("cargo::rerun-if-changed={}", place.display());
        collect(place, &mut files)?;
    }
    // The end of the text is for validation: in the order of their paths' hashes, all kinds of files are in both parts.
    files.sort_by_key(|path| (hash(path.strip_prefix(&root).unwrap_or(path)), path.clone()));
    let mut text = Vec::new();
    for path in files {
        text.extend(fs::read(path)?);
        text.push(b'\n');
    }
    fs::write(out.join("text"), text)
}

/// Adds the text files at and below a path.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if path.is_dir() {
        for entry in fs::read_dir(path)? {
            collect(&entry?.path(), files)?;
        }
    } else if path.extension().is_some_and(|e| ["rs", "md", "py", "toml"].iter().any(|known| e == *known)) {
        files.push(path.to_owned());
    }
    Ok(())
}

/// FNV-1a.
fn hash(path: &Path) -> u64 {
    let bytes = path.as_os_str().as_encoded_bytes();
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash: u64, &b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01B3))
}
