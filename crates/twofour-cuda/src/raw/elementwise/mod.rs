//! Element-wise passes around a layer's GEMMs: activations where the pre-activation is stored, their gradients, and
//! masked addition.
//!
//! Calls only launch kernels: they neither allocate nor synchronize, and a CUDA graph can capture them.

use crate::{
    Activation, DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::expect_pointers,
    device::Kernel,
    raw::{float_types::FloatSource, headers},
    source::File,
};

/// An element-wise function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ElementFunction {
    /// An activation of the GEMM's epilogue.
    Activation(Activation),
    /// `max(x, 0)²`.
    SquaredRelu,
    /// GELU's approximation by tanh (Hendrycks and Gimpel, 2016).
    TanhGelu,
}

/// The kernels for tensors of one data type, on one device.
#[derive(Debug, Clone)]
pub struct Elementwise {
    dtype: DataType,
    apply: [Kernel; 6],
    gradient: [Kernel; 6],
    add_where_kept: Kernel,
    fill: Kernel,
}

/// The kernels' parameters, in their memory layout.
#[repr(C)]
struct ElementwiseParameters {
    input: DevicePtr,
    gradient: DevicePtr,
    out: DevicePtr,
    tiles: DevicePtr,
    count: u64,
    cols: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "elementwise",
    operation: "an element-wise pass",
    contracts_fma: false,
    files: &[headers::FUNCTIONS, File::new("elementwise/kernel.cu", include_str!("kernel.cu"))],
};

/// The pointers of a gradient through a function.
#[derive(Debug, Clone, Copy)]
pub struct FunctionGradient {
    /// The function's argument, `[rows, cols]`.
    pub input: DevicePtr,
    /// The gradient of the function's result.
    pub gradient: DevicePtr,
    /// The gradient of the function's argument; may be `gradient` itself.
    pub out: DevicePtr,
    /// A mask, a u16 for each 4x4 tile, `[ceil(rows / 4), ceil(cols / 4)]`, outside of which the result is zero.
    pub tiles: Option<DevicePtr>,
}

impl Elementwise {
    /// Loads the kernels for tensors of f32, f16 or bf16.
    ///
    /// # Errors
    /// [`Error::DataType`] for other types; those of compiling and loading.
    pub fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let kernels = |prefix: &str| -> Result<[Kernel; 6]> {
            let kernel = |name: &str| kernel(&format!("{prefix}_{name}"));
            Ok([
                kernel("identity")?,
                kernel("relu")?,
                kernel("gelu")?,
                kernel("silu")?,
                kernel("squared_relu")?,
                kernel("tanh_gelu")?,
            ])
        };
        let (apply, gradient) = (kernels("apply")?, kernels("gradient")?);
        let (add_where_kept, fill) = (kernel("add_where_kept")?, kernel("fill")?);
        Ok(Self { dtype, apply, gradient, add_where_kept, fill })
    }

    /// `out = function(input)` for `count` elements, computed in f32; `out` may be `input`.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to an element, [`Error::TooLarge`],
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for `count` elements until the stream has passed this call, and nothing else writes
    /// there; the stream is of this device.
    pub unsafe fn apply(
        &self,
        stream: Stream,
        function: ElementFunction,
        input: DevicePtr,
        out: DevicePtr,
        count: usize,
    ) -> Result<()> {
        let parameters = ElementwiseParameters { input, gradient: 0, out, tiles: 0, count: count as u64, cols: 1 };
        // SAFETY: the pointers are valid for that many elements, as this function requires.
        unsafe { self.launch(stream, &self.apply[index(function)], parameters, &[("input", input), ("output", out)]) }
    }

    /// `out = gradient · function'(input)`, zero outside a mask if there is one; for `[rows, cols]` tensors. The
    /// derivative of ReLU at 0 is 0.
    ///
    /// # Errors
    /// Those of [`Elementwise::apply`].
    ///
    /// # Safety
    /// That of [`Elementwise::apply`].
    pub unsafe fn gradient(
        &self,
        stream: Stream,
        function: ElementFunction,
        tensors: FunctionGradient,
        rows: usize,
        cols: usize,
    ) -> Result<()> {
        let FunctionGradient { input, gradient, out, tiles } = tensors;
        let (count, cols) = elements(rows, cols)?;
        let parameters = ElementwiseParameters { input, gradient, out, tiles: tiles.unwrap_or(0), count, cols };
        let pointers = [("input", input), ("gradient", gradient), ("output", out)];
        // SAFETY: the pointers are valid for that many elements, as this function requires.
        unsafe { self.launch(stream, &self.gradient[index(function)], parameters, &pointers) }
    }

    /// `out += addend` where a mask keeps the element, for an f32 addend and `[rows, cols]` tensors.
    ///
    /// # Errors
    /// Those of [`Elementwise::apply`].
    ///
    /// # Safety
    /// That of [`Elementwise::apply`]; `tiles` is a u16 for each 4x4 tile, `[ceil(rows / 4), ceil(cols / 4)]`.
    pub unsafe fn add_where_kept(
        &self,
        stream: Stream,
        addend: DevicePtr,
        tiles: DevicePtr,
        out: DevicePtr,
        rows: usize,
        cols: usize,
    ) -> Result<()> {
        let (count, cols) = elements(rows, cols)?;
        if count == 0 {
            return Ok(());
        }
        expect_pointers(&[
            ("addend", addend, 4),
            ("mask of tiles", tiles, 2),
            ("output", out, self.dtype.bytes() as u64),
        ])?;
        let parameters = ElementwiseParameters { input: addend, gradient: 0, out, tiles, count, cols };
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.add_where_kept.launch_over(stream, (count, 1), &parameters) }
    }

    /// Writes numbers between -1 and 1 that look random, the same ones at every call: to time GEMMs on.
    ///
    /// # Errors
    /// Those of [`Elementwise::apply`].
    ///
    /// # Safety
    /// As for [`Elementwise::apply`].
    pub(crate) unsafe fn fill(&self, stream: Stream, out: DevicePtr, count: usize) -> Result<()> {
        if count == 0 {
            return Ok(());
        }
        expect_pointers(&[("output", out, self.dtype.bytes() as u64)])?;
        let count = count as u64;
        let parameters = ElementwiseParameters { input: 0, gradient: 0, out, tiles: 0, count, cols: 1 };
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.fill.launch_over(stream, (count, 1), &parameters) }
    }

    /// # Safety
    /// That of [`Elementwise::apply`], for the pointers of the parameters.
    unsafe fn launch(
        &self,
        stream: Stream,
        kernel: &Kernel,
        parameters: ElementwiseParameters,
        pointers: &[(&'static str, DevicePtr)],
    ) -> Result<()> {
        if parameters.count == 0 {
            return Ok(());
        }
        for (what, pointer) in pointers {
            expect_pointers(&[(what, *pointer, self.dtype.bytes() as u64)])?;
        }
        let over = (parameters.count, 16 / self.dtype.bytes() as u64);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { kernel.launch_over(stream, over, &parameters) }
    }
}

/// Returns the index of a function among the kernels.
fn index(function: ElementFunction) -> usize {
    match function {
        ElementFunction::Activation(Activation::Identity) => 0,
        ElementFunction::Activation(Activation::Relu) => 1,
        ElementFunction::Activation(Activation::Gelu) => 2,
        ElementFunction::Activation(Activation::Silu) => 3,
        ElementFunction::SquaredRelu => 4,
        ElementFunction::TanhGelu => 5,
    }
}

/// Returns the elements of a tensor, and its columns.
fn elements(rows: usize, cols: usize) -> Result<(u64, u32)> {
    let count = (rows as u64).checked_mul(cols as u64).zip(u32::try_from(cols).ok());
    count.ok_or(Error::TooLarge { rows, cols })
}
