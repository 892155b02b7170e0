//! cuSPARSELt: GEMM with 2:4 weights. About twenty functions, declared by hand from NVIDIA's documentation of version 0.8.

use std::{
    ffi::{c_int, c_void},
    fmt,
    sync::{Arc, OnceLock},
};

use libloading::Library;

use super::{
    data_type,
    loader::{Search, functions},
};
use crate::{DataType, Device, DevicePtr, Error, Result, Stream, problem::GemmProblem};

/// An opaque object of the library, at most 11 KiB in any version.
#[repr(C, align(16))]
struct Opaque([u8; 16 << 10]);

impl Opaque {
    fn new() -> Box<Self> {
        Box::new(Self([0; 16 << 10]))
    }
}

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opaque")
    }
}

type Status = c_int;
type Object = *mut Opaque;

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
    compress: b"cusparseLtSpMMACompress" (Object, Object, DevicePtr, DevicePtr, DevicePtr, cudarc::driver::sys::CUstream);
    multiply: b"cusparseLtMatmul" (
        Object, Object, *const f32, DevicePtr, DevicePtr, *const f32, DevicePtr, DevicePtr, DevicePtr,
        *mut cudarc::driver::sys::CUstream, i32
    );
}

const ROW_MAJOR: c_int = 2;
const COLUMN_MAJOR: c_int = 1;
const PLAIN: c_int = 0;
const TRANSPOSED: c_int = 1;
const HALF: c_int = 0;
const ALGORITHM: c_int = 0;
const ALGORITHMS: c_int = 1;

/// The error where the library is not installed.
pub(crate) const MISSING: Error = Error::NoLibrary { library: "cuSPARSELt", variable: "TWOFOUR_CUSPARSELT" };

/// The library, with a handle for one device.
#[derive(Clone)]
pub struct CusparseLt(Arc<Inner>);

struct Inner {
    functions: &'static Functions,
    handle: *mut Opaque,
    device: Device,
}

// SAFETY: after its making the handle is only read.
unsafe impl Send for Inner {}
// SAFETY: after its making the handle is only read.
unsafe impl Sync for Inner {}

impl fmt::Debug for CusparseLt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CusparseLt").field("device", &self.0.device).finish()
    }
}

const SEARCH: Search = Search {
    variable: "TWOFOUR_CUSPARSELT",
    package: "cusparselt",
    names: &["libcusparseLt.so.0", "libcusparseLt.so", "cusparseLt.dll"],
    file: "libcusparseLt.so",
    needs: &[],
};

fn functions() -> Option<&'static Functions> {
    static FOUND: OnceLock<Option<(Library, Functions)>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let library = SEARCH.load()?;
        let functions = Functions::of(&library)?;
        Some((library, functions))
    });
    found.as_ref().map(|(_, functions)| functions)
}

fn succeed(action: &'static str, status: Status) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Error::Vendor { library: "cuSPARSELt", action, status }) }
}

impl CusparseLt {
    /// Loads the library from the folder that `TWOFOUR_CUSPARSELT` names, from the system's library path, or from a CUDA toolkit's or Python environment's folders.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], or [`Error::Vendor`] where the library does not support the device.
    pub fn open(device: &Device) -> Result<Self> {
        let functions = functions().ok_or(MISSING)?;
        device.bind()?;
        // The handle is never destroyed: destroying it synchronizes the device, and there is one for each device.
        let handle = Box::leak(Opaque::new());
        // SAFETY: the handle is valid memory, large enough.
        succeed("opening", unsafe { (functions.init)(handle) })?;
        Ok(Self(Arc::new(Inner { functions, handle, device: device.clone() })))
    }

    /// Returns the library's version, as in (0, 8, 0).
    ///
    /// # Errors
    /// [`Error::Vendor`].
    pub fn version(&self) -> Result<(i32, i32, i32)> {
        let mut version = 0;
        // SAFETY: the handle is open, and the pointer valid.
        succeed("asking for the version", unsafe { (self.0.functions.version)(self.0.handle, &mut version) })?;
        Ok((version / 1000, version % 1000 / 100, version % 100))
    }

    /// Plans `[tokens, features] = X Wᵀ` with one of the library's algorithms; `None` is its default.
    ///
    /// # Errors
    /// [`Error::Vendor`] for a problem that the library does not support.
    pub fn plan(&self, problem: GemmProblem, algorithm: Option<i32>) -> Result<CusparseLtPlan> {
        self.0.device.bind()?;
        let Inner { functions, handle, .. } = *self.0;
        let mut objects = Objects::new(functions, handle, problem, algorithm)?;
        let (mut workspace, mut compressed, mut scratch) = (0, 0, 0);
        let made = objects.plan.at();
        // SAFETY: the plan was initialized above; the pointers are valid.
        unsafe {
            succeed("asking for the workspace", (functions.workspace)(handle, made, &mut workspace))?;
            let size = (functions.compressed_size)(handle, made, &mut compressed, &mut scratch);
            succeed("asking for the compressed size", size)?;
        }
        Ok(CusparseLtPlan { objects, library: self.clone(), workspace, compressed, scratch })
    }

    /// Returns the number of algorithms for a problem.
    ///
    /// # Errors
    /// [`Error::Vendor`].
    pub fn algorithms(&self, problem: GemmProblem) -> Result<i32> {
        let mut plan = self.plan(problem, None)?;
        let mut count = 0i32;
        let into = std::ptr::from_mut(&mut count).cast();
        let selection = plan.objects.selection.at();
        // SAFETY: the selection was made with the plan; the pointer is valid for four bytes.
        let asked = unsafe { (self.0.functions.get)(self.0.handle, selection, ALGORITHMS, into, 4) };
        succeed("asking for the algorithms", asked)?;
        Ok(count)
    }
}

/// An object of the library that is destroyed with its owner. The library's functions take mutable pointers, but do not write to these objects after planning.
struct Owned {
    memory: Box<Opaque>,
    /// `None` for an object that needs no destruction, or was not initialized.
    destroy: Option<unsafe extern "C" fn(Object) -> Status>,
}

impl Owned {
    /// Returns memory for an object that needs no destruction.
    fn plain() -> Self {
        Self { memory: Opaque::new(), destroy: None }
    }

    /// Returns an object that `initialize` initializes and `destroy` destroys; it is destroyed only if initialization succeeds.
    fn new(
        action: &'static str,
        destroy: unsafe extern "C" fn(Object) -> Status,
        initialize: impl FnOnce(Object) -> Status,
    ) -> Result<Self> {
        let mut owned = Self::plain();
        succeed(action, initialize(owned.at()))?;
        owned.destroy = Some(destroy);
        Ok(owned)
    }

    fn at(&mut self) -> Object {
        &mut *self.memory
    }
}

impl fmt::Debug for Owned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Owned")
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(destroy) = self.destroy {
            // SAFETY: the object was initialized, and its only owner is gone. A failure cannot be reported.
            let _ = unsafe { destroy(self.at()) };
        }
    }
}

/// The library's objects of a planned GEMM. Each refers to those below it: fields are destroyed in this order.
#[derive(Debug)]
struct Objects {
    plan: Owned,
    selection: Owned,
    _product: Owned,
    _matrices: [Owned; 3],
}

impl Objects {
    fn new(functions: &Functions, handle: Object, problem: GemmProblem, algorithm: Option<i32>) -> Result<Self> {
        let GemmProblem { element, output, features, tokens, reduction, .. } = problem;
        let (features, tokens, reduction) = (features as i64, tokens as i64, reduction as i64);
        let compute = if element == DataType::I8 { 0 } else { 2 };
        let (input, result) = (data_type(element), data_type(output));
        let matrix =
            |action, initialize: &dyn Fn(Object) -> Status| Owned::new(action, functions.forget_matrix, initialize);
        let (structured, dense) = (functions.structured, functions.dense);
        // SAFETY: the object is valid memory, large enough.
        let w = |w| unsafe { structured(handle, w, features, reduction, reduction, 16, input, ROW_MAJOR, HALF) };
        // SAFETY: the object is valid memory, large enough.
        let x = |x| unsafe { dense(handle, x, tokens, reduction, reduction, 16, input, ROW_MAJOR) };
        // Column-major [features, tokens] is row-major [tokens, features].
        // SAFETY: the object is valid memory, large enough.
        let y = |y| unsafe { dense(handle, y, features, tokens, features, 16, result, COLUMN_MAJOR) };
        let mut matrices =
            [matrix("describing W", &w)?, matrix("describing X", &x)?, matrix("describing the result", &y)?];
        let [w, x, y] = matrices.each_mut().map(Owned::at);
        let (mut product, mut selection) = (Owned::plain(), Owned::plain());
        // SAFETY: all objects are valid memory, large enough; they stay where they are as long as the plan, which refers to them.
        unsafe {
            let described = (functions.product)(handle, product.at(), PLAIN, TRANSPOSED, w, x, y, y, compute);
            succeed("describing the product", described)?;
            let selected = (functions.selection)(handle, selection.at(), product.at(), 0);
            succeed("selecting an algorithm", selected)?;
            if let Some(id) = algorithm {
                let id = std::ptr::from_ref(&id).cast();
                succeed("selecting an algorithm", (functions.set)(handle, selection.at(), ALGORITHM, id, 4))?;
            }
        }
        // SAFETY: all objects are valid memory, large enough; they stay where they are as long as the plan, which refers to them.
        let plan = |plan| unsafe { (functions.plan)(handle, plan, product.at(), selection.at()) };
        let plan = Owned::new("planning", functions.forget_plan, plan)?;
        Ok(Self { plan, selection, _product: product, _matrices: matrices })
    }
}

/// A planned GEMM.
#[derive(Debug)]
pub struct CusparseLtPlan {
    // Destroyed before the library's handle.
    objects: Objects,
    library: CusparseLt,
    workspace: usize,
    compressed: usize,
    scratch: usize,
}

impl CusparseLtPlan {
    /// Returns the bytes of workspace of a call.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace
    }

    /// Returns the bytes of a compressed weight, and of scratch memory for compression.
    pub fn compressed_bytes(&self) -> (usize, usize) {
        (self.compressed, self.scratch)
    }

    /// Compresses a dense 2:4 weight `[features, reduction]`.
    ///
    /// # Errors
    /// [`Error::Vendor`].
    ///
    /// # Safety
    /// The pointers are valid for the bytes of [`CusparseLtPlan::compressed_bytes`] until the stream has passed this call; the stream is of the device.
    pub unsafe fn compress(
        &mut self,
        stream: Stream,
        dense: DevicePtr,
        compressed: DevicePtr,
        scratch: DevicePtr,
    ) -> Result<()> {
        let plan = self.objects.plan.at();
        let Inner { functions, handle, .. } = *self.library.0;
        // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        succeed("compressing", unsafe { (functions.compress)(handle, plan, dense, compressed, scratch, stream.0) })
    }

    /// Launches the GEMM.
    ///
    /// # Errors
    /// [`Error::Vendor`].
    ///
    /// # Safety
    /// The pointers are valid for the problem and [`CusparseLtPlan::workspace_bytes`] until the stream has passed this call; the stream is of the device.
    pub unsafe fn run(
        &mut self,
        stream: Stream,
        compressed: DevicePtr,
        x: DevicePtr,
        out: DevicePtr,
        workspace: DevicePtr,
    ) -> Result<()> {
        let plan = self.objects.plan.at();
        let Inner { functions, handle, .. } = *self.library.0;
        let (one, zero, mut stream) = (1f32, 0f32, stream.0);
        // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        let done = unsafe {
            (functions.multiply)(handle, plan, &one, compressed, x, &zero, out, out, workspace, &mut stream, 1)
        };
        succeed("multiplying", done)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// Initializations that succeed before one fails.
        static LEFT: Cell<u32> = const { Cell::new(0) };
        /// Matrices and plans that exist.
        static MATRICES: Cell<i32> = const { Cell::new(0) };
        static PLANS: Cell<i32> = const { Cell::new(0) };
    }

    fn initialize() -> Status {
        let left = LEFT.get();
        LEFT.set(left.saturating_sub(1));
        c_int::from(left == 0)
    }

    fn count(objects: &'static std::thread::LocalKey<Cell<i32>>) -> Status {
        let status = initialize();
        objects.set(objects.get() + 1 - status);
        status
    }

    /// A library whose functions are implemented here.
    macro_rules! library {
        ($($name:ident($($argument:ty),*) => $body:expr;)*) => {
            Functions {$(
                $name: {
                    unsafe extern "C" fn $name($(_: $argument),*) -> Status {
                        $body
                    }
                    $name
                },
            )*}
        };
    }

    type CudaStream = cudarc::driver::sys::CUstream;

    /// A library whose initializations succeed `LEFT` times, and that counts its objects.
    fn counting() -> Functions {
        library! {
            init(Object) => 0;
            version(Object, *mut c_int) => 0;
            dense(Object, Object, i64, i64, i64, u32, u32, c_int) => count(&MATRICES);
            structured(Object, Object, i64, i64, i64, u32, u32, c_int, c_int) => count(&MATRICES);
            forget_matrix(Object) => {
                assert_eq!(PLANS.get(), 0, "a plan outlives its matrices");
                MATRICES.set(MATRICES.get() - 1);
                0
            };
            product(Object, Object, c_int, c_int, Object, Object, Object, Object, c_int) => initialize();
            selection(Object, Object, Object, c_int) => initialize();
            set(Object, Object, c_int, *const c_void, usize) => initialize();
            get(Object, Object, c_int, *mut c_void, usize) => 0;
            plan(Object, Object, Object, Object) => count(&PLANS);
            forget_plan(Object) => {
                PLANS.set(PLANS.get() - 1);
                0
            };
            workspace(Object, Object, *mut usize) => 0;
            compressed_size(Object, Object, *mut usize, *mut usize) => 0;
            compress(Object, Object, DevicePtr, DevicePtr, DevicePtr, CudaStream) => 0;
            multiply(
                Object, Object, *const f32, DevicePtr, DevicePtr, *const f32, DevicePtr, DevicePtr, DevicePtr, *mut CudaStream, i32
            ) => 0;
        }
    }

    #[test]
    fn what_was_initialized_is_destroyed_wherever_planning_fails() {
        let functions = counting();
        let mut handle = Opaque::new();
        let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, 64, 16, 64);
        for left in 0..7 {
            LEFT.set(left);
            assert!(Objects::new(&functions, &mut *handle, problem, Some(0)).is_err(), "{left}");
            assert_eq!((PLANS.get(), MATRICES.get()), (0, 0), "call {left} fails");
        }
        LEFT.set(7);
        let objects = Objects::new(&functions, &mut *handle, problem, Some(0)).unwrap();
        assert_eq!((PLANS.get(), MATRICES.get()), (1, 3));
        drop(objects);
        assert_eq!((PLANS.get(), MATRICES.get()), (0, 0));
    }
}
