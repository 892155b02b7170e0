//! Loads NVIDIA's libraries and looks up their functions at run time.
//!
//! The functions that this crate calls are declared by hand from NVIDIA's documentation. Their interface is the same in
//! CUDA 11.8, 12 and 13, so one build works with whichever version is installed.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

use libloading::Library;

/// Declares a library's functions, which return a status, and a constructor that looks all of them up.
macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),* $(,)?);)*) => {
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> std::ffi::c_int,)*
        }

        impl Functions {
            pub(super) fn of(library: &libloading::Library) -> Option<Self> {
                // SAFETY: the types are those of NVIDIA's header.
                unsafe { Some(Self { $($name: *library.get($symbol).ok()?,)* }) }
            }
        }
    };
}

pub(crate) use functions;

/// Returns a library's functions with these bodies, for tests without the library.
#[cfg(test)]
macro_rules! fake_functions {
    ($($name:ident($($argument:ty),* $(,)?) => $body:expr;)*) => {
        Functions {$(
            $name: {
                unsafe extern "C" fn $name($(_: $argument),*) -> std::ffi::c_int {
                    $body
                }
                $name
            },
        )*}
    };
}

#[cfg(test)]
pub(crate) use fake_functions;

/// A library that stays loaded, with its functions or another `T` that was looked up in it; `None` where it is not
/// installed.
pub(crate) type Loaded<T> = OnceLock<Option<(Library, T)>>;

/// Where a library is searched.
pub(crate) struct Search {
    /// An environment variable that may name its folder.
    pub(crate) variable: &'static str,
    /// The folder of the library's Python package, in `site-packages/nvidia`.
    pub(crate) package: &'static str,
    /// Names for the system's loader, in order of preference.
    pub(crate) names: &'static [&'static str],
    /// Prefix of the library's file name in a folder.
    pub(crate) file: &'static str,
    /// Prefixes of the names of files that the library loads by name: they are loaded before it.
    pub(crate) needs: &'static [&'static str],
}

impl Search {
    /// Loads the library at the first call, and returns what `look_up` finds in it.
    pub(crate) fn load_once<T>(
        &self,
        loaded: &'static Loaded<T>,
        look_up: impl FnOnce(&Library) -> Option<T>,
    ) -> Option<&'static T> {
        let load = || {
            let library = self.load()?;
            let found = look_up(&library)?;
            Some((library, found))
        };
        loaded.get_or_init(load).as_ref().map(|(_, found)| found)
    }

    /// Loads the library from the folder that the variable names, or else by the system's loader, or else from a CUDA
    /// toolkit's folders (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`) or those of Python packages: of
    /// [`add_site_packages`], of `VIRTUAL_ENV`, of the interpreters on `PATH`, and beside other packages' libraries on
    /// `LD_LIBRARY_PATH`.
    fn load(&self) -> Option<Library> {
        let named = std::env::var_os(self.variable).map(PathBuf::from);
        named
            .and_then(|folder| self.load_from(&folder))
            .or_else(|| self.names.iter().find_map(open))
            .or_else(|| folders(self.package).iter().find_map(|folder| self.load_from(folder)))
    }

    /// Returns the places that are searched, for an error.
    pub(super) fn places(&self) -> String {
        let variable = match std::env::var_os(self.variable) {
            Some(folder) => format!("the folder {} ({})", Path::new(&folder).display(), self.variable),
            None => format!("the folder in {} (not set)", self.variable),
        };
        let names = format!("the system's loader for {}", self.names.join(" and "));
        let folders = folders(self.package).into_iter().map(|folder| folder.display().to_string());
        [variable, names].into_iter().chain(folders).collect::<Vec<_>>().join(", ")
    }

    /// Loads the library from a folder; of several versions the newest that loads.
    fn load_from(&self, folder: &Path) -> Option<Library> {
        let mut files: Vec<PathBuf> = std::fs::read_dir(folder).ok()?.flatten().map(|file| file.path()).collect();
        files.sort();
        let named = |prefix: &'static str| {
            let starts =
                move |path: &&PathBuf| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(prefix));
            files.iter().rev().filter(starts)
        };
        for needed in self.needs.iter().flat_map(|prefix| named(prefix)) {
            // It must stay loaded as long as the library, which is never unloaded.
            if let Some(library) = open(needed) {
                std::mem::forget(library);
            }
        }
        named(self.file).find_map(open)
    }
}

/// Returns whether the driver's library can be loaded. cudarc looks for these names in every version that it has
/// bindings for.
pub(crate) fn is_driver_present() -> bool {
    let names: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };
    names.iter().any(|name| open(name).is_some())
}

fn open(name: impl AsRef<std::ffi::OsStr>) -> Option<Library> {
    // SAFETY: loading NVIDIA's libraries runs only their own initializers.
    unsafe { Library::new(name.as_ref()) }.ok()
}

/// Returns folders that the system's loader does not search.
fn folders(package: &str) -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|v: &OsString| !v.is_empty()).map(PathBuf::from);
    let toolkits = [variable("CUDA_HOME"), variable("CUDA_PATH"), Some("/usr/local/cuda".into())].into_iter().flatten();
    let mut folders: Vec<PathBuf> = toolkits.map(|toolkit| toolkit.join("lib64")).collect();
    let added = site_packages().iter().map(|packages| packages.join("nvidia")).collect();
    let environment = variable("VIRTUAL_ENV").map(|environment| in_prefix(&environment)).unwrap_or_default();
    let paths = |name| variable(name).iter().flat_map(std::env::split_paths).collect::<Vec<PathBuf>>();
    let (interpreters, beside) = (of_interpreters(&paths("PATH")), beside_libraries(&paths("LD_LIBRARY_PATH")));
    for nvidia in [added, environment, interpreters, beside].concat() {
        for folder in of_packages(&nvidia, package) {
            if !folders.contains(&folder) {
                folders.push(folder);
            }
        }
    }
    folders
}

/// Returns the `nvidia` folders of the Python versions that are installed under a prefix.
fn in_prefix(prefix: &Path) -> Vec<PathBuf> {
    let mut versions: Vec<PathBuf> =
        std::fs::read_dir(prefix.join("lib")).into_iter().flatten().flatten().map(|version| version.path()).collect();
    versions.sort();
    let nvidia = |version: &PathBuf| ["site-packages", "dist-packages"].map(|kind| version.join(kind).join("nvidia"));
    versions.iter().flat_map(nvidia).filter(|folder| folder.is_dir()).collect()
}

/// Returns the `nvidia` folders of the Python interpreters in these folders of programs.
fn of_interpreters(programs: &[PathBuf]) -> Vec<PathBuf> {
    let has_python = |folder: &&PathBuf| ["python3", "python"].iter().any(|name| folder.join(name).is_file());
    programs.iter().filter(has_python).filter_map(|folder| folder.parent()).flat_map(in_prefix).collect()
}

/// Returns the `nvidia` folders around these folders of libraries: `…/nvidia` for `…/nvidia/cublas/lib`.
fn beside_libraries(folders: &[PathBuf]) -> Vec<PathBuf> {
    let nvidia = |folder: &PathBuf| folder.parent()?.parent().filter(|at| at.ends_with("nvidia")).map(Path::to_owned);
    folders.iter().filter_map(nvidia).collect()
}

/// Returns the library folders of a package in an `nvidia` folder: CUDA 13 has one for all packages, earlier versions
/// one for each.
fn of_packages(nvidia: &Path, package: &str) -> [PathBuf; 2] {
    ["cu13", package].map(|folder| nvidia.join(folder).join("lib"))
}

/// Python's folders that [`add_site_packages`] added.
static SITE_PACKAGES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn site_packages() -> MutexGuard<'static, Vec<PathBuf>> {
    SITE_PACKAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a `site-packages` folder in which NVIDIA's libraries are searched, as Python packages bring them: for a program
/// that a Python interpreter runs. It has no effect on libraries that were searched before.
pub fn add_site_packages(folder: impl Into<PathBuf>) {
    let (folder, mut folders) = (folder.into(), site_packages());
    if !folders.contains(&folder) {
        folders.push(folder);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    const SEARCH: Search = Search { variable: "", package: "", names: &[], file: "libc.so", needs: &["libm.so"] };

    #[test]
    fn a_folder_without_the_library_gives_none_and_one_with_it_the_newest_that_loads() {
        let folder = tempfile::tempdir().unwrap();
        assert!(SEARCH.load_from(&folder.path().join("missing")).is_none());
        assert!(SEARCH.load_from(folder.path()).is_none());
        // A damaged newer file is skipped.
        std::fs::write(folder.path().join("libc.so.7"), b"damaged").unwrap();
        assert!(SEARCH.load_from(folder.path()).is_none());
        let Some(libc) = loaded("libc.so.6") else { return };
        std::os::unix::fs::symlink(libc, folder.path().join("libc.so.6")).unwrap();
        assert!(SEARCH.load_from(folder.path()).is_some());
    }

    #[test]
    fn packages_are_found_of_interpreters_on_the_path_and_beside_other_libraries() {
        let prefix = tempfile::tempdir().unwrap();
        let nvidia = prefix.path().join("lib/python3.12/site-packages/nvidia");
        let (bin, cublas) = (prefix.path().join("bin"), nvidia.join("cublas/lib"));
        for folder in [&bin, &cublas, &nvidia.join("cusparselt/lib")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        assert!(of_interpreters(std::slice::from_ref(&bin)).is_empty());
        std::fs::write(bin.join("python3"), b"").unwrap();
        let found = of_interpreters(&[prefix.path().join("sbin"), bin]);
        assert_eq!(found, std::slice::from_ref(&nvidia));
        assert_eq!(beside_libraries(&[cublas, "/usr/lib".into(), "/".into()]), found);
        assert_eq!(in_prefix(prefix.path()), found);
        assert!(of_packages(&nvidia, "cusparselt").contains(&nvidia.join("cusparselt/lib")));
    }

    /// Returns the file of a library that this process has loaded.
    fn loaded(name: &str) -> Option<PathBuf> {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        maps.lines()
            .filter_map(|line| line.find('/').map(|at| PathBuf::from(&line[at..])))
            .find(|path| path.ends_with(name))
    }
}
