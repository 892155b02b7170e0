//! Dense linear layers in 8-bit integers.

use twofour_cuda::{
    DataType, DevicePtr, Error, Result,
    arguments::{Memory, product, side},
    cublaslt::{DenseProblem, WORKSPACE_BYTES},
    layer::{DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext},
    problem::{EpilogueKind, GemmProblem},
    raw::{
        gemm::{Epilogue, finish::Finish},
        quantize::Quantizer,
    },
};

use crate::cuda::raw::decode::dense::{DenseForm, DenseOperands, DenseProducts, MAX_TOKENS};

/// A dense layer `y = x · Wᵀ + bias` with a weight of 8-bit integers and a scale for each row, multiplied in exact
/// integers: models whose file has dense 8-bit integers are run by it, and
/// [`PackedLinear`](twofour_cuda::layer::PackedLinear) of 8-bit integers is compared with it.
///
/// Up to 32 tokens of a multiple of 64 features have a kernel of this crate, which reads the weight once and writes
/// results. Other GEMMs are cuBLASLt's, which writes sums in i32, and a kernel after it applies scales and bias. Both
/// have the same results to the bit.
#[derive(Debug)]
pub struct DenseInt8Linear {
    context: LayerContext,
    weight: DeviceBuffer,
    scales: DeviceBuffer,
    bias: Option<DeviceBuffer>,
    shape: (usize, usize),
    /// Most tokens of this crate's kernel.
    few: usize,
}

/// The address of the input: integers with their scales, or floats.
#[derive(Clone, Copy)]
enum Tokens {
    Quantized(DevicePtr, DevicePtr),
    Floats(DevicePtr),
}

/// The addresses of a call's other tensors.
#[derive(Clone, Copy)]
struct Places {
    weight: DevicePtr,
    scales: DevicePtr,
    bias: Option<DevicePtr>,
    y: DevicePtr,
}

impl DenseInt8Linear {
    /// Returns the layer of a weight `[out_features, in_features]` of i8, f32 scales `[out_features]` and a bias
    /// `[out_features]` of the results' type.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::SliceType`] and [`Error::OtherDevice`] for tensors that do not fit;
    /// [`Error::Multiple`] for features that are not multiples of 4, as cuBLASLt requires.
    pub fn new(
        context: &LayerContext,
        (out_features, in_features): (usize, usize),
        weight: DeviceBuffer,
        scales: DeviceBuffer,
        bias: Option<DeviceBuffer>,
    ) -> Result<Self> {
        twofour_cuda::arguments::expect_multiple("out_features", out_features, 4)?;
        twofour_cuda::arguments::expect_multiple("in_features", in_features, 4)?;
        weight.as_slice().at("the weight", context, DataType::I8, product(out_features, in_features)?)?;
        scales.as_slice().at("the scales", context, DataType::F32, out_features)?;
        let shape = (out_features, in_features);
        Ok(Self { context: context.clone(), weight, scales, bias, shape, few: MAX_TOKENS })
    }

    /// Returns the layer with cuBLASLt's GEMM for any number of tokens.
    #[must_use]
    pub fn by_library(self) -> Self {
        Self { few: 0, ..self }
    }

    /// Launches the layer for quantized tokens: i8 `values` `[tokens, in_features]` with f32 `scales` `[tokens]`, as
    /// [`normalize_tokens`](super::normalize_tokens) writes them, and `y` `[tokens, out_features]` of f16 or bf16.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::SliceType`] and [`Error::OtherDevice`] for tensors that do not fit;
    /// [`Error::NoLibrary`] where cuBLASLt is missing, [`Error::Vendor`] where it fails; [`Error::Capturing`] where the
    /// GEMM must be planned during a capture.
    pub fn forward_quantized(
        &self,
        (values, scales): (DeviceSlice<'_>, DeviceSlice<'_>),
        tokens: usize,
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (context, in_features) = (&self.context, self.shape.1);
        let x = values.at("the input", context, DataType::I8, product(tokens, in_features)?)?;
        let scales = scales.at("the scales of the input", context, DataType::F32, tokens)?;
        self.run(Tokens::Quantized(x, scales), tokens, y)
    }

    /// Launches the layer for `x` `[tokens, in_features]` of the results' type, which is quantized first with a scale
    /// for each token.
    ///
    /// # Errors
    /// Those of [`DenseInt8Linear::forward_quantized`].
    pub fn forward(&self, x: DeviceSlice<'_>, tokens: usize, y: DeviceSliceMut<'_>) -> Result<()> {
        let x = x.at("the input", &self.context, y.dtype(), product(tokens, self.shape.1)?)?;
        self.run(Tokens::Floats(x), tokens, y)
    }

    fn run(&self, x: Tokens, tokens: usize, y: DeviceSliceMut<'_>) -> Result<()> {
        let (context, (out_features, in_features)) = (&self.context, self.shape);
        let output = y.dtype();
        if !matches!(output, DataType::F16 | DataType::BF16) {
            let operation = "a dense layer of 8-bit integers";
            return Err(Error::DataType { operation, dtype: output, supported: "f16, bf16" });
        }
        let results = product(tokens, out_features)?;
        let y = y.at("the result", context, output, results)?;
        let bias = self.bias.as_ref().map(|bias| bias.as_slice().at("the bias", context, output, out_features));
        let places = Places {
            weight: self.weight.as_slice().at("the weight", context, DataType::I8, self.weight.len())?,
            scales: self.scales.as_slice().at("the scales", context, DataType::F32, out_features)?,
            bias: bias.transpose()?,
            y,
        };
        if results == 0 || in_features == 0 {
            return Ok(());
        }
        let is_aligned = match x {
            Tokens::Quantized(x, _) => (x | places.weight).is_multiple_of(16),
            Tokens::Floats(_) => places.weight.is_multiple_of(16),
        };
        match tokens <= self.few && in_features.is_multiple_of(DenseForm::Integers.step()) && is_aligned {
            true => self.run_few(x, tokens, output, places),
            false => self.run_many(x, tokens, output, places),
        }
    }

    /// Launches this crate's kernel.
    fn run_few(&self, x: Tokens, tokens: usize, output: DataType, places: Places) -> Result<()> {
        let (context, (out_features, in_features)) = (&self.context, self.shape);
        let kernels = DenseProducts::of(context, DenseForm::Integers, output)?;
        let quantizer = context.quantizer(output)?;
        let shape = (side("out_features", out_features)?, side("tokens", tokens)?, side("in_features", in_features)?);
        let mut work = context.work();
        let own = work.parts([tokens * in_features, 4 * tokens])?;
        let Places { weight, scales, bias, y } = places;
        let (x, token_scales) = quantized(context, &quantizer, x, (tokens, in_features), own)?;
        let operands = DenseOperands { weight, scales, x, token_scales, bias: bias.unwrap_or(0), y };
        // SAFETY: the slices have been found to be as long as the layer requires, weight and tokens aligned; the stream
        // is of their device.
        unsafe { kernels.run(context.raw(), shape, operands) }
    }

    /// Launches cuBLASLt's GEMM and the kernel of its epilogue.
    fn run_many(&self, x: Tokens, tokens: usize, output: DataType, places: Places) -> Result<()> {
        let (context, (out_features, in_features)) = (&self.context, self.shape);
        let dense_problem = DenseProblem {
            element: DataType::I8,
            output: DataType::I32,
            rows: out_features,
            cols: tokens,
            reduction: in_features,
            a_transposed: true,
            b_transposed: false,
            accumulate: false,
        };
        let plan = context.dense_plan(dense_problem)?;
        let (finish, quantizer) = (context.kernels((), Finish::new)?, context.quantizer(output)?);
        let problem = GemmProblem {
            epilogue: Some(EpilogueKind::Scales),
            ..GemmProblem::plain(DataType::I8, output, out_features, tokens, in_features)
        };
        let mut work = context.work();
        let [sums, own, own_scales, workspace] =
            work.parts([4 * tokens * out_features, tokens * in_features, 4 * tokens, WORKSPACE_BYTES])?;
        let (x, token_scales) = quantized(context, &quantizer, x, (tokens, in_features), [own, own_scales])?;
        let epilogue = Epilogue {
            feature_scales: Some(places.scales),
            token_scales: Some(token_scales),
            bias: places.bias,
            ..Epilogue::default()
        };
        // SAFETY: the slices have been found to be as long as the problem requires, the workspace has room for the
        // sums, and the stream is of their device.
        unsafe {
            plan.run(context.raw(), places.weight, x, sums, workspace)?;
            finish.run(context.raw(), problem, (sums, DataType::I32), places.y, epilogue)
        }
    }

    /// Returns the bytes of device memory that the layer holds.
    pub fn bytes(&self) -> usize {
        let bias = self.bias.as_ref().map_or(0, |bias| bias.len() * bias.dtype().bytes());
        self.weight.len() + 4 * self.scales.len() + bias
    }
}

/// Returns quantized tokens and their scales: those that are there, or floats quantized to `own` workspace.
fn quantized(
    context: &LayerContext,
    quantizer: &Quantizer,
    x: Tokens,
    (tokens, in_features): (usize, usize),
    [own, own_scales]: [DevicePtr; 2],
) -> Result<(DevicePtr, DevicePtr)> {
    match x {
        Tokens::Quantized(x, scales) => Ok((x, scales)),
        Tokens::Floats(x) => {
            // SAFETY: the input has been found to be as long as the layer requires, the workspace has room for its
            // integers, and the stream is of their device.
            unsafe { quantizer.rows_to_i8(context.raw(), x, (tokens, in_features), own, own_scales) }?;
            Ok((own, own_scales))
        }
    }
}
