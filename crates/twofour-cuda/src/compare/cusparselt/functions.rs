//! The library's functions and types, declared by hand, and loading them.

use std::{
    ffi::{c_int, c_void},
    fmt,
};

use crate::{
    DevicePtr, Error, Result,
    loader::{Loaded, Search, functions},
};

/// An opaque object of the library, at most 11 KiB in any version.
#[repr(C, align(16))]
pub(super) struct Opaque([u8; 16 << 10]);

impl Opaque {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self([0; 16 << 10]))
    }
}

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opaque")
    }
}

pub(super) type Status = c_int;
pub(super) type Object = *mut Opaque;

functions! {
    init: b"cusparseLtInit" (Object);
    version: b"cusparseLtGetVersion" (Object, *mut c_int);
    dense: b"cusparseLtDenseDescriptorInit" (Object, Object, i64, i64, i64, u32, u32, c_int);
    structured: b"cusparseLtStructuredDescriptorInit" (Object, Object, i64, i64, i64, u32, u32, c_int, c_int);
    forget_matrix: b"cusparseLtMatDescriptorDestroy" (Object);
    product: b"cusparseLtMatmulDescriptorInit" (Object, Object, c_int, c_int, Object, Object, Object, Object, c_int);
    selection: b"cusparseLtMatmulAlgSelectionInit" (Object, Object, Object, c_int);
    set: b"cusparseLtMatmulAlgSetAttribute" (Object, Object, c_int, *const c_void, usize);
    get: b"cusparseLtMatmulAlgGetAttribute" (Object, Object, c_int, *mut c_void, usize);
    plan: b"cusparseLtMatmulPlanInit" (Object, Object, Object, Object);
    forget_plan: b"cusparseLtMatmulPlanDestroy" (Object);
    workspace: b"cusparseLtMatmulGetWorkspace" (Object, Object, *mut usize);
    compressed_size: b"cusparseLtSpMMACompressedSize" (Object, Object, *mut usize, *mut usize);
    compress: b"cusparseLtSpMMACompress" (
        Object, Object, DevicePtr, DevicePtr, DevicePtr, cudarc::driver::sys::CUstream
    );
    multiply: b"cusparseLtMatmul" (
        Object, Object, *const f32, DevicePtr, DevicePtr, *const f32, DevicePtr, DevicePtr, DevicePtr,
        *mut cudarc::driver::sys::CUstream, i32
    );
}

pub(super) const ROW_MAJOR: c_int = 2;
pub(super) const COLUMN_MAJOR: c_int = 1;
pub(super) const PLAIN: c_int = 0;
pub(super) const TRANSPOSED: c_int = 1;
pub(super) const HALF: c_int = 0;
pub(super) const ALGORITHM: c_int = 0;
pub(super) const ALGORITHMS: c_int = 1;

const SEARCH: Search = Search {
    variable: "TWOFOUR_CUSPARSELT",
    package: "cusparselt",
    names: &["libcusparseLt.so.0", "libcusparseLt.so", "cusparseLt.dll"],
    file: "libcusparseLt.so",
    needs: &[],
};

pub(super) fn functions() -> Option<&'static Functions> {
    static LOADED: Loaded<Functions> = Loaded::new();
    SEARCH.load_once(&LOADED, Functions::of)
}

/// Returns an error for a status other than success.
pub(super) fn succeed(action: &'static str, status: Status) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Error::Vendor { library: "cuSPARSELt", action, status }) }
}
