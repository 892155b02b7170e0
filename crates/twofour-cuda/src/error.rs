//! The one error type of this crate.

use std::path::PathBuf;

use crate::{
    Architecture, DataType,
    engine::Engine,
    gemm::{GemmMethod, GemmProblem},
};

/// Everything that can go wrong in this crate, and what to do about it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver's library is not there.
    #[error(
        "no NVIDIA driver: its library (libcuda.so.1) was not found; on a machine without a GPU use the CPU kernels"
    )]
    NoDriver,

    /// The driver is there and has no such device.
    #[error("no CUDA device {ordinal}: the driver has {count}; see CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// The device asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },

    /// The device is older or newer than anything the kernels are written for.
    #[error("{operation}: not supported on compute capability {major}.{minor}; needs {needs}")]
    Unsupported {
        /// What was asked for.
        operation: &'static str,
        /// Compute capability.
        major: u32,
        /// Compute capability.
        minor: u32,
        /// What would do.
        needs: &'static str,
    },

    /// Weights of one type cannot be compressed to values of another.
    #[error(
        "compressing {input} tensors to {output} values: there is f16 and bf16 to themselves, f32 to either, and all three to e4m3 and e5m2"
    )]
    Types {
        /// What the weights are made of.
        input: DataType,
        /// What the values were to be made of.
        output: DataType,
    },

    /// Values of 16 bits are the weight's own.
    #[error("a factor for {output} values: only 8-bit floats have one; leave it out, or scale the weight")]
    Factor {
        /// What the values are made of.
        output: DataType,
    },

    /// A mask along rows has no compressed transpose.
    #[error(
        "the compressed transpose of a weight whose mask is 2:4 along rows only: choose a transposable mask, or leave the transpose out"
    )]
    NoTranspose,

    /// The optimizer has no kernel for such gradients.
    #[error("an AdamW step with gradients of {element}: there is f32, f16 and bf16; bring them to one of those first")]
    Gradient {
        /// What the gradients are made of.
        element: DataType,
    },

    /// An operation has no kernel for a data type.
    #[error("{operation}: no kernel for {dtype}; supported: {supported}")]
    DataType {
        /// What was to be done.
        operation: &'static str,
        /// The data type.
        dtype: DataType,
        /// Those that there are kernels for.
        supported: &'static str,
    },

    /// No kernel multiplies these types.
    #[error("a product of {element} elements with {output} results{}: there is f16 to f16 or f32, bf16 to bf16 or f32, e4m3 and e5m2 to f16, \
             bf16 or f32, and i8 to f16, bf16 or (without an epilogue) i32", if *epilogue { " and an epilogue" } else { "" })]
    Product {
        /// What was to be multiplied.
        element: DataType,
        /// What the result was to be made of.
        output: DataType,
        /// Whether accumulators were to be scaled, biased or activated.
        epilogue: bool,
    },

    /// No kernel multiplies a weight of one type with an X of the other.
    #[error(
        "a weight of {element} elements and X of {x_element} elements: they must be of the same type, or one of e4m3 and the other of e5m2"
    )]
    MixedElements {
        /// What the weight is made of.
        element: DataType,
        /// What X is made of.
        x_element: DataType,
    },

    /// A problem is not computed that way.
    #[error("there is no kernel for {problem:?} by {method:?}: choose one of GemmMethod::all")]
    GemmMethod {
        /// How it was to be computed.
        method: GemmMethod,
        /// What was to be computed.
        problem: GemmProblem,
    },

    /// A call asks for an epilogue and its plan has none.
    #[error(
        "scales, a bias or an activation are asked for, and the product was planned without: set GemmProblem::epilogue"
    )]
    Epilogue,

    /// An engine does not compute a problem.
    #[error(
        "{engine:?} does not compute {problem:?}: cuSPARSELt is asked for plain products only, and cuBLASLt for W and X of one type; choose one of Libraries::engines"
    )]
    NotComputed {
        /// The engine.
        engine: Engine,
        /// What was to be computed.
        problem: GemmProblem,
    },

    /// A weight lacks the form that an engine reads or compresses.
    #[error(
        "{engine:?} needs the dense weight, and only the compressed one is there: pass Weight::dense, or choose one of this crate's kernels"
    )]
    NoForm {
        /// The engine.
        engine: Engine,
    },

    /// Every engine that computes a problem reads a form of the weight that is not kept.
    #[error("no engine that was measured for {problem:?} reads only the weight's {} form: keep the other one, or both", if *dense { "dense" } else { "compressed" })]
    NoEngineForForm {
        /// What was to be computed.
        problem: GemmProblem,
        /// Whether the dense form alone is kept, or else a compressed one.
        dense: bool,
    },

    /// Neither this crate's kernels nor a library that is there takes a problem on the device.
    #[error(
        "no engine computes {problem:?} on this device: products of 8-bit floats need compute capability 8.9; NVIDIA's libraries may be missing"
    )]
    NoEngine {
        /// What was to be computed.
        problem: GemmProblem,
    },

    /// Random tensors could not be made.
    #[error("making random tensors: {0}")]
    Random(String),

    /// The compiler's library is not there, and the kernel is not in the cache.
    #[error(
        "no NVRTC (libnvrtc.so) to compile `{kernel}` for {architecture}: install the CUDA toolkit or the package nvidia-cuda-nvrtc, \
         and name its folder in TWOFOUR_NVRTC if it is not found; or compile ahead elsewhere and copy the cache"
    )]
    NoCompiler {
        /// The source's name.
        kernel: String,
        /// What it was to be compiled for.
        architecture: Architecture,
    },

    /// NVRTC refused a source: too old for the architecture, or a defect of this crate.
    #[error("NVRTC {}.{} cannot compile `{kernel}` for {architecture}: {log}", version.0, version.1)]
    Compile {
        /// The source's name.
        kernel: String,
        /// What it was to be compiled for.
        architecture: Architecture,
        /// Version of NVRTC.
        version: (i32, i32),
        /// What NVRTC said.
        log: String,
    },

    /// One of NVIDIA's libraries is not there.
    #[error("no {library}: install it, and name its folder in {variable} if it is not found")]
    NoLibrary {
        /// Its name.
        library: &'static str,
        /// The environment variable that can name its folder.
        variable: &'static str,
    },

    /// One of NVIDIA's libraries refused.
    #[error("{action}: {library} says status {status}")]
    Vendor {
        /// Its name.
        library: &'static str,
        /// What was being done.
        action: &'static str,
        /// Its number for the error.
        status: i32,
    },

    /// A call of the driver failed.
    #[error("{action}: the CUDA driver says {code} ({text})")]
    Driver {
        /// What was being done.
        action: &'static str,
        /// The driver's name for the error.
        code: String,
        /// Its explanation.
        text: String,
    },

    /// The device's memory is used up.
    #[error("{action}: out of device memory; free some or choose smaller shapes")]
    OutOfMemory {
        /// What was being done.
        action: &'static str,
    },

    /// A pointer is null or not aligned as a kernel needs it.
    #[error("{what}: the device pointer {address:#x} must be a multiple of {alignment} and not null")]
    Pointer {
        /// Which buffer.
        what: &'static str,
        /// The address.
        address: u64,
        /// What it must be a multiple of.
        alignment: u64,
    },

    /// A dimension does not fit.
    #[error("{what}: {found} is not a multiple of {multiple}")]
    Multiple {
        /// Which dimension.
        what: &'static str,
        /// What it must be a multiple of.
        multiple: usize,
        /// What it is.
        found: usize,
    },

    /// A dimension is zero or beyond what kernels count.
    #[error("{what}: {size} must be at least 1 and at most {most}")]
    Dimension {
        /// Which dimension.
        what: &'static str,
        /// What it is.
        size: usize,
        /// The most that the product takes.
        most: usize,
    },

    /// A method for four-bit weights that a problem's size rules out.
    #[error("there is no four-bit kernel for {problem:?} by {method:?}: choose one of int4::Int4Method::all")]
    Int4Method {
        /// The method.
        method: crate::gemm::int4::Int4Method,
        /// The problem.
        problem: crate::gemm::int4::Int4Problem,
    },

    /// A shape is larger than a launch can be.
    #[error("a weight [{rows}, {cols}] is larger than one launch takes")]
    TooLarge {
        /// Rows.
        rows: usize,
        /// Columns.
        cols: usize,
    },

    /// A weight has a NaN, which has no order.
    #[error("NaN at row {row}, column {col}: a weight to be pruned must not have any")]
    NotANumber {
        /// Its row.
        row: usize,
        /// Its column.
        col: usize,
    },

    /// What the `twofour` crate refuses: settings that contradict each other, a mask that is not 2:4.
    #[error(transparent)]
    Core(#[from] twofour::Error),

    /// A slice does not have the length that a call needs.
    #[error("{what}: {expected} elements are needed, and there are {found}")]
    Length {
        /// Which slice.
        what: &'static str,
        /// The elements that are needed.
        expected: usize,
        /// The elements that there are.
        found: usize,
    },

    /// A slice is of another type than a call needs.
    #[error("{what}: {expected} is needed, and it is of {found}")]
    SliceType {
        /// Which slice.
        what: &'static str,
        /// The type that is needed.
        expected: DataType,
        /// The type that it has.
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

    /// Something that a CUDA graph cannot hold was needed while the stream was being captured.
    #[error(
        "{action} while the stream is being captured: call `prepare` for the number of tokens before the capture, and run the step once"
    )]
    Capturing {
        /// What was needed.
        action: &'static str,
    },

    /// A setting of the `twofour` crate that this crate has no kernels for.
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
        /// What was being done.
        action: &'static str,
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
}

/// A result whose error is this crate's.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The driver's error, met while doing `action`.
    pub(crate) fn driver(action: &'static str, error: cudarc::driver::DriverError) -> Self {
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
