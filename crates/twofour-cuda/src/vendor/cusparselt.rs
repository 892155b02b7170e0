//! cuSPARSELt: products with 2:4 weights. About twenty functions, bound by hand from NVIDIA's documentation of version 0.8.

use std::{
    ffi::{c_int, c_void},
    fmt,
    sync::{Arc, OnceLock},
};

use libloading::Library;

use super::data_type;
use crate::{Device, DevicePtr, Element, Error, Result, Stream, gemm::Problem, library};

/// An object of the library's: opaque, and of at most 11 KiB in any version.
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

/// Declares the library's functions and looks all of them up.
macro_rules! functions {
    ($($name:ident: $symbol:literal ($($argument:ty),*);)*) => {
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Functions {
            fn of(library: &Library) -> Option<Self> {
                // SAFETY: the types are those of NVIDIA's header.
                unsafe { Some(Self { $($name: *library.get($symbol).ok()?,)* }) }
            }
        }
    };
}

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

/// What is said where the library is not there.
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
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl fmt::Debug for CusparseLt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CusparseLt").field("device", &self.0.device).finish()
    }
}

fn functions() -> Option<&'static Functions> {
    static FOUND: OnceLock<Option<(Library, Functions)>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        // SAFETY: loading NVIDIA's libraries runs only their own initializers.
        let load = || unsafe { Library::new("libcusparseLt.so.0") };
        if !library::find("TWOFOUR_CUSPARSELT", "cusparselt", &["libcusparseLt.so"], || load().is_ok()) {
            return None;
        }
        let library = load().ok()?;
        let functions = Functions::of(&library)?;
        Some((library, functions))
    });
    found.as_ref().map(|(_, functions)| functions)
}

fn succeed(action: &'static str, status: Status) -> Result<()> {
    if status == 0 { Ok(()) } else { Err(Error::Vendor { library: "cuSPARSELt", action, status }) }
}

impl CusparseLt {
    /// Finds the library, in the folder that `TWOFOUR_CUSPARSELT` names, where the system looks for libraries, or in a CUDA toolkit's or Python
    /// environment's folders.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], or [`Error::Vendor`] where it does not take the device.
    pub fn open(device: &Device) -> Result<Self> {
        let functions = functions().ok_or(MISSING)?;
        device.bind()?;
        // It is kept for good: destroying it waits for the device, and there is one for each device.
        let handle = Box::leak(Opaque::new());
        // SAFETY: the handle is valid memory, large enough.
        succeed("opening", unsafe { (functions.init)(handle) })?;
        Ok(Self(Arc::new(Inner { functions, handle, device: device.clone() })))
    }

    /// Its version, as in (0, 8, 0).
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
    /// [`Error::Vendor`] for what the library does not take.
    pub fn plan(&self, problem: Problem, algorithm: Option<i32>) -> Result<Plan> {
        self.0.device.bind()?;
        let Inner { functions, handle, .. } = *self.0;
        let Problem { element, output, features, tokens, reduction, .. } = problem;
        let (features, tokens, reduction) = (features as i64, tokens as i64, reduction as i64);
        let compute = if element == Element::I8 { 0 } else { 2 };
        let mut objects: [Box<Opaque>; 6] = std::array::from_fn(|_| Opaque::new());
        let [w, x, y, product, selection, plan] = objects.each_mut().map(|o| &mut **o as Object);
        let (input, result) = (data_type(element), data_type(output));
        // SAFETY: the objects are valid memory, large enough, and stay where they are as long as the plan does, which refers to them.
        unsafe {
            let action = "describing W";
            succeed(
                action,
                (functions.structured)(handle, w, features, reduction, reduction, 16, input, ROW_MAJOR, HALF),
            )?;
            succeed("describing X", (functions.dense)(handle, x, tokens, reduction, reduction, 16, input, ROW_MAJOR))?;
            // Column-major [features, tokens] is row-major [tokens, features].
            let action = "describing the result";
            succeed(action, (functions.dense)(handle, y, features, tokens, features, 16, result, COLUMN_MAJOR))?;
            let action = "describing the product";
            succeed(action, (functions.product)(handle, product, PLAIN, TRANSPOSED, w, x, y, y, compute))?;
            succeed("selecting an algorithm", (functions.selection)(handle, selection, product, 0))?;
            if let Some(id) = algorithm {
                let id = std::ptr::from_ref(&id).cast();
                succeed("selecting an algorithm", (functions.set)(handle, selection, ALGORITHM, id, 4))?;
            }
            succeed("planning", (functions.plan)(handle, plan, product, selection))?;
        }
        let mut plan = Plan { library: self.clone(), objects, workspace: 0, compressed: 0, scratch: 0 };
        let (mut workspace, mut compressed, mut scratch) = (0, 0, 0);
        let made = plan.object(PLAN);
        // SAFETY: the plan was made above; the pointers are valid.
        unsafe {
            succeed("asking for the workspace", (functions.workspace)(handle, made, &mut workspace))?;
            let size = (functions.compressed_size)(handle, made, &mut compressed, &mut scratch);
            succeed("asking for the compressed size", size)?;
        }
        (plan.workspace, plan.compressed, plan.scratch) = (workspace, compressed, scratch);
        Ok(plan)
    }

    /// How many algorithms there are for a problem.
    ///
    /// # Errors
    /// [`Error::Vendor`].
    pub fn algorithms(&self, problem: Problem) -> Result<i32> {
        let mut plan = self.plan(problem, None)?;
        let mut count = 0i32;
        let into = std::ptr::from_mut(&mut count).cast();
        let selection = plan.object(SELECTION);
        // SAFETY: the selection was made with the plan; the pointer is valid for four bytes.
        let asked = unsafe { (self.0.functions.get)(self.0.handle, selection, ALGORITHMS, into, 4) };
        succeed("asking for the algorithms", asked)?;
        Ok(count)
    }
}

/// A product that has been planned.
#[derive(Debug)]
pub struct Plan {
    library: CusparseLt,
    objects: [Box<Opaque>; 6],
    workspace: usize,
    compressed: usize,
    scratch: usize,
}

const SELECTION: usize = 4;
const PLAN: usize = 5;

impl Plan {
    /// The library takes mutable pointers and writes to none of these after planning.
    fn object(&mut self, which: usize) -> Object {
        &mut *self.objects[which]
    }

    /// Bytes of memory that a call needs.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace
    }

    /// Bytes of a compressed weight, and of memory that compressing needs.
    pub fn compressed_bytes(&self) -> (usize, usize) {
        (self.compressed, self.scratch)
    }

    /// Compresses a dense weight `[features, reduction]` that is 2:4.
    ///
    /// # Errors
    /// [`Error::Vendor`].
    ///
    /// # Safety
    /// The pointers are valid for what [`Plan::compressed_bytes`] says until the stream has come past this call; the stream is of the device.
    pub unsafe fn compress(
        &mut self,
        stream: Stream,
        dense: DevicePtr,
        compressed: DevicePtr,
        scratch: DevicePtr,
    ) -> Result<()> {
        let plan = self.object(PLAN);
        let Inner { functions, handle, .. } = *self.library.0;
        // SAFETY: the caller's.
        succeed("compressing", unsafe { (functions.compress)(handle, plan, dense, compressed, scratch, stream.0) })
    }

    /// Multiplies.
    ///
    /// # Errors
    /// [`Error::Vendor`].
    ///
    /// # Safety
    /// The pointers are valid for what the problem and [`Plan::workspace_bytes`] say until the stream has come past this call; the stream is of the
    /// device.
    pub unsafe fn run(
        &mut self,
        stream: Stream,
        compressed: DevicePtr,
        x: DevicePtr,
        out: DevicePtr,
        workspace: DevicePtr,
    ) -> Result<()> {
        let plan = self.object(PLAN);
        let Inner { functions, handle, .. } = *self.library.0;
        let (one, zero, mut stream) = (1f32, 0f32, stream.0);
        // SAFETY: the caller's.
        let done = unsafe {
            (functions.multiply)(handle, plan, &one, compressed, x, &zero, out, out, workspace, &mut stream, 1)
        };
        succeed("multiplying", done)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        let functions = self.library.0.functions;
        // SAFETY: these were made with the plan and are used no more. There is nobody to tell of a failure.
        unsafe {
            (functions.forget_plan)(self.object(PLAN));
            for matrix in 0..3 {
                (functions.forget_matrix)(self.object(matrix));
            }
        }
    }
}
