//! The 2:4 estimate of a matrix along its rows ([`twofour::estimate::estimate`]), as a dense matrix with zeros.
//!
//! Calls only launch kernels: they neither allocate nor synchronize, and a CUDA graph can capture them.

use twofour::estimate::Estimator;

use crate::{
    DataType, Device, DevicePtr, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    raw::{
        DenseWeight,
        float_types::FloatSource,
        grid::{BLOCK, blocks, shape},
        headers,
    },
    source::File,
};

/// The kernels for matrices of one data type, on one device.
#[derive(Debug, Clone)]
pub struct DenseEstimator {
    dtype: DataType,
    kernels: [Kernel; 4],
}

/// The kernels' parameters, in their memory layout.
#[repr(C)]
struct EstimateParameters {
    dense: DevicePtr,
    out: DevicePtr,
    factor: DevicePtr,
    seed: u64,
    seed_at: DevicePtr,
    rows: u32,
    cols: u32,
    aligned: u32,
}

/// The destination of an estimate, and what it depends on besides the matrix.
#[derive(Debug, Clone, Copy)]
pub struct EstimateTarget {
    /// The estimate, of the matrix's shape and type; not the matrix itself.
    pub out: DevicePtr,
    /// An f32 scale that values are multiplied by before they are rounded.
    pub factor: Option<DevicePtr>,
    /// A u64 that the kernel adds to an estimator's seed when it runs.
    pub seed: Option<DevicePtr>,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "estimate",
    operation: "an estimate",
    contracts_fma: false,
    files: &[
        headers::CODES,
        headers::PAIRS,
        headers::ESTIMATE,
        File::new("estimate/kernel.cu", include_str!("kernel.cu")),
    ],
};

impl DenseEstimator {
    /// Loads the kernels for matrices of f32, f16 or bf16.
    ///
    /// # Errors
    /// [`Error::DataType`](crate::Error::DataType) for other types; those of compiling and loading.
    pub fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let kernels = [
            kernel("estimate_magnitude")?,
            kernel("estimate_soft_threshold")?,
            kernel("estimate_mvue_approximate")?,
            kernel("estimate_mvue")?,
        ];
        Ok(Self { dtype, kernels })
    }

    /// Writes the estimate. Every shape is supported, and every address that is aligned to an element. What is not a
    /// number or not finite is not reported: it makes its group unspecified.
    ///
    /// # Errors
    /// [`Error::Pointer`](crate::Error::Pointer) for pointers that are null or not aligned (matrices: to their
    /// elements; scale: 4; seed: 8), [`Error::TooLarge`](crate::Error::TooLarge),
    /// [`Error::Driver`](crate::Error::Driver).
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has passed this call, and nothing else
    /// writes there; the stream is of this device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        matrix: DenseWeight,
        estimator: Estimator,
        to: EstimateTarget,
    ) -> Result<()> {
        let (rows, cols) = shape(matrix)?;
        let (which, seed) = match estimator {
            Estimator::Magnitude => (0, 0),
            Estimator::SoftThreshold => (1, 0),
            Estimator::MvueApproximate { seed } => (2, seed),
            Estimator::Mvue { seed } => (3, seed),
        };
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let bytes = self.dtype.bytes() as u64;
        expect_pointers(&[("matrix", matrix.data, bytes), ("estimate", to.out, bytes)])?;
        if let Some(factor) = to.factor {
            expect_pointers(&[("factor", factor, 4)])?;
        }
        if let Some(seed) = to.seed {
            expect_pointers(&[("seed", seed, 8)])?;
        }
        let parameters = EstimateParameters {
            dense: matrix.data,
            out: to.out,
            factor: to.factor.unwrap_or(0),
            seed,
            seed_at: to.seed.unwrap_or(0),
            rows,
            cols,
            aligned: u32::from(matrix.is_aligned(self.dtype, 4) && to.out.is_multiple_of(4 * bytes)),
        };
        let threads = matrix.rows as u64 * matrix.cols.div_ceil(16) as u64;
        let launch = Launch::simple((blocks(threads, matrix)?, 1), BLOCK);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.kernels[which].launch(stream, launch, &parameters) }
    }
}
