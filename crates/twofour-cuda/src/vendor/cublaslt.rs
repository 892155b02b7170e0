//! cuBLASLt: products with dense weights.

use std::{ffi::c_void, fmt, sync::Arc};

use cudarc::cublaslt::{
    result::{self, CublasError},
    sys,
};

use super::data_type;
use crate::{Device, DevicePtr, Element, Error, Result, Stream, library};

/// Bytes of memory that a call may use.
pub const WORKSPACE_BYTES: usize = 64 << 20;

/// What is said where the library is not there.
pub(crate) const MISSING: Error = Error::NoLibrary { library: "cuBLASLt", variable: "TWOFOUR_CUBLASLT" };

/// The library, with a handle for one device.
#[derive(Clone)]
pub struct CublasLt(Arc<Inner>);

struct Inner {
    handle: sys::cublasLtHandle_t,
    device: Device,
}

// SAFETY: NVIDIA documents the handle as safe for use from several threads.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl fmt::Debug for CublasLt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CublasLt").field("device", &self.0.device).finish()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // SAFETY: it was created in `open` and is used no more. There is nobody to tell of a failure.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

fn failed(action: &'static str) -> impl Fn(CublasError) -> Error {
    move |error| Error::Vendor { library: "cuBLASLt", action, status: error.0 as i32 }
}

/// A dense product, `D = op(A) op(B)` in column-major terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dense {
    /// What A and B are made of.
    pub element: Element,
    /// What D is made of.
    pub output: Element,
    /// Rows of D.
    pub rows: usize,
    /// Columns of D.
    pub cols: usize,
    /// What is summed over.
    pub reduction: usize,
    /// Whether A is `[rows, reduction]` row-major, which is its transpose column-major; else column-major.
    pub a_transposed: bool,
    /// Whether B is `[reduction, cols]` row-major; else column-major.
    pub b_transposed: bool,
}

impl CublasLt {
    /// Finds the library where the system looks for libraries, or in a CUDA toolkit's or Python environment's folders.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], or [`Error::Vendor`].
    pub fn open(device: &Device) -> Result<Self> {
        // SAFETY: loading cuBLASLt runs only its own initializers.
        let is_present = || unsafe { sys::is_culib_present() };
        if !library::find("TWOFOUR_CUBLASLT", "cublas", &["libcublasLt.so"], is_present) {
            return Err(MISSING);
        }
        device.bind()?;
        let handle = result::create_handle().map_err(failed("opening"))?;
        Ok(Self(Arc::new(Inner { handle, device: device.clone() })))
    }

    /// Its version, as in (13, 1, 0).
    pub fn version(&self) -> (usize, usize, usize) {
        // SAFETY: the library is loaded.
        let version = unsafe { sys::cublasLtGetVersion() };
        (version / 10_000, version % 10_000 / 100, version % 100)
    }

    /// Plans a product with each of the algorithms that the library's heuristics find best, at most `most`, best first.
    ///
    /// # Errors
    /// [`Error::Vendor`] for what the library does not take.
    pub fn plans(&self, dense: Dense, most: usize) -> Result<Vec<Plan>> {
        self.0.device.bind()?;
        let planning = failed("planning");
        let parts = Arc::new(Parts::new(dense)?);
        let preference = Preference(result::create_matmul_pref().map_err(&planning)?);
        let workspace = WORKSPACE_BYTES;
        // SAFETY: the preference is valid, and the attribute is a usize.
        unsafe {
            result::set_matmul_pref_attribute(
                preference.0,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&workspace).cast(),
                size_of::<usize>(),
            )
        }
        .map_err(&planning)?;
        // SAFETY: plain data, which the library fills in as far as it says.
        let mut found: Vec<sys::cublasLtMatmulHeuristicResult_t> = vec![unsafe { std::mem::zeroed() }; most];
        let mut count = 0;
        // SAFETY: all descriptions are valid, and there is room for as many results.
        let asked = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.0.handle,
                parts.product.0,
                parts.a.0,
                parts.b.0,
                parts.d.0,
                parts.d.0,
                preference.0,
                most as i32,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        asked.result().map_err(&planning)?;
        let plan = |found: &sys::cublasLtMatmulHeuristicResult_t| Plan {
            library: self.clone(),
            parts: parts.clone(),
            algorithm: found.algo,
            i32_sums: dense.element == Element::I8,
        };
        Ok(found[..count as usize].iter().map(plan).collect())
    }
}

/// Declares an owner of one of the library's objects, which destroys it.
macro_rules! owners {
    ($($(#[$doc:meta])* $name:ident($handle:ty), $destroy:path;)*) => {$(
        $(#[$doc])*
        struct $name($handle);

        impl Drop for $name {
            fn drop(&mut self) {
                // SAFETY: the library created the object, and its only owner is gone. A failure has nobody to be reported to.
                let _ = unsafe { $destroy(self.0) };
            }
        }
    )*};
}

owners! {
    /// What the heuristics are to consider.
    Preference(sys::cublasLtMatmulPreference_t), result::destroy_matmul_pref;
    /// The description of a GEMM.
    ProductDescriptor(sys::cublasLtMatmulDesc_t), result::destroy_matmul_desc;
    /// The description of a matrix.
    MatrixLayout(sys::cublasLtMatrixLayout_t), result::destroy_matrix_layout;
}

/// Descriptions of a product and of its matrices.
struct Parts {
    product: ProductDescriptor,
    a: MatrixLayout,
    b: MatrixLayout,
    d: MatrixLayout,
}

// SAFETY: the library only reads descriptions after `Parts::new`, and no call is bound to the thread that created them.
unsafe impl Send for Parts {}
// SAFETY: as above.
unsafe impl Sync for Parts {}

impl Parts {
    fn new(dense: Dense) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let Dense { element, output, rows, cols, reduction, a_transposed, b_transposed } = dense;
        let describing = failed("describing the product");
        let integers = element == Element::I8;
        let (compute, scale) = if integers {
            (sys::cublasComputeType_t::CUBLAS_COMPUTE_32I, kind(output))
        } else {
            (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, kind(Element::F32))
        };
        let layout = |element, rows: usize, cols: usize| {
            let layout = result::create_matrix_layout(kind(element), rows as u64, cols as u64, rows as i64);
            layout.map(MatrixLayout).map_err(&describing)
        };
        let (a_rows, a_cols) = if a_transposed { (reduction, rows) } else { (rows, reduction) };
        let (b_rows, b_cols) = if b_transposed { (cols, reduction) } else { (reduction, cols) };
        let parts = Self {
            product: ProductDescriptor(result::create_matmul_desc(compute, scale).map_err(&describing)?),
            a: layout(element, a_rows, a_cols)?,
            b: layout(element, b_rows, b_cols)?,
            d: layout(output, rows, cols)?,
        };
        for (attribute, transposed) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, a_transposed),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, b_transposed),
        ] {
            let operation = i32::from(transposed);
            // SAFETY: the description is valid, and the attribute is an i32.
            unsafe {
                result::set_matmul_desc_attribute(
                    parts.product.0,
                    attribute,
                    std::ptr::from_ref(&operation).cast(),
                    size_of::<i32>(),
                )
            }
            .map_err(&describing)?;
        }
        Ok(parts)
    }
}

fn kind(element: Element) -> sys::cudaDataType {
    use sys::cudaDataType as Type;
    match data_type(element) {
        0 => Type::CUDA_R_32F,
        2 => Type::CUDA_R_16F,
        14 => Type::CUDA_R_16BF,
        3 => Type::CUDA_R_8I,
        10 => Type::CUDA_R_32I,
        28 => Type::CUDA_R_8F_E4M3,
        _ => Type::CUDA_R_8F_E5M2,
    }
}

/// A product that has been planned with one algorithm.
#[derive(Clone)]
pub struct Plan {
    library: CublasLt,
    parts: Arc<Parts>,
    algorithm: sys::cublasLtMatmulAlgo_t,
    i32_sums: bool,
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan").field("library", &self.library).finish()
    }
}

impl Plan {
    /// Multiplies.
    ///
    /// # Errors
    /// [`Error::Vendor`].
    ///
    /// # Safety
    /// The pointers are valid for what the product reads and writes, and for [`WORKSPACE_BYTES`], until the stream has come past this call; the stream
    /// is of the device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        a: DevicePtr,
        b: DevicePtr,
        d: DevicePtr,
        workspace: DevicePtr,
    ) -> Result<()> {
        let (float, int) = ([1f32, 0.0], [1i32, 0]);
        let scales: [*const c_void; 2] = std::array::from_fn(|i| {
            if self.i32_sums { std::ptr::from_ref(&int[i]).cast() } else { std::ptr::from_ref(&float[i]).cast() }
        });
        let Parts { product, a: a_layout, b: b_layout, d: d_layout } = &*self.parts;
        // SAFETY: the caller's; the descriptions are valid.
        let done = unsafe {
            sys::cublasLtMatmul(
                self.library.0.handle,
                product.0,
                scales[0],
                a as *const c_void,
                a_layout.0,
                b as *const c_void,
                b_layout.0,
                scales[1],
                d as *const c_void,
                d_layout.0,
                d as *mut c_void,
                d_layout.0,
                &self.algorithm,
                workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.0.cast(),
            )
        };
        done.result().map_err(failed("multiplying"))
    }
}
