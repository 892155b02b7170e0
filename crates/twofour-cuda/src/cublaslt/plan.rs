//! Planned dense GEMMs.

use std::{
    ffi::c_void,
    fmt, ptr,
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    CublasLt, Inner,
    descriptors::Parts,
    functions::{Algorithm, EPILOGUE_VECTOR, succeed},
};
use crate::{DevicePtr, Result, Stream};

/// Bytes of workspace of a call.
pub const WORKSPACE_BYTES: usize = 64 << 20;

/// A GEMM that has been planned with one algorithm.
#[derive(Clone)]
pub struct CublasLtPlan {
    pub(super) library: CublasLt,
    pub(super) parts: Arc<Parts>,
    pub(super) algorithm: Algorithm,
    pub(super) i32_sums: bool,
    pub(super) accumulate: bool,
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
    /// [`Error::Vendor`](crate::Error::Vendor).
    ///
    /// # Safety
    /// The pointers are valid for what the GEMM reads and writes, and for [`WORKSPACE_BYTES`], until the stream has
    /// passed this call; the stream is of the device.
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
        let Parts { product, a: a_layout, b: b_layout, d: d_layout, .. } = &*self.parts;
        let Inner { functions, handle, .. } = *self.library.0;
        // SAFETY: the pointers are valid for what the GEMM reads and writes, as this function requires; the descriptors
        // are valid.
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

/// A GEMM with [`DenseEpilogue::Bias`](super::DenseEpilogue::Bias), whose bias comes with each call.
#[derive(Debug, Clone)]
pub(crate) struct BiasedPlan {
    pub(super) plan: CublasLtPlan,
    /// The bias that the descriptor names, which plans of one problem share.
    pub(super) named: Arc<Mutex<DevicePtr>>,
}

impl BiasedPlan {
    /// Launches the GEMM. `bias` has one value of D's type for each row of D, and is aligned to 16 bytes.
    ///
    /// # Errors
    /// [`Error::Vendor`](crate::Error::Vendor).
    ///
    /// # Safety
    /// That of [`CublasLtPlan::run`]; the bias is valid until the stream has passed this call.
    pub(crate) unsafe fn run(
        &self,
        stream: Stream,
        [a, b, bias, d]: [DevicePtr; 4],
        workspace: DevicePtr,
    ) -> Result<()> {
        // Held until the library has read the descriptor.
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        if *named != bias {
            self.plan.parts.set(self.plan.library.0.functions, EPILOGUE_VECTOR, &bias)?;
            *named = bias;
        }
        // SAFETY: the pointers are valid, as this function requires.
        unsafe { self.plan.run(stream, a, b, d, workspace) }
    }
}
