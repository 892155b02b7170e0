//! From a source to machine code for one architecture, by NVRTC, which is found at run time.

use std::{
    ffi::{CStr, CString, c_char},
    sync::OnceLock,
};

use cudarc::nvrtc::{result as nvrtc, sys};

use crate::{Architecture, Error, Result, library, source::Source};

/// Machine code for one architecture, and what the compiler said of it.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// A cubin.
    pub code: Vec<u8>,
    /// Registers, shared memory and spills of each kernel, and warnings.
    pub log: String,
}

impl Compiled {
    /// Lines of the log that a kernel fit to be released does not have: values spilled to memory, products that wait for each
    /// other for want of registers, and warnings.
    pub fn complaints(&self) -> Vec<&str> {
        let complaint = |line: &&str| {
            line.contains("warning")
                || line.contains("Performance Loss")
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
            // NVRTC asks for its builtins by name: they come first ('-' before '.').
            if !library::find("TWOFOUR_NVRTC", "cuda_nvrtc", &["libnvrtc-builtins.so", "libnvrtc.so"], is_present) {
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
        let refused = |log: String| Error::Compile { kernel: source.name(), architecture, version: self.version, log };
        let text = CString::new(source.text()).map_err(|_| refused("a zero byte in the source".into()))?;
        let name =
            CString::new(format!("{}.cu", source.name())).map_err(|_| refused("a zero byte in the name".into()))?;
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
