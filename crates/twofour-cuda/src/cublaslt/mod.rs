//! cuBLASLt: GEMM with dense weights.

mod descriptors;
mod functions;
mod plan;
mod problem;

use std::{
    ffi::c_int,
    fmt, ptr,
    sync::{Arc, Mutex},
};

use descriptors::{Owned, Parts};
use functions::{
    EPILOGUE, EPILOGUE_VECTOR, Found, Functions, MAX_WORKSPACE, MIN_ALIGNMENT, NOTHING_FOUND, Object,
    REDUCTION_SCHEMES, Versioned, functions, succeed,
};

use crate::{DataType, Device, DevicePtr, Error, Result};

pub(crate) use plan::BiasedPlan;
pub use plan::{CublasLtPlan, WORKSPACE_BYTES};
pub use problem::{DenseEpilogue, DenseProblem, PartialSums};

/// Least alignment of the operands of batched GEMMs, and of biases that come with each call, in bytes.
const ALIGNMENT: u32 = 16;

/// The error where the library is not installed.
pub(crate) const MISSING: Error = Error::NoLibrary { library: "cuBLASLt", variable: "TWOFOUR_CUBLASLT" };

/// Returns the number that cuBLASLt and cuSPARSELt have of a data type (`cudaDataType`).
pub(crate) fn data_type(element: DataType) -> u32 {
    match element {
        DataType::F32 => 0,
        DataType::F16 => 2,
        DataType::BF16 => 14,
        DataType::I8 => 3,
        DataType::I32 => 10,
        DataType::E4M3 => 28,
        DataType::E5M2 => 29,
    }
}

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

impl CublasLt {
    /// Loads the library from the system's library path, or from a CUDA toolkit's or Python environment's folders.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], or [`Error::Vendor`].
    pub fn open(device: &Device) -> Result<Self> {
        let Versioned { functions, version } = functions().ok_or(MISSING)?;
        device.bind()?;
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is that of a local variable.
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
        self.plans_of(Parts::new(self.0.functions, dense, 1)?, dense, sums, most)
    }

    /// Plans GEMMs of one shape, as [`CublasLt::plans`] does: `batches` of them, whose operands each follow one another
    /// in memory. Operands begin at multiples of 16 bytes.
    ///
    /// # Errors
    /// [`Error::Vendor`] for a problem that the library does not support.
    pub fn plans_batched(
        &self,
        dense: DenseProblem,
        batches: usize,
        sums: PartialSums,
        most: usize,
    ) -> Result<Vec<CublasLtPlan>> {
        self.plans_of(Parts::new(self.0.functions, dense, batches)?, dense, sums, most)
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
        let parts = Parts::new(self.0.functions, dense, 1)?;
        parts.set(self.0.functions, EPILOGUE, &epilogue.number())?;
        parts.set(self.0.functions, EPILOGUE_VECTOR, &vector)?;
        self.plans_of(parts, dense, sums, most)
    }

    /// Plans a GEMM with a bias, as [`CublasLt::plans`] does. The bias, one value of D's type for each row of D, comes
    /// with each call. For 8-bit floats with results in f32 the library takes another type of bias, so that it is not
    /// for those.
    ///
    /// # Errors
    /// [`Error::Vendor`] for a problem that the library does not support.
    pub(crate) fn plans_biased(&self, dense: DenseProblem, sums: PartialSums, most: usize) -> Result<Vec<BiasedPlan>> {
        // Planning reads the pointer's alignment, not the vector.
        let vector = DevicePtr::from(ALIGNMENT);
        let parts = Parts::new(self.0.functions, dense, 1)?;
        parts.set(self.0.functions, EPILOGUE, &DenseEpilogue::Bias.number())?;
        parts.set(self.0.functions, EPILOGUE_VECTOR, &vector)?;
        let named = Arc::new(Mutex::new(vector));
        let plans = self.plans_of(parts, dense, sums, most)?;
        Ok(plans.into_iter().map(|plan| BiasedPlan { plan, named: named.clone() }).collect())
    }

    fn plans_of(&self, parts: Parts, dense: DenseProblem, sums: PartialSums, most: usize) -> Result<Vec<CublasLtPlan>> {
        self.0.device.bind()?;
        let Inner { functions, handle, .. } = *self.0;
        let parts = Arc::new(parts);
        let preference =
            // SAFETY: the pointer is that of a local variable.
            Owned::new("planning", functions.destroy_preference, |to| unsafe { (functions.create_preference)(to) })?;
        let workspace = WORKSPACE_BYTES;
        let value = ptr::from_ref(&workspace).cast();
        // SAFETY: the preference is valid, and the attribute is a usize.
        let set = unsafe { (functions.set_preference)(preference.object, MAX_WORKSPACE, value, size_of::<usize>()) };
        succeed("planning", set)?;
        let mask = sums.mask();
        let value = ptr::from_ref(&mask).cast();
        // SAFETY: the preference is valid, and the attribute is a u32.
        let set = unsafe { (functions.set_preference)(preference.object, REDUCTION_SCHEMES, value, size_of::<u32>()) };
        succeed("planning", set)?;
        // Operands of a part of a batch, or of a framework, do not begin at the library's default of 256 bytes.
        for operand in (0..4).filter(|_| parts.batches > 1) {
            let (attribute, value) = (MIN_ALIGNMENT + operand, ptr::from_ref(&ALIGNMENT).cast());
            // SAFETY: the preference is valid, and the attribute is a u32.
            let set = unsafe { (functions.set_preference)(preference.object, attribute, value, size_of::<u32>()) };
            succeed("planning", set)?;
        }
        let mut found = vec![NOTHING_FOUND; most];
        let mut count = 0;
        let Parts { product, a, b, d, .. } = &*parts;
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
