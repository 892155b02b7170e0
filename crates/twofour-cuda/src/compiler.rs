//! From a source to machine code for one architecture, by NVRTC, which is found at run time.

use std::{
    ffi::{CStr, CString, OsString, c_char},
    path::{Path, PathBuf},
    sync::OnceLock,
};

use cudarc::nvrtc::{result as nvrtc, sys};

use crate::{Architecture, Error, Result, source::Source};

/// Machine code for one architecture, and what the compiler said of it.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// A cubin.
    pub code: Vec<u8>,
    /// Registers, shared memory and spills of each kernel, and warnings.
    pub log: String,
}

impl Compiled {
    /// Lines of the log that a kernel fit to be released does not have: values spilled to memory, and warnings.
    pub fn complaints(&self) -> Vec<&str> {
        let complaint = |line: &&str| {
            line.contains("warning")
                || line.contains("spill") && !line.contains("0 bytes spill stores, 0 bytes spill loads")
        };
        self.log.lines().filter(complaint).collect()
    }
}

/// NVRTC, loaded.
#[derive(Debug, Clone, Copy)]
pub struct Compiler {
    version: (i32, i32),
}

impl Compiler {
    /// Finds NVRTC: in the folder that `TWOFOUR_NVRTC` names, where the system looks for libraries, and in a CUDA toolkit's or Python
    /// environment's folders (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`, `VIRTUAL_ENV`). `None` where it is nowhere.
    pub fn find() -> Option<Self> {
        static FOUND: OnceLock<Option<Compiler>> = OnceLock::new();
        *FOUND.get_or_init(|| {
            let named = std::env::var_os("TWOFOUR_NVRTC").map(PathBuf::from);
            let found = named.is_some_and(|folder| load_from(&folder))
                || is_present()
                || folders().iter().any(|f| load_from(f));
            if !found {
                return None;
            }
            let (mut major, mut minor) = (0, 0);
            // SAFETY: the library is loaded; both pointers are valid.
            unsafe { sys::nvrtcVersion(&mut major, &mut minor) }.result().ok()?;
            Some(Compiler { version: (major, minor) })
        })
    }

    /// Its version, as in (13, 0).
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles for one architecture.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log.
    pub fn compile(&self, source: Source, architecture: Architecture) -> Result<Compiled> {
        let refused = |log: String| Error::Compile { kernel: source.name, architecture, version: self.version, log };
        let text = CString::new(source.text()).map_err(|_| refused("a zero byte in the source".into()))?;
        let name =
            CString::new(format!("{}.cu", source.name)).map_err(|_| refused("a zero byte in the name".into()))?;
        let program = nvrtc::create_program(&text, Some(&name)).map_err(|e| refused(e.to_string()))?;
        let program = Program(program);
        let options = [
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".into(),
            "-default-device".into(),
            "--ptxas-options=-v".into(),
            // Masks must be the CPU's to the bit: no contraction of products and sums, no flushing of subnormal numbers.
            "--fmad=false".into(),
            "--ftz=false".into(),
        ];
        // SAFETY: the program was created above and is destroyed after its last use.
        let outcome = unsafe { nvrtc::compile_program(program.0, &options) };
        // SAFETY: as above.
        let log = unsafe { nvrtc::get_program_log(program.0) }.map(text_of).unwrap_or_default();
        outcome.map_err(|e| refused(format!("{e}\n{log}")))?;
        let mut len = 0;
        // SAFETY: as above; the pointer is valid.
        unsafe { sys::nvrtcGetCUBINSize(program.0, &mut len) }.result().map_err(|e| refused(e.to_string()))?;
        let mut code = vec![0u8; len];
        // SAFETY: as above; there is room for as many bytes as it said.
        unsafe { sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()) }
            .result()
            .map_err(|e| refused(e.to_string()))?;
        Ok(Compiled { code, log })
    }
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: it was created by NVRTC and is used no more. There is nobody to tell of a failure.
        let _ = unsafe { nvrtc::destroy_program(self.0) };
    }
}

fn text_of(text: Vec<c_char>) -> String {
    let bytes: Vec<u8> = text.into_iter().map(|c| c as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map_or_else(|_| String::new(), |s| s.to_string_lossy().trim().to_owned())
}

fn is_present() -> bool {
    // SAFETY: loading NVRTC runs only its own initializers.
    unsafe { sys::is_culib_present() }
}

/// Folders that the system's loader does not look into.
fn folders() -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|v: &OsString| !v.is_empty()).map(PathBuf::from);
    let toolkits = [variable("CUDA_HOME"), variable("CUDA_PATH"), Some("/usr/local/cuda".into())].into_iter().flatten();
    let mut folders: Vec<PathBuf> = toolkits.map(|toolkit| toolkit.join("lib64")).collect();
    let python = variable("VIRTUAL_ENV").map(|environment| environment.join("lib"));
    for version in python.iter().flat_map(std::fs::read_dir).flatten().flatten() {
        let packages = version.path().join("site-packages/nvidia");
        folders.extend(["cu13/lib", "cuda_nvrtc/lib"].map(|folder| packages.join(folder)));
    }
    folders
}

/// Loads the NVRTC of a folder, after which cudarc finds it by its name.
fn load_from(folder: &Path) -> bool {
    let Ok(files) = std::fs::read_dir(folder) else { return false };
    let mut libraries: Vec<PathBuf> = files.flatten().map(|file| file.path()).collect();
    let is = |path: &Path, prefix: &str| path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(prefix));
    libraries.retain(|path| is(path, "libnvrtc.so") || is(path, "libnvrtc-builtins.so"));
    // NVRTC asks for its builtins by name: they come first ('-' before '.').
    libraries.sort();
    for library in &libraries {
        // SAFETY: loading NVRTC runs only its own initializers.
        if let Ok(library) = unsafe { libloading::Library::new(library) } {
            // It stays loaded for good.
            std::mem::forget(library);
        }
    }
    !libraries.is_empty() && is_present()
}
