//! Linear layers of a few tokens with a dense weight of integers: `y = x · Wᵀ + bias`, bound by HBM bandwidth.

use twofour_cuda::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    device::{Kernel, Launch},
    raw::headers,
    source::{File, Source, Support},
};

/// Most tokens of a launch.
pub(crate) const MAX_TOKENS: usize = 32;

/// Rows of W of a CTA.
const ROWS: u32 = 16;

/// Warps of a CTA, and steps that each loads ahead.
const WARPS: u32 = 8;
const DEPTH: u32 = 4;

/// Tiles of eight tokens that there are kernels for.
const TILES: [usize; 3] = [1, 2, 4];

/// Types of results.
const TYPES: [DataType; 2] = [DataType::F16, DataType::BF16];

/// A form of weight and input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum DenseForm {
    /// 8-bit integers with an f32 scale for each row; tokens of 8-bit integers with an f32 scale each.
    Integers,
    /// 8-bit integers with an f32 scale for each row; tokens of the results' type.
    Int8,
    /// int4 with an f16 scale for each [`GROUP`] columns; tokens of the results' type.
    Int4,
}

/// Columns of an int4 weight that share a scale.
pub(crate) const GROUP: usize = 64;

impl DenseForm {
    const ALL: [DenseForm; 3] = [DenseForm::Integers, DenseForm::Int8, DenseForm::Int4];

    /// Returns the number that columns are a multiple of: a kernel's step.
    pub(crate) fn step(self) -> usize {
        match self {
            DenseForm::Integers | DenseForm::Int8 => 64,
            DenseForm::Int4 => 2 * GROUP,
        }
    }

    /// Returns the bytes of a row of W, and of a token, of this many columns; a token of floats is of 16 bits.
    fn row_bytes(self, columns: u32) -> [u32; 2] {
        match self {
            DenseForm::Integers => [columns, columns],
            DenseForm::Int8 => [columns, 2 * columns],
            DenseForm::Int4 => [columns / 2, 2 * columns],
        }
    }

    fn name(self) -> &'static str {
        match self {
            DenseForm::Integers => "integers",
            DenseForm::Int8 => "int8",
            DenseForm::Int4 => "int4",
        }
    }
}

/// The kernels for one form and type of results, on one device, by [`TILES`].
#[derive(Debug, Clone)]
pub(crate) struct DenseProducts {
    form: DenseForm,
    kernels: [Kernel; 3],
}

/// The tensors of a launch: addresses that are multiples of 16, as `kernel.cu` says what each is; 0 where there is
/// none.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DenseOperands {
    pub(crate) weight: DevicePtr,
    pub(crate) scales: DevicePtr,
    pub(crate) x: DevicePtr,
    pub(crate) token_scales: DevicePtr,
    pub(crate) bias: DevicePtr,
    pub(crate) y: DevicePtr,
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
struct Parameters {
    operands: [DevicePtr; 6],
    features: u32,
    tokens: u32,
    row_bytes: u32,
    x_row_bytes: u32,
}

fn source(form: DenseForm, dtype: DataType) -> Source {
    let file = File::new;
    let floats = file("decode/dense/floats.cuh", include_str!("floats.cuh"));
    let of_form = match form {
        DenseForm::Integers => vec![file("decode/dense/integers.cuh", include_str!("integers.cuh"))],
        DenseForm::Int8 => vec![file("decode/dense/bytes.cuh", include_str!("bytes.cuh")), floats],
        DenseForm::Int4 => vec![file("decode/dense/nibbles.cuh", include_str!("nibbles.cuh")), floats],
    };
    Source::new(format!("decode-dense-{}-{dtype}", form.name()), Support::ALL)
        .define(format!("#define ELEMENT {}\n#define WARPS {WARPS}\n#define DEPTH {DEPTH}\n", dtype.definition()))
        .with([headers::COMMON, headers::DENSE_PRODUCT, file("decode/dense/loads.cuh", include_str!("loads.cuh"))])
        .with(of_form)
        .with([file("decode/dense/kernel.cu", include_str!("kernel.cu"))])
}

/// Returns every source.
pub(crate) fn sources() -> impl Iterator<Item = Source> {
    DenseForm::ALL.into_iter().flat_map(|form| TYPES.map(|dtype| source(form, dtype)))
}

impl DenseProducts {
    /// Loads the kernels for results of f16 or bf16.
    pub(crate) fn new(device: &Device, form: DenseForm, dtype: DataType) -> Result<Self> {
        if !TYPES.contains(&dtype) {
            let operation = "a dense layer of integers";
            return Err(Error::DataType { operation, dtype, supported: "f16, bf16" });
        }
        let source = source(form, dtype);
        let kernel = |tiles: usize| device.kernel(&source, &format!("dense_{tiles}"));
        Ok(Self { form, kernels: [kernel(TILES[0])?, kernel(TILES[1])?, kernel(TILES[2])?] })
    }

    /// Launches the layer for 1 to [`MAX_TOKENS`] tokens and a weight of `features` rows of `columns`, a positive
    /// multiple of [`DenseForm::step`].
    ///
    /// # Safety
    /// The pointers are valid for this shape until the stream has passed this call; those of weight, tokens and scales
    /// of groups are multiples of 16; the stream is of this device.
    pub(crate) unsafe fn run(
        &self,
        stream: Stream,
        (features, tokens, columns): (u32, u32, u32),
        operands: DenseOperands,
    ) -> Result<()> {
        let DenseOperands { weight, scales, x, token_scales, bias, y } = operands;
        let [row_bytes, x_row_bytes] = self.form.row_bytes(columns);
        let operands = [weight, scales, x, token_scales, bias, y];
        let parameters = Parameters { operands, features, tokens, row_bytes, x_row_bytes };
        let tiles = TILES.iter().position(|tiles| tokens as usize <= 8 * tiles).unwrap_or(TILES.len() - 1);
        let launch = Launch::simple((features.div_ceil(ROWS), 1), 32 * WARPS);
        // SAFETY: the structure has the kernel's layout; its pointers are valid for the shape, as this function
        // requires.
        unsafe { self.kernels[tiles].launch(stream, launch, &parameters) }
    }
}
