//! cuSPARSELt: GEMM with 2:4 weights. About twenty functions, declared by hand from NVIDIA's documentation of version
//! 0.8.

mod functions;
mod objects;

use std::{fmt, sync::Arc};

use functions::{ALGORITHMS, Functions, Opaque, functions, succeed};
use objects::Objects;

use crate::{Device, DevicePtr, Error, Result, Stream, problem::GemmProblem};

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

// SAFETY: the library writes to the handle only while it is opened.
unsafe impl Send for Inner {}
// SAFETY: the library writes to the handle only while it is opened.
unsafe impl Sync for Inner {}

impl fmt::Debug for CusparseLt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CusparseLt").field("device", &self.0.device).finish()
    }
}

impl CusparseLt {
    /// Loads the library from the folder that `TWOFOUR_CUSPARSELT` names, from the system's library path, or from a
    /// CUDA toolkit's or Python environment's folders.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], or [`Error::Vendor`] where the library does not support the device.
    pub fn open(device: &Device) -> Result<Self> {
        let functions = functions().ok_or(MISSING)?;
        device.bind()?;
        // The handle is never destroyed: destroying it synchronizes the device, and there is one for each device.
        let handle = Box::leak(Opaque::new());
        // SAFETY: the handle is memory of 16 KiB, more than the library writes.
        succeed("opening", unsafe { (functions.init)(handle) })?;
        Ok(Self(Arc::new(Inner { functions, handle, device: device.clone() })))
    }

    /// Returns the library's version, as in (0, 8, 0).
    ///
    /// # Errors
    /// [`Error::Vendor`].
    pub fn version(&self) -> Result<(i32, i32, i32)> {
        let mut version = 0;
        // SAFETY: the handle is open, and the pointer is that of a local variable.
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
        // SAFETY: the plan was initialized above; the pointers are those of local variables.
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
    /// The pointers are valid for the bytes of [`CusparseLtPlan::compressed_bytes`] until the stream has passed this
    /// call; the stream is of the device.
    pub unsafe fn compress(
        &mut self,
        stream: Stream,
        dense: DevicePtr,
        compressed: DevicePtr,
        scratch: DevicePtr,
    ) -> Result<()> {
        let plan = self.objects.plan.at();
        let Inner { functions, handle, .. } = *self.library.0;
        // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as
        // this function requires.
        succeed("compressing", unsafe { (functions.compress)(handle, plan, dense, compressed, scratch, stream.0) })
    }

    /// Launches the GEMM.
    ///
    /// # Errors
    /// [`Error::Vendor`].
    ///
    /// # Safety
    /// The pointers are valid for the problem and [`CusparseLtPlan::workspace_bytes`] until the stream has passed this
    /// call; the stream is of the device.
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
        // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as
        // this function requires.
        let done = unsafe {
            (functions.multiply)(handle, plan, &one, compressed, x, &zero, out, out, workspace, &mut stream, 1)
        };
        succeed("multiplying", done)
    }
}
