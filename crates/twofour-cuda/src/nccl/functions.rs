//! The library's functions, declared by hand, and loading them.

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
};

use super::NcclError;
use crate::{
    DevicePtr, Result,
    loader::{Loaded, Search, functions},
};

/// A communicator of the library.
pub(super) type Handle = *mut c_void;

functions! {
    create_all: b"ncclCommInitAll" (*mut Handle, c_int, *const c_int);
    abort: b"ncclCommAbort" (Handle);
    begin_group: b"ncclGroupStart" ();
    end_group: b"ncclGroupEnd" ();
    all_reduce: b"ncclAllReduce" (DevicePtr, DevicePtr, usize, c_int, c_int, Handle, cudarc::driver::sys::CUstream);
}

/// The number of f32 (`ncclFloat32`).
pub(super) const F32: c_int = 7;

/// The number of the sum (`ncclSum`).
pub(super) const SUM: c_int = 0;

const SEARCH: Search = Search {
    variable: "TWOFOUR_NCCL",
    package: "nccl",
    names: &["libnccl.so", "libnccl.so.2"],
    file: "libnccl.so",
    needs: &[],
};

/// The library's functions, its version, and the texts of its errors.
pub(super) struct Nccl {
    functions: Functions,
    version: c_int,
    error_text: unsafe extern "C" fn(c_int) -> *const c_char,
    /// The last error's cause; absent in old versions.
    last_error: Option<unsafe extern "C" fn(Handle) -> *const c_char>,
}

impl std::ops::Deref for Nccl {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        &self.functions
    }
}

impl Nccl {
    /// Returns the library, loaded at the first call.
    pub(super) fn find() -> Result<&'static Nccl> {
        static LOADED: Loaded<Nccl> = Loaded::new();
        let found = SEARCH.load_once(&LOADED, |library| {
            let functions = Functions::of(library)?;
            // SAFETY: the types are those of NVIDIA's header.
            unsafe {
                let version = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion").ok()?;
                let error_text = *library.get(b"ncclGetErrorString").ok()?;
                let last_error = library.get(b"ncclGetLastError").ok().map(|function| *function);
                let mut number = 0;
                (version(&mut number) == 0).then_some(Nccl { functions, version: number, error_text, last_error })
            }
        });
        found.ok_or_else(|| NcclError::Missing { searched: SEARCH.places() }.into())
    }

    /// Returns the version, as in (2, 27, 3).
    pub(super) fn version(&self) -> (i32, i32, i32) {
        // Before 2.9 the number is MAJOR * 1000 + MINOR * 100 + PATCH, later MAJOR * 10 000 + MINOR * 100 + PATCH.
        let major = if self.version < 10_000 { 1_000 } else { 10_000 };
        (self.version / major, self.version % major / 100, self.version % 100)
    }

    /// Returns the library's error for a failed action.
    pub(super) fn expect(&self, action: &'static str, status: c_int) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        let text = |pointer: *const c_char| match pointer.is_null() {
            true => String::new(),
            // SAFETY: the library's texts end with a zero and are static or its thread's own.
            false => unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned(),
        };
        // SAFETY: the function accepts any number.
        let what = text(unsafe { (self.error_text)(status) });
        // SAFETY: a null communicator is allowed: the error is the thread's last.
        let cause = self.last_error.map_or(String::new(), |last| text(unsafe { last(ptr::null_mut()) }));
        let text = if cause.is_empty() { what } else { format!("{what}: {cause}") };
        Err(NcclError::Call { action, status, text }.into())
    }
}

/// Returns a library whose functions fail with status 3, for tests without NCCL.
#[cfg(test)]
pub(super) fn failing() -> Nccl {
    use crate::loader::fake_functions;
    let functions = fake_functions! {
        create_all(*mut Handle, c_int, *const c_int) => 3;
        abort(Handle) => 3;
        begin_group() => 3;
        end_group() => 3;
        all_reduce(DevicePtr, DevicePtr, usize, c_int, c_int, Handle, cudarc::driver::sys::CUstream) => 3;
    };
    unsafe extern "C" fn error_text(_: c_int) -> *const c_char {
        c"internal error".as_ptr()
    }
    unsafe extern "C" fn last_error(_: Handle) -> *const c_char {
        c"no route to the peer".as_ptr()
    }
    Nccl { functions, version: 22_703, error_text, last_error: Some(last_error) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn an_error_names_action_status_and_cause() {
        let nccl = failing();
        nccl.expect("creating communicators", 0).unwrap();
        let error = nccl.expect("creating communicators", 3).unwrap_err().to_string();
        assert!(error.contains("creating communicators") && error.contains("no route to the peer"), "{error}");
        assert_eq!(nccl.version(), (2, 27, 3));
        assert_eq!(Nccl { version: 2_804, ..failing() }.version(), (2, 8, 4));
    }

    #[test]
    fn without_the_library_the_error_says_what_was_searched_and_what_to_do() {
        if let Err(error) = Nccl::find() {
            let text = error.to_string();
            assert!(matches!(error, Error::Nccl(NcclError::Missing { .. })));
            for word in ["TWOFOUR_NCCL", "libnccl.so.2", "nvidia-nccl", "/usr/local/cuda/lib64"] {
                assert!(text.contains(word), "{word}: {text}");
            }
        }
    }
}
