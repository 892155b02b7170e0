//! NVRTC, the run-time compiler.

use std::{
    ffi::{CStr, CString, c_char, c_int},
    ptr,
};

use crate::loader::{Loaded, Search, functions};

/// An opaque program of the library.
type Handle = *mut std::ffi::c_void;

functions! {
    version: b"nvrtcVersion" (*mut c_int, *mut c_int);
    create: b"nvrtcCreateProgram" (
        *mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
    );
    destroy: b"nvrtcDestroyProgram" (*mut Handle);
    compile: b"nvrtcCompileProgram" (Handle, c_int, *const *const c_char);
    log_size: b"nvrtcGetProgramLogSize" (Handle, *mut usize);
    log: b"nvrtcGetProgramLog" (Handle, *mut c_char);
    cubin_size: b"nvrtcGetCUBINSize" (Handle, *mut usize);
    cubin: b"nvrtcGetCUBIN" (Handle, *mut c_char);
}

const SEARCH: Search = Search {
    variable: "TWOFOUR_NVRTC",
    package: "cuda_nvrtc",
    names: &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"],
    file: "libnvrtc.so",
    needs: &["libnvrtc-builtins.so"],
};

fn functions() -> Option<&'static Functions> {
    static LOADED: Loaded<Functions> = Loaded::new();
    SEARCH.load_once(&LOADED, Functions::of)
}

/// The loaded library. Its functions are thread-safe.
#[derive(Clone, Copy)]
pub(crate) struct Nvrtc {
    functions: &'static Functions,
    version: (i32, i32),
}

impl Nvrtc {
    /// Loads the library, if it is installed.
    pub(crate) fn find() -> Option<Self> {
        let functions = functions()?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both pointers are valid.
        let status = unsafe { (functions.version)(&mut major, &mut minor) };
        (status == 0).then_some(Self { functions, version: (major, minor) })
    }

    /// Returns the library's version, as in (13, 0).
    pub(crate) fn version(self) -> (i32, i32) {
        self.version
    }

    /// Compiles a file to a cubin, and returns it with the compiler's log; on failure returns the failed call and the
    /// log.
    pub(crate) fn compile(self, text: &CStr, name: &CStr, options: &[CString]) -> Result<(Vec<u8>, String), String> {
        let functions = self.functions;
        let succeed = |action: &str, status: c_int| match status {
            0 => Ok(()),
            _ => Err(format!("{action}: status {status}")),
        };
        let mut handle = ptr::null_mut();
        // SAFETY: both texts end with a zero and outlive the program; there are no headers.
        let created =
            unsafe { (functions.create)(&mut handle, text.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null()) };
        succeed("creating a program", created)?;
        let program = Program { handle, functions };
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the program exists, and there are as many options, which end with a zero.
        let compiled = unsafe { (functions.compile)(program.handle, options.len() as c_int, options.as_ptr()) };
        let log = program.log();
        succeed("compiling", compiled).map_err(|failure| format!("{failure}\n{log}"))?;
        let mut len = 0;
        // SAFETY: the program exists, and the pointer is valid.
        succeed("reading the cubin's size", unsafe { (functions.cubin_size)(program.handle, &mut len) })?;
        let mut code = vec![0u8; len];
        // SAFETY: the program exists, and there is room for as many bytes as the library has said.
        succeed("reading the cubin", unsafe { (functions.cubin)(program.handle, code.as_mut_ptr().cast()) })?;
        Ok((code, log))
    }
}

/// A program, destroyed with its owner.
struct Program {
    handle: Handle,
    functions: &'static Functions,
}

impl Program {
    /// Returns the compiler's log; empty where it cannot be read.
    fn log(&self) -> String {
        let mut len = 0;
        // SAFETY: the program exists, and the pointer is valid.
        let sized = unsafe { (self.functions.log_size)(self.handle, &mut len) };
        let mut log = vec![0u8; len];
        // SAFETY: the program exists, and there is room for as many bytes as the library has said.
        if sized != 0 || len == 0 || unsafe { (self.functions.log)(self.handle, log.as_mut_ptr().cast()) } != 0 {
            return String::new();
        }
        CStr::from_bytes_until_nul(&log).map_or_else(|_| String::new(), |s| s.to_string_lossy().trim().to_owned())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the library created the program, and its only owner is gone. A failure cannot be reported.
        let _ = unsafe { (self.functions.destroy)(&mut self.handle) };
    }
}
