//! cuBLASLt: GEMM with dense weights.

use std::{
    ffi::{c_int, c_void},
    fmt, ptr,
    sync::{Arc, OnceLock},
};

use libloading::Library;

use super::{
    data_type,
    loader::{Search, functions},
};
use crate::{DataType, Device, DevicePtr, Error, Result, Stream};

/// An opaque object of the library.
type Object = *mut c_void;

/// An algorithm returned by the heuristics: opaque, passed back to the library.
#[derive(Clone, Copy)]
#[repr(C)]
struct Algorithm([u64; 8]);

/// A result of the heuristics.
#[derive(Clone, Copy)]
#[repr(C)]
struct Found {
    algorithm: Algorithm,
    _workspace: usize,
    _status: c_int,
    _waves: f32,
    _reserved: [c_int; 4],
}

const NOTHING_FOUND: Found =
    Found { algorithm: Algorithm([0; 8]), _workspace: 0, _status: 0, _waves: 0.0, _reserved: [0; 4] };

functions! {
    open: b"cublasLtCreate" (*mut Object);
    close: b"cublasLtDestroy" (Object);
    create_product: b"cublasLtMatmulDescCreate" (*mut Object, c_int, c_int);
    destroy_product: b"cublasLtMatmulDescDestroy" (Object);
    set_product: b"cublasLtMatmulDescSetAttribute" (Object, c_int, *const c_void, usize);
    create_matrix: b"cublasLtMatrixLayoutCreate" (*mut Object, c_int, u64, u64, i64);
    destroy_matrix: b"cublasLtMatrixLayoutDestroy" (Object);
    create_preference: b"cublasLtMatmulPreferenceCreate" (*mut Object);
    destroy_preference: b"cublasLtMatmulPreferenceDestroy" (Object);
    set_preference: b"cublasLtMatmulPreferenceSetAttribute" (Object, c_int, *const c_void, usize);
    heuristics: b"cublasLtMatmulAlgoGetHeuristic" (
        Object, Object, Object, Object, Object, Object, Object, c_int, *mut Found, *mut c_int
    );
    multiply: b"cublasLtMatmul" (
        Object, Object, *const c_void, DevicePtr, Object, DevicePtr, Object, *const c_void, DevicePtr, Object, DevicePtr, Object,
        *const Algorithm, DevicePtr, usize, cudarc::driver::sys::CUstream
    );
}

const COMPUTE_32F: c_int = 68;
const COMPUTE_32I: c_int = 72;
const TRANSPOSE_A: c_int = 3;
const TRANSPOSE_B: c_int = 4;
const EPILOGUE: c_int = 7;
const EPILOGUE_VECTOR: c_int = 8;
const MOST_WORKSPACE: c_int = 1;
const REDUCTION_SCHEMES: c_int = 3;

const SEARCH: Search = Search {
    variable: "TWOFOUR_CUBLASLT",
    package: "cublas",
    names: &["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12", "cublasLt64_13.dll", "cublasLt64_12.dll"],
    file: "libcublasLt.so",
    needs: &[],
};

struct Loaded {
    functions: Functions,
    /// The library's version, as a number.
    version: usize,
    _library: Library,
}

fn loaded() -> Option<&'static Loaded> {
    static FOUND: OnceLock<Option<Loaded>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let library = SEARCH.load()?;
        let functions = Functions::of(&library)?;
        // SAFETY: the type is that of NVIDIA's header; the function only returns a number.
        let version = unsafe { library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion").ok()?() };
        Some(Loaded { functions, version, _library: library })
    });
    found.as_ref()
}

/// Bytes of workspace of a call.
pub const WORKSPACE_BYTES: usize = 64 << 20;

/// The error where the library is not installed.
pub(crate) const MISSING: Error = Error::NoLibrary { library: "cuBLASLt", variable: "TWOFOUR_CUBLASLT" };

/// The library, with a handle for one device.
#[derive(Clone)]
pub struct CublasLt(Arc<Inner>);

struct Inner {
    functions: &'static Functions,
    version: usize,
    handle: Object,
    device: Device,
}

// SAFETY: NVIDIA documents the handle as safe for use from several threads.
unsafe impl Send for Inner {}
// SAFETY: NVIDIA documents the handle as safe for use from several threads.
unsafe impl Sync for Inner {}

impl fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CublasLt").field("device", &self.0.device).finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: the library created the handle, and its only owner is gone. A failure cannot be reported.
        let _ = unsafe { (self.functions.close)(self.handle) };
    }
}

fn succeed(action: &'static str, status: c_int) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Error::Vendor { library: "cuBLASLt", action, status }) }
}

/// A dense GEMM, `D = op(A) op(B)` in column-major terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DenseProblem {
    /// Data type of A and B.
    pub element: DataType,
    /// Data type of D.
    pub output: DataType,
    /// Rows of D.
    pub rows: usize,
    /// Columns of D.
    pub cols: usize,
    /// The `k` dimension.
    pub reduction: usize,
    /// Whether A is `[rows, reduction]` row-major, that is, transposed column-major; otherwise column-major.
    pub a_transposed: bool,
    /// Whether B is `[reduction, cols]` row-major; otherwise column-major.
    pub b_transposed: bool,
    /// Whether the result is added to D.
    pub accumulate: bool,
}

/// An epilogue of a dense GEMM, with a vector of D's data type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseEpilogue {
    /// Adds the vector, one value for each row of D, to every column.
    Bias,
    /// Writes the sums of op(B) over the reduction to the vector, one value for each column of D: in a weight gradient's GEMM, the bias gradient.
    BiasGradient,
}

impl DenseEpilogue {
    /// Returns the library's number of the epilogue.
    fn number(self) -> u32 {
        match self {
            DenseEpilogue::Bias => 4,
            DenseEpilogue::BiasGradient => 512,
        }
    }
}

/// The data type in which a dense GEMM with split-K may add partial sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PartialSums {
    /// Any type, including D's: the fastest choice of the library.
    Any,
    /// f32 (i32 for integers), so that a result is rounded once.
    Wide,
}

impl PartialSums {
    /// Returns the library's mask of reduction schemes: in place 1, in the compute type 2, in the output's type 4.
    fn mask(self) -> u32 {
        match self {
            PartialSums::Any => 7,
            PartialSums::Wide => 2,
        }
    }
}

impl CublasLt {
    /// Loads the library from the system's library path, or from a CUDA toolkit's or Python environment's folders.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], or [`Error::Vendor`].
    pub fn open(device: &Device) -> Result<Self> {
        let Loaded { functions, version, .. } = loaded().ok_or(MISSING)?;
        device.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is valid.
        succeed("opening", unsafe { (functions.open)(&mut handle) })?;
        Ok(Self(Arc::new(Inner { functions, version: *version, handle, device: device.clone() })))
    }

    /// Returns the library's version, as in (13, 1, 0).
    pub fn version(&self) -> (usize, usize, usize) {
        let version = self.0.version;
        (version / 10_000, version % 10_000 / 100, version % 100)
    }

    /// Plans a GEMM with each of the algorithms that the library's heuristics rank best, at most `most`, best first.
    ///
    /// # Errors
    /// [`Error::Vendor`] for a problem that the library does not support.
    pub fn plans(&self, dense: DenseProblem, sums: PartialSums, most: usize) -> Result<Vec<CublasLtPlan>> {
        let parts = Parts::new(self.0.functions, dense)?;
        self.plans_of(parts, dense, sums, most)
    }

    /// Plans a GEMM with an epilogue, as [`CublasLt::plans`] does. Every call reads or writes the vector.
    ///
    /// # Errors
    /// [`Error::Vendor`] for a problem that the library does not support.
    ///
    /// # Safety
    /// The vector is valid until the streams of all calls have passed them.
    pub unsafe fn plans_with(
        &self,
        dense: DenseProblem,
        epilogue: DenseEpilogue,
        vector: DevicePtr,
        sums: PartialSums,
        most: usize,
    ) -> Result<Vec<CublasLtPlan>> {
        let parts = Parts::new(self.0.functions, dense)?;
        parts.set(self.0.functions, EPILOGUE, &epilogue.number())?;
        parts.set(self.0.functions, EPILOGUE_VECTOR, &vector)?;
        self.plans_of(parts, dense, sums, most)
    }

    fn plans_of(&self, parts: Parts, dense: DenseProblem, sums: PartialSums, most: usize) -> Result<Vec<CublasLtPlan>> {
        self.0.device.bind()?;
        let Inner { functions, handle, .. } = *self.0;
        let parts = Arc::new(parts);
        let preference =
            // SAFETY: the pointer is valid.
            Owned::new("planning", functions.destroy_preference, |to| unsafe { (functions.create_preference)(to) })?;
        let workspace = WORKSPACE_BYTES;
        let value = ptr::from_ref(&workspace).cast();
        // SAFETY: the preference is valid, and the attribute is a usize.
        let set = unsafe { (functions.set_preference)(preference.object, MOST_WORKSPACE, value, size_of::<usize>()) };
        succeed("planning", set)?;
        let mask = sums.mask();
        let value = ptr::from_ref(&mask).cast();
        // SAFETY: the preference is valid, and the attribute is a u32.
        let set = unsafe { (functions.set_preference)(preference.object, REDUCTION_SCHEMES, value, size_of::<u32>()) };
        succeed("planning", set)?;
        let mut found = vec![NOTHING_FOUND; most];
        let mut count = 0;
        let Parts { product, a, b, d } = &*parts;
        // SAFETY: all descriptions are valid, and there is room for as many results.
        let asked = unsafe {
            (functions.heuristics)(
                handle,
                product.object,
                a.object,
                b.object,
                d.object,
                d.object,
                preference.object,
                most as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        succeed("planning", asked)?;
        let plan = |found: &Found| CublasLtPlan {
            library: self.clone(),
            parts: parts.clone(),
            algorithm: found.algorithm,
            i32_sums: dense.element == DataType::I8,
            accumulate: dense.accumulate,
        };
        Ok(found.iter().take(count as usize).map(plan).collect())
    }
}

/// An object of the library that is destroyed with its owner.
struct Owned {
    object: Object,
    destroy: unsafe extern "C" fn(Object) -> c_int,
}

// SAFETY: the library only reads objects after planning, and binds none to the thread that created it.
unsafe impl Send for Owned {}
// SAFETY: no object changes after planning.
unsafe impl Sync for Owned {}

impl Owned {
    /// Returns an object that `create` creates and `destroy` destroys.
    fn new(
        action: &'static str,
        destroy: unsafe extern "C" fn(Object) -> c_int,
        create: impl FnOnce(*mut Object) -> c_int,
    ) -> Result<Self> {
        let mut object = ptr::null_mut();
        succeed(action, create(&mut object))?;
        Ok(Self { object, destroy })
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the library created the object, and its only owner is gone. A failure cannot be reported.
        let _ = unsafe { (self.destroy)(self.object) };
    }
}

/// Descriptors of a GEMM and of its matrices.
struct Parts {
    product: Owned,
    a: Owned,
    b: Owned,
    d: Owned,
}

impl Parts {
    fn new(functions: &Functions, dense: DenseProblem) -> Result<Self> {
        let DenseProblem { element, output, rows, cols, reduction, a_transposed, b_transposed, accumulate: _ } = dense;
        let describing = "describing the product";
        let (compute, scale) =
            if element == DataType::I8 { (COMPUTE_32I, output) } else { (COMPUTE_32F, DataType::F32) };
        let product = Owned::new(describing, functions.destroy_product, |to| {
            // SAFETY: the pointer is valid.
            unsafe { (functions.create_product)(to, compute, data_type(scale) as c_int) }
        })?;
        let layout = |element, rows: usize, cols: usize| {
            Owned::new(describing, functions.destroy_matrix, |to| {
                let kind = data_type(element) as c_int;
                // SAFETY: the pointer is valid.
                unsafe { (functions.create_matrix)(to, kind, rows as u64, cols as u64, rows as i64) }
            })
        };
        let (a_rows, a_cols) = if a_transposed { (reduction, rows) } else { (rows, reduction) };
        let (b_rows, b_cols) = if b_transposed { (cols, reduction) } else { (reduction, cols) };
        let (a, b, d) =
            (layout(element, a_rows, a_cols)?, layout(element, b_rows, b_cols)?, layout(output, rows, cols)?);
        let parts = Self { product, a, b, d };
        for (attribute, transposed) in [(TRANSPOSE_A, a_transposed), (TRANSPOSE_B, b_transposed)] {
            parts.set(functions, attribute, &i32::from(transposed))?;
        }
        Ok(parts)
    }

    /// Sets an attribute of the GEMM, of the type that the library's documentation specifies.
    fn set<T: Copy>(&self, functions: &Functions, attribute: c_int, value: &T) -> Result<()> {
        let value = ptr::from_ref(value).cast();
        // SAFETY: the description is valid, and the pointer is valid for as many bytes as are named; the library copies them.
        let set = unsafe { (functions.set_product)(self.product.object, attribute, value, size_of::<T>()) };
        succeed("describing the product", set)
    }
}

/// A GEMM that has been planned with one algorithm.
#[derive(Clone)]
pub struct CublasLtPlan {
    library: CublasLt,
    parts: Arc<Parts>,
    algorithm: Algorithm,
    i32_sums: bool,
    accumulate: bool,
}

impl fmt::Debug for CublasLtPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CublasLtPlan").field("library", &self.library).finish()
    }
}

impl CublasLtPlan {
    /// Launches the GEMM.
    ///
    /// # Errors
    /// [`Error::Vendor`].
    ///
    /// # Safety
    /// The pointers are valid for what the GEMM reads and writes, and for [`WORKSPACE_BYTES`], until the stream has passed this call; the stream is of the device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        a: DevicePtr,
        b: DevicePtr,
        d: DevicePtr,
        workspace: DevicePtr,
    ) -> Result<()> {
        let beta = i32::from(self.accumulate);
        let (float, int) = ([1f32, beta as f32], [1i32, beta]);
        let scales: [*const c_void; 2] = std::array::from_fn(|i| {
            if self.i32_sums { ptr::from_ref(&int[i]).cast() } else { ptr::from_ref(&float[i]).cast() }
        });
        let Parts { product, a: a_layout, b: b_layout, d: d_layout } = &*self.parts;
        let Inner { functions, handle, .. } = *self.library.0;
        // SAFETY: the pointers are valid for what the GEMM reads and writes, as this function requires; the descriptors are valid.
        let done = unsafe {
            (functions.multiply)(
                handle,
                product.object,
                scales[0],
                a,
                a_layout.object,
                b,
                b_layout.object,
                scales[1],
                d,
                d_layout.object,
                d,
                d_layout.object,
                &self.algorithm,
                workspace,
                WORKSPACE_BYTES,
                stream.0,
            )
        };
        succeed("multiplying", done)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Calls that succeed before one fails.
        static LEFT: Cell<u32> = const { Cell::new(0) };
        /// Objects that exist.
        static OBJECTS: Cell<i32> = const { Cell::new(0) };
    }

    fn call() -> c_int {
        let left = LEFT.get();
        LEFT.set(left.saturating_sub(1));
        c_int::from(left == 0)
    }

    fn create() -> c_int {
        let status = call();
        OBJECTS.set(OBJECTS.get() + 1 - status);
        status
    }

    fn destroy() -> c_int {
        OBJECTS.set(OBJECTS.get() - 1);
        0
    }

    /// A library whose calls succeed `LEFT` times, and that counts its objects.
    fn counting() -> Functions {
        macro_rules! library {
            ($($name:ident($($argument:ty),*) => $body:expr;)*) => {
                Functions {$(
                    $name: {
                        unsafe extern "C" fn $name($(_: $argument),*) -> c_int {
                            $body
                        }
                        $name
                    },
                )*}
            };
        }
        type CudaStream = cudarc::driver::sys::CUstream;
        type Value = *const c_void;
        library! {
            open(*mut Object) => create();
            close(Object) => destroy();
            create_product(*mut Object, c_int, c_int) => create();
            destroy_product(Object) => destroy();
            set_product(Object, c_int, Value, usize) => call();
            create_matrix(*mut Object, c_int, u64, u64, i64) => create();
            destroy_matrix(Object) => destroy();
            create_preference(*mut Object) => create();
            destroy_preference(Object) => destroy();
            set_preference(Object, c_int, Value, usize) => call();
            heuristics(Object, Object, Object, Object, Object, Object, Object, c_int, *mut Found, *mut c_int) => call();
            multiply(
                Object, Object, Value, DevicePtr, Object, DevicePtr, Object, Value, DevicePtr, Object, DevicePtr, Object, *const Algorithm,
                DevicePtr, usize, CudaStream
            ) => call();
        }
    }

    #[test]
    fn what_was_created_is_destroyed_wherever_describing_fails() {
        let functions = counting();
        let dense = DenseProblem {
            element: DataType::BF16,
            output: DataType::BF16,
            rows: 64,
            cols: 16,
            reduction: 64,
            a_transposed: true,
            b_transposed: false,
            accumulate: false,
        };
        // Four objects and two attributes.
        for left in 0..6 {
            LEFT.set(left);
            assert!(Parts::new(&functions, dense).is_err(), "{left}");
            assert_eq!(OBJECTS.get(), 0, "call {left} fails");
        }
        LEFT.set(6);
        let parts = Parts::new(&functions, dense).unwrap();
        assert_eq!(OBJECTS.get(), 4);
        drop(parts);
        assert_eq!(OBJECTS.get(), 0);
    }
}
