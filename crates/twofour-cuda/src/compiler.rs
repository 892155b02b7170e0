//! Compiles a source to machine code for one architecture with NVRTC, which is loaded at run time.

use std::{ffi::CString, fmt};

use crate::{Architecture, Error, Result, nvrtc::Nvrtc, source::Source};

/// Machine code for one architecture, and the compiler's log.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// A cubin.
    pub code: Vec<u8>,
    /// Registers, shared memory and register spills of each kernel, and warnings.
    pub log: String,
}

impl Compiled {
    /// Returns the log's lines that no released kernel has: register spills, serialized `wgmma`, and warnings.
    pub fn complaints(&self) -> Vec<&str> {
        let complaint = |line: &&str| {
            line.contains("warning")
                || line.contains("Performance Loss")
                || line.contains("spill") && !line.contains("0 bytes spill stores, 0 bytes spill loads")
        };
        self.log.lines().filter(complaint).collect()
    }
}

/// The NVRTC library. Several threads can compile concurrently.
#[derive(Clone, Copy)]
pub struct Compiler(Nvrtc);

impl fmt::Debug for Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compiler").field("version", &self.version()).finish()
    }
}

impl Compiler {
    /// Loads NVRTC from the folder that `TWOFOUR_NVRTC` names, from the system's library path, or from a CUDA toolkit's
    /// or Python environment's folders (`CUDA_HOME`, `CUDA_PATH`, `/usr/local/cuda`, `VIRTUAL_ENV`). Returns `None` if
    /// it is not found.
    pub fn find() -> Option<Self> {
        Nvrtc::find().map(Self)
    }

    /// Returns NVRTC's version, as in (13, 0).
    pub fn version(&self) -> (i32, i32) {
        self.0.version()
    }

    /// Compiles a source for one architecture.
    ///
    /// # Errors
    /// [`Error::Compile`] with the compiler's log.
    pub fn compile(&self, source: &Source, architecture: Architecture) -> Result<Compiled> {
        let refused = |log: String| Error::Compile {
            kernel: source.name().to_owned(),
            architecture,
            version: self.version(),
            log,
        };
        let text = |text: String| CString::new(text).map_err(|error| refused(error.to_string()));
        let options = [
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".into(),
            "-default-device".into(),
            "--ptxas-options=-v".into(),
            // Masks and optimizers must be bit for bit those of the CPU: no FMA contraction, and no flush of subnormal
            // numbers.
            format!("--fmad={}", source.contracts_fma()),
            "--ftz=false".into(),
        ];
        let options = options.into_iter().map(text).collect::<Result<Vec<_>>>()?;
        let (source_text, name) = (text(source.text())?, text(format!("{}.cu", source.name()))?);
        let (code, log) = self.0.compile(&source_text, &name, &options).map_err(refused)?;
        Ok(Compiled { code, log })
    }
}
