//! The error type of this crate.

use std::path::PathBuf;

use crate::{Architecture, DataType, problem::GemmProblem};

/// Every error of this crate; messages say what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver's library was not found.
    #[error(
        "no NVIDIA driver: its library (libcuda.so.1) was not found; on a machine without a GPU use the CPU kernels"
    )]
    NoDriver,

    /// The driver is there and has no such device.
    #[error("no CUDA device {ordinal}: the driver has {count}; see CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// The requested device.
        ordinal: usize,
        /// The number of devices.
        count: usize,
    },

    /// The device is older or newer than anything the kernels are written for.
    #[error("{operation}: unsupported on compute capability {major}.{minor}; requires {needs}")]
    Unsupported {
        /// The operation.
        operation: &'static str,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
        /// The capability that it requires.
        needs: &'static str,
    },

    /// A launch configuration is beyond what devices of the architecture launch.
    #[error(
        "a launch of {} by {} CTAs of {block} threads, {shared} bytes of shared memory and clusters of {cluster} is \
         beyond \
         what {architecture} launches: choose a smaller shape",
        grid.0, grid.1
    )]
    Launch {
        /// CTAs along the grid's two axes.
        grid: (u32, u32),
        /// Threads of a CTA.
        block: u32,
        /// Bytes of dynamic shared memory of a CTA.
        shared: u32,
        /// CTAs of a cluster.
        cluster: u32,
        /// The device's architecture.
        architecture: Architecture,
    },

    /// No kernel compresses weights of one type to values of another.
    #[error(
        "compressing {input} tensors to {output} values is unsupported; supported: f16 and bf16 to themselves, f32 to \
         either, and all three to e4m3 and e5m2"
    )]
    Types {
        /// Data type of the weights.
        input: DataType,
        /// Data type of the values.
        output: DataType,
    },

    /// 16-bit values have no scale.
    #[error("a scale for {output} values: only 8-bit floats have one; leave it out, or scale the weight")]
    Factor {
        /// Data type of the values.
        output: DataType,
    },

    /// A mask along rows has no compressed transpose.
    #[error(
        "the compressed transpose of a weight whose mask is 2:4 along rows only: choose a transposable mask, or leave \
         the transpose out"
    )]
    NoTranspose,

    /// The optimizer has no kernel for such gradients.
    #[error("an AdamW step with gradients of {element} is unsupported: convert them to f32, f16 or bf16")]
    Gradient {
        /// Data type of the gradients.
        element: DataType,
    },

    /// An operation has no kernel for a data type.
    #[error("{operation}: no kernel for {dtype}; supported: {supported}")]
    DataType {
        /// The operation.
        operation: &'static str,
        /// The data type.
        dtype: DataType,
        /// The supported data types.
        supported: &'static str,
    },

    /// No GEMM kernel has this combination of data types.
    #[error(
        "no GEMM kernel for {element} elements with {output} results{}; supported: f16 to f16 or f32, bf16 to bf16 or \
         f32, e4m3 and e5m2 to f16, bf16 or f32, and i8 to f16, bf16 or (without an epilogue) i32",
        if *epilogue { " and an epilogue" } else { "" }
    )]
    Product {
        /// Data type of the weight and X.
        element: DataType,
        /// Data type of the result.
        output: DataType,
        /// Whether the problem has an epilogue.
        epilogue: bool,
    },

    /// No GEMM kernel has a weight of one type and X of the other.
    #[error(
        "a weight of {element} elements and X of {x_element} elements: they must be of the same type, or one of e4m3 \
         and the other of e5m2"
    )]
    MixedElements {
        /// Data type of the weight.
        element: DataType,
        /// Data type of X.
        x_element: DataType,
    },

    /// A GEMM method does not compute a problem.
    #[error("there is no kernel for {problem} by {method}: choose one of GemmMethod::all or Int4Method::all")]
    Method {
        /// The method.
        method: String,
        /// The problem.
        problem: String,
    },

    /// A call has an epilogue, but its plan has none.
    #[error(
        "the call has an epilogue (scales, bias or activation), but the GEMM was planned without one: set the \
         problem's `epilogue`"
    )]
    Epilogue,

    /// An engine does not compute a problem.
    #[error(
        "{engine} does not compute {problem:?}: cuSPARSELt is used for plain problems only, and cuBLASLt for W and X \
         of the same type; choose one of Libraries::engines"
    )]
    NotComputed {
        /// The engine's name.
        engine: &'static str,
        /// The problem.
        problem: GemmProblem,
    },

    /// A weight lacks the form that an engine reads or compresses.
    #[error(
        "{engine} requires the dense weight, and only the compressed one is present: pass Weight::dense, or choose one \
         of this crate's kernels"
    )]
    NoForm {
        /// The engine's name.
        engine: &'static str,
    },

    /// Neither this crate's kernels nor an installed library computes a problem on the device.
    #[error(
        "no engine computes {problem:?} on this device: GEMMs of 8-bit floats require compute capability 8.9; NVIDIA's \
         libraries may be missing"
    )]
    NoEngine {
        /// The problem.
        problem: GemmProblem,
    },

    /// Random tensors could not be created.
    #[error("making random tensors: {0}")]
    Random(String),

    /// NVRTC was not found, and the kernel is not in the cache.
    #[error(
        "no NVRTC (libnvrtc.so) to compile `{kernel}` for {architecture}: install the CUDA toolkit or the package \
         nvidia-cuda-nvrtc, \
         and name its folder in TWOFOUR_NVRTC if it is not found; or compile ahead elsewhere and copy the cache"
    )]
    NoCompiler {
        /// The source's name.
        kernel: String,
        /// The target architecture.
        architecture: Architecture,
    },

    /// NVRTC rejected a source: NVRTC is too old for the architecture, or the source has a defect.
    #[error("NVRTC {}.{} cannot compile `{kernel}` for {architecture}: \
             {}", version.0, version.1, log.trim().replace('\n', "; "))]
    Compile {
        /// The source's name.
        kernel: String,
        /// The target architecture.
        architecture: Architecture,
        /// Version of NVRTC.
        version: (i32, i32),
        /// NVRTC's log.
        log: String,
    },

    /// One of NVIDIA's libraries was not found.
    #[error("no {library}: install it, and name its folder in {variable} if it is not found")]
    NoLibrary {
        /// The library's name.
        library: &'static str,
        /// The environment variable that can name its folder.
        variable: &'static str,
    },

    /// A call of one of NVIDIA's libraries failed.
    #[error("{action}: {library} says status {status}")]
    Vendor {
        /// The library's name.
        library: &'static str,
        /// The failed action.
        action: &'static str,
        /// The library's status code.
        status: i32,
    },

    /// NCCL is missing, or a call of it failed.
    #[error(transparent)]
    Nccl(#[from] crate::nccl::NcclError),

    /// A call of the driver failed.
    #[error("{action}: the CUDA driver says {code} ({text})")]
    Driver {
        /// The failed action.
        action: &'static str,
        /// The driver's name for the error.
        code: String,
        /// Its explanation.
        text: String,
    },

    /// The device is out of memory.
    #[error("{action}: out of device memory; free some or choose smaller shapes")]
    OutOfMemory {
        /// The failed action.
        action: &'static str,
    },

    /// A pointer is null or not aligned.
    #[error("{what}: the device pointer {address:#x} must be a multiple of {alignment} and not null")]
    Pointer {
        /// Which buffer.
        what: &'static str,
        /// The address.
        address: u64,
        /// What it must be a multiple of.
        alignment: u64,
    },

    /// A dimension is not a multiple.
    #[error("{what}: {found} is not a multiple of {multiple}")]
    Multiple {
        /// Which dimension.
        what: &'static str,
        /// What it must be a multiple of.
        multiple: usize,
        /// What it is.
        found: usize,
    },

    /// A dimension is zero or larger than kernels support.
    #[error("{what}: {size} must be at least 1 and at most {most}")]
    Dimension {
        /// Which dimension.
        what: &'static str,
        /// What it is.
        size: usize,
        /// The largest supported size.
        most: usize,
    },

    /// An option outside its range.
    #[error("{what}: {found} is not {expected}")]
    Setting {
        /// Which option.
        what: &'static str,
        /// Its value.
        found: String,
        /// What is allowed.
        expected: &'static str,
    },

    /// A shape is larger than a launch can be.
    #[error("a [{rows}, {cols}] matrix is larger than one launch supports")]
    TooLarge {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },

    /// A weight to be pruned has a NaN.
    #[error("NaN at row {row}, column {col}: a weight to be pruned must not contain NaN")]
    NotANumber {
        /// Its row.
        row: usize,
        /// Its column.
        col: usize,
    },

    /// An error of the `twofour` crate: settings that contradict each other, a mask that is not 2:4.
    #[error(transparent)]
    Core(#[from] twofour::Error),

    /// A slice does not have the required length.
    #[error("{what}: {expected} elements are required, found {found}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// The required number of elements.
        expected: usize,
        /// The slice's number of elements.
        found: usize,
    },

    /// A slice does not have the required data type.
    #[error("{what}: data type {expected} is required, found {found}")]
    SliceType {
        /// Which slice.
        what: &'static str,
        /// The required data type.
        expected: DataType,
        /// The slice's data type.
        found: DataType,
    },

    /// A slice is in another device's memory.
    #[error("{what} is on device {found}, and the layer is on device {expected}: copy it there first")]
    OtherDevice {
        /// Which slice.
        what: &'static str,
        /// The layer's device.
        expected: usize,
        /// The slice's device.
        found: usize,
    },

    /// A stream capture needed an action that a CUDA graph cannot contain.
    #[error(
        "{action} while the stream is being captured: call `prepare` for the number of tokens before the capture, and \
         run the step once"
    )]
    Capturing {
        /// The action.
        action: &'static str,
    },

    /// This crate has no kernel for a setting of the `twofour` crate.
    #[error("{what}: there is no CUDA kernel for it yet")]
    NoMethod {
        /// The setting.
        what: String,
    },

    /// A file of the cache could not be read or written.
    #[error("{path}: {action}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The failed action.
        action: &'static str,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
}

/// A result whose error is this crate's.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// Returns the driver's error for a failed `action`.
    pub fn driver(action: &'static str, error: cudarc::driver::DriverError) -> Self {
        if error.0 == cudarc::driver::sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return Error::OutOfMemory { action };
        }
        let text = |text: Result<&std::ffi::CStr, _>| {
            text.map_or_else(
                |_: cudarc::driver::DriverError| String::from("unknown"),
                |s| s.to_string_lossy().into_owned(),
            )
        };
        Error::Driver { action, code: text(error.error_name()), text: text(error.error_string()) }
    }
}

#[cfg(test)]
mod tests {
    use cudarc::driver::{DriverError, sys::CUresult};

    use super::*;

    #[test]
    fn what_the_device_has_no_room_for_is_told_as_such() {
        let error = Error::driver("copying a weight", DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert!(matches!(error, Error::OutOfMemory { action: "copying a weight" }));
        assert!(error.to_string().contains("free some or choose smaller shapes"));
    }
}
