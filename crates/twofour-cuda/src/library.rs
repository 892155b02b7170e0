//! NVIDIA's libraries, which are found at run time.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

/// Whether a library is there, by `is_present`, which asks the system's loader. It is loaded first from the folder that `variable` names; if the
/// system does not find it, from a CUDA toolkit's or a Python environment's folders. `package` is the Python package's folder, and `files` are how
/// the names of its files begin, in the order that they need each other.
pub(crate) fn find(variable: &str, package: &str, files: &[&str], is_present: impl Fn() -> bool) -> bool {
    let named = std::env::var_os(variable).map(PathBuf::from);
    named.is_some_and(|folder| load_from(&folder, files) && is_present())
        || is_present()
        || folders(package).iter().any(|folder| load_from(folder, files) && is_present())
}

/// Folders that the system's loader does not look into.
fn folders(package: &str) -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|v: &OsString| !v.is_empty()).map(PathBuf::from);
    let toolkits = [variable("CUDA_HOME"), variable("CUDA_PATH"), Some("/usr/local/cuda".into())].into_iter().flatten();
    let mut folders: Vec<PathBuf> = toolkits.map(|toolkit| toolkit.join("lib64")).collect();
    let python = variable("VIRTUAL_ENV").map(|environment| environment.join("lib"));
    for version in python.iter().flat_map(std::fs::read_dir).flatten().flatten() {
        let packages = version.path().join("site-packages/nvidia");
        folders.extend(["cu13", package].map(|folder| packages.join(folder).join("lib")));
    }
    folders
}

/// Loads what a folder has of some files, after which the system's loader knows them by their names.
fn load_from(folder: &Path, files: &[&str]) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else { return false };
    let entries: Vec<PathBuf> = entries.flatten().map(|file| file.path()).collect();
    let starts = |path: &Path, prefix: &str| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(prefix));
    let mut any = false;
    for file in files {
        for path in entries.iter().filter(|path| starts(path, file)) {
            // SAFETY: loading NVIDIA's libraries runs only their own initializers.
            if let Ok(library) = unsafe { libloading::Library::new(path) } {
                // It stays loaded for good.
                std::mem::forget(library);
                any = true;
            }
        }
    }
    any
}
