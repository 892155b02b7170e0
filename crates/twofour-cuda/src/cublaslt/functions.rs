//! The library's functions and types, declared by hand, and loading them.

use std::ffi::{c_int, c_void};

use crate::{
    DevicePtr, Error, Result,
    loader::{Loaded, Search, functions},
};

/// An opaque object of the library.
pub(super) type Object = *mut c_void;

/// An algorithm returned by the heuristics: opaque, passed back to the library.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Algorithm([u64; 8]);

/// A result of the heuristics.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Found {
    pub(super) algorithm: Algorithm,
    _workspace: usize,
    _status: c_int,
    _waves: f32,
    _reserved: [c_int; 4],
}

pub(super) const NOTHING_FOUND: Found =
    Found { algorithm: Algorithm([0; 8]), _workspace: 0, _status: 0, _waves: 0.0, _reserved: [0; 4] };

functions! {
    open: b"cublasLtCreate" (*mut Object);
    close: b"cublasLtDestroy" (Object);
    create_product: b"cublasLtMatmulDescCreate" (*mut Object, c_int, c_int);
    destroy_product: b"cublasLtMatmulDescDestroy" (Object);
    set_product: b"cublasLtMatmulDescSetAttribute" (Object, c_int, *const c_void, usize);
    create_matrix: b"cublasLtMatrixLayoutCreate" (*mut Object, c_int, u64, u64, i64);
    destroy_matrix: b"cublasLtMatrixLayoutDestroy" (Object);
    set_matrix: b"cublasLtMatrixLayoutSetAttribute" (Object, c_int, *const c_void, usize);
    create_preference: b"cublasLtMatmulPreferenceCreate" (*mut Object);
    destroy_preference: b"cublasLtMatmulPreferenceDestroy" (Object);
    set_preference: b"cublasLtMatmulPreferenceSetAttribute" (Object, c_int, *const c_void, usize);
    heuristics: b"cublasLtMatmulAlgoGetHeuristic" (
        Object, Object, Object, Object, Object, Object, Object, c_int, *mut Found, *mut c_int
    );
    multiply: b"cublasLtMatmul" (
        Object, Object, *const c_void, DevicePtr, Object, DevicePtr, Object, *const c_void, DevicePtr, Object,
        DevicePtr, Object, *const Algorithm, DevicePtr, usize, cudarc::driver::sys::CUstream
    );
}

pub(super) const COMPUTE_32F: c_int = 68;
pub(super) const COMPUTE_32I: c_int = 72;
pub(super) const TRANSPOSE_A: c_int = 3;
pub(super) const TRANSPOSE_B: c_int = 4;
pub(super) const EPILOGUE: c_int = 7;
pub(super) const EPILOGUE_VECTOR: c_int = 8;
pub(super) const BATCHES: c_int = 5;
pub(super) const BATCH_STRIDE: c_int = 6;
/// The first of the least alignments of A, B, C and D.
pub(super) const MIN_ALIGNMENT: c_int = 5;
pub(super) const MAX_WORKSPACE: c_int = 1;
pub(super) const REDUCTION_SCHEMES: c_int = 3;

const SEARCH: Search = Search {
    variable: "TWOFOUR_CUBLASLT",
    package: "cublas",
    names: &["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12", "cublasLt64_13.dll", "cublasLt64_12.dll"],
    file: "libcublasLt.so",
    needs: &[],
};

/// The library's functions and its version, as a number.
pub(super) struct Versioned {
    pub(super) functions: Functions,
    pub(super) version: usize,
}

pub(super) fn functions() -> Option<&'static Versioned> {
    static LOADED: Loaded<Versioned> = Loaded::new();
    SEARCH.load_once(&LOADED, |library| {
        let functions = Functions::of(library)?;
        // SAFETY: the type is that of NVIDIA's header; the function only returns a number.
        let version = unsafe { library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion").ok()?() };
        Some(Versioned { functions, version })
    })
}

/// Returns an error for a status other than success.
pub(super) fn succeed(action: &'static str, status: c_int) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Error::Vendor { library: "cuBLASLt", action, status }) }
}
