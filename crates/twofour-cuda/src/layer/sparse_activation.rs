//! The layer that trains with a 2:4 activation and a dense weight.

use cudarc::driver::{CudaSlice, DevicePtr as _, result};
use twofour::{
    Compressed, Element, Mask,
    layer::{Accumulate, InputActivation, PrunedGradient, SparseActivationSettings},
};

use super::{
    DeviceSlice, DeviceSliceMut, LayerContext, bias_gradient, dense::dense, elements, forward::linear, gradient::zero,
    mask::TileMask, weight::PackedBuffer,
};
use crate::{
    Activation, DataType, DevicePtr, Error, Result,
    arguments::expect_dimension,
    cublaslt::DenseProblem,
    problem::{GemmProblem, Order, XOrder},
    raw::{
        DenseWeight,
        elementwise::{ElementFunction, FunctionGradient},
        gemm::Epilogue,
        prune::{BothWays, MaskChoice, NO_NAN, Watch, first_nan},
    },
};

/// A trainable linear layer over a pruned input in device memory, `y = P(f(x)) · Wᵀ + bias`. `f` is the layer's
/// [`InputActivation`], and `P` prunes with a 2:4 mask that is selected for every input, along tokens and along
/// features at once.
///
/// The forward GEMM and the weight gradient are sparse, the input gradient is dense. `W` is `[out_features,
/// in_features]`, of the activations' type; the caller owns it.
#[derive(Debug, Clone)]
pub struct SparseActivationLinear {
    context: LayerContext,
    settings: SparseActivationSettings,
    dtype: DataType,
}

/// A pruned input `[tokens, in_features]`, packed along features and along tokens: the state that the forward pass
/// leaves to the backward pass. Allocated once, it serves every input of its shape.
#[derive(Debug)]
pub struct PackedActivation {
    context: LayerContext,
    dtype: DataType,
    tokens: usize,
    in_features: usize,
    rows: PackedBuffer,
    columns: PackedBuffer,
    mask: TileMask,
    /// The index of the first NaN, a u64.
    wrong: CudaSlice<u64>,
    wrong_at: DevicePtr,
}

impl PackedActivation {
    /// Allocates memory for inputs of `tokens` tokens and `features` features.
    ///
    /// # Errors
    /// [`Error::Dimension`] for inputs without features, [`Error::OutOfMemory`], [`Error::Capturing`] while the stream
    /// is being captured.
    pub fn new(context: &LayerContext, dtype: DataType, tokens: usize, in_features: usize) -> Result<Self> {
        elements(tokens, in_features)?;
        expect_dimension("in_features", in_features, i32::MAX as usize)?;
        let rows = PackedBuffer::new(context, dtype, tokens, in_features)?;
        let columns = PackedBuffer::new(context, dtype, in_features, tokens)?;
        let mask = TileMask::new(context, tokens, in_features)?;
        let copied = context.stream().clone_htod(&[NO_NAN]);
        let wrong = copied.map_err(|error| Error::driver("allocating device memory", error))?;
        let wrong_at = wrong.device_ptr(context.stream()).0;
        let context = context.clone();
        Ok(Self { context, dtype, tokens, in_features, rows, columns, mask, wrong, wrong_at })
    }

    /// Waits until the input is packed, and reports a NaN in it.
    ///
    /// # Errors
    /// [`Error::NotANumber`] with the NaN's token and feature, [`Error::Driver`].
    pub fn check(&self) -> Result<()> {
        let copied = self.context.stream().clone_dtoh(&self.wrong);
        let found = copied.map_err(|error| Error::driver("reading the place of a NaN", error))?;
        self.context.synchronize()?;
        first_nan(found[0], self.in_features)
    }

    /// Returns the mask, `[tokens, in_features]`, as a copy in host memory; synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn mask(&self) -> Result<Mask> {
        self.mask.read(&self.context)
    }

    /// Returns the pruned input, `[tokens, in_features]`, compressed along features, as a copy in host memory;
    /// synchronizes the stream.
    ///
    /// # Errors
    /// [`Error::SliceType`] where it has another type, [`Error::Driver`].
    pub fn packed<T: Element>(&self) -> Result<Compressed<T>> {
        self.rows.to_compressed(&self.context)
    }

    /// Returns the transpose, `[in_features, tokens]`, compressed along tokens, as a copy in host memory; synchronizes
    /// the stream.
    ///
    /// # Errors
    /// Those of [`PackedActivation::packed`].
    pub fn packed_transpose<T: Element>(&self) -> Result<Compressed<T>> {
        self.columns.to_compressed(&self.context)
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of input features.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Returns the bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.rows.bytes() + self.columns.bytes() + self.mask.bytes()
    }
}

impl SparseActivationLinear {
    /// Returns a layer with these settings, for activations and weights of f16 or bf16.
    ///
    /// # Errors
    /// [`Error::DataType`] for other types.
    pub fn new(context: &LayerContext, dtype: DataType, settings: SparseActivationSettings) -> Result<Self> {
        if !matches!(dtype, DataType::F16 | DataType::BF16) {
            let operation = "a layer over 2:4 activations";
            return Err(Error::DataType { operation, dtype, supported: "f16, bf16" });
        }
        Ok(Self { context: context.clone(), settings, dtype })
    }

    /// Returns the settings.
    pub fn settings(&self) -> SparseActivationSettings {
        self.settings
    }

    /// Launches the layer's activation of an input `[tokens, in_features]`, the pruning of the result and its packing
    /// along both axes.
    ///
    /// # Errors
    /// [`Error::Length`], [`Error::SliceType`] and [`Error::OtherDevice`] where the input's length, type or device
    /// differs from the destination's, [`Error::Driver`].
    pub fn pack(&self, x: DeviceSlice<'_>, packed: &mut PackedActivation) -> Result<()> {
        let (context, dtype) = (&self.context, self.dtype);
        self.expect_packed(packed)?;
        let (tokens, in_features) = (packed.tokens, packed.in_features);
        let count = elements(tokens, in_features)?;
        let x = x.expect("the input", context, dtype, count)?;
        context.device().bind()?;
        // SAFETY: the place of a NaN is 8 bytes of the memory's own, and the stream is of its device.
        let set = unsafe { result::memset_d8_async(packed.wrong_at, 0xFF, 8, context.stream().cu_stream()) };
        set.map_err(|error| Error::driver("resetting the place of a NaN", error))?;
        if count == 0 {
            return Ok(());
        }
        let mut work = context.work();
        let data = match self.settings.activation {
            InputActivation::Identity => x,
            InputActivation::SquaredRelu => {
                let [squared] = work.parts([count * dtype.bytes()])?;
                let (stream, function) = (context.raw(), ElementFunction::SquaredRelu);
                // SAFETY: both tensors have that many elements, and the stream is of their device.
                unsafe { context.elementwise(dtype)?.apply(stream, function, x, squared, count) }?;
                squared
            }
        };
        let to = BothWays {
            packed: Some(packed.rows.packed()),
            transposed: Some(packed.columns.packed()),
            tiles: Some(packed.mask.tiles()),
            factor: None,
            skip: None,
        };
        let (dense, watch) =
            (DenseWeight { data, rows: tokens, cols: in_features }, Watch { nan: packed.wrong_at, flips: None });
        let (pruner, choice) = (context.pruner(dtype, dtype)?, MaskChoice::Rule(self.settings.rule));
        // SAFETY: the input has been found to be as long as its shape requires, the rest was allocated for that shape,
        // and the stream is of their device.
        unsafe { pruner.both_ways(context.raw(), dense, choice, to, packed.rows.order(), watch) }
    }

    /// Launches `y = P(f(x)) · Wᵀ + bias` for a packed input, with `weight` `[out_features, in_features]`, `bias`
    /// `[out_features]` and `y` `[tokens, out_features]`. The GEMM accumulates in f32.
    ///
    /// # Errors
    /// Those of [`SparseActivationLinear::pack`].
    pub fn forward(
        &self,
        x: &PackedActivation,
        weight: DeviceSlice<'_>,
        out_features: usize,
        bias: Option<DeviceSlice<'_>>,
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (context, dtype) = (&self.context, self.dtype);
        self.expect_packed(x)?;
        let weight = weight.expect("the weight", context, dtype, elements(out_features, x.in_features)?)?;
        let bias = bias.map(|bias| bias.expect("the bias", context, dtype, out_features)).transpose()?;
        let y = y.expect("the output", context, dtype, elements(x.tokens, out_features)?)?;
        // The packed operand is the activation: the problem's `features` are tokens, and its `tokens` are output
        // features.
        let problem = GemmProblem::plain(dtype, dtype, x.tokens, out_features, x.in_features);
        let problem = GemmProblem { order: Order::FeaturesFirst, ..problem };
        let epilogue = Epilogue { token_bias: bias, ..Epilogue::default() };
        linear(context, problem, x.rows.packed(), weight, epilogue, y)
    }

    /// Launches the weight gradient `dw = dyᵀ · P(f(x))` for `dy` `[tokens, out_features]` and `dw` `[out_features,
    /// in_features]`, of f32 or of the activations' type. The GEMM accumulates in f32.
    ///
    /// # Errors
    /// Those of [`SparseActivationLinear::pack`].
    pub fn weight_gradient(
        &self,
        dy: DeviceSlice<'_>,
        x: &PackedActivation,
        out_features: usize,
        accumulate: Accumulate,
        dw: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (context, dtype, output) = (&self.context, self.dtype, dw.dtype());
        self.expect_packed(x)?;
        super::gradient::expect_gradient(output, dtype)?;
        let dy = dy.expect("the output gradient", context, dtype, elements(x.tokens, out_features)?)?;
        let dw = dw.expect("the weight gradient", context, output, elements(out_features, x.in_features)?)?;
        if x.tokens == 0 {
            return zero(context, accumulate, dw, out_features * x.in_features * output.bytes());
        }
        let problem = GemmProblem {
            x: XOrder::ReductionFirst,
            accumulate: accumulate == Accumulate::Add,
            ..GemmProblem::plain(dtype, output, x.in_features, out_features, x.tokens)
        };
        linear(context, problem, x.columns.packed(), dy, Epilogue::default(), dw)
    }

    /// Launches the input gradient `dx = (dy · W) ⊙ f'(x)`, and applies the input's mask to it if the settings require
    /// it. `x` `[tokens, in_features]` is the layer's input, before its activation.
    ///
    /// # Errors
    /// Those of [`SparseActivationLinear::pack`]; [`Error::NoLibrary`] where cuBLASLt is not installed.
    pub fn input_gradient(
        &self,
        dy: DeviceSlice<'_>,
        (weight, out_features): (DeviceSlice<'_>, usize),
        x: DeviceSlice<'_>,
        packed: &PackedActivation,
        dx: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (context, dtype) = (&self.context, self.dtype);
        self.expect_packed(packed)?;
        let (tokens, in_features) = (packed.tokens, packed.in_features);
        let dy = dy.expect("the output gradient", context, dtype, elements(tokens, out_features)?)?;
        let weight = weight.expect("the weight", context, dtype, elements(out_features, in_features)?)?;
        let inputs = elements(tokens, in_features)?;
        let x = x.expect("the input", context, dtype, inputs)?;
        let dx = dx.expect("the input gradient", context, dtype, inputs)?;
        if out_features == 0 {
            return zero(context, Accumulate::Overwrite, dx, inputs * dtype.bytes());
        }
        let problem = DenseProblem {
            element: dtype,
            output: dtype,
            rows: in_features,
            cols: tokens,
            reduction: out_features,
            a_transposed: false,
            b_transposed: false,
            accumulate: false,
        };
        dense(context, problem, weight, dy, dx)?;
        let masked = self.settings.input_gradient == PrunedGradient::Masked;
        let function = match self.settings.activation {
            InputActivation::Identity if !masked => return Ok(()),
            InputActivation::Identity => ElementFunction::Activation(Activation::Identity),
            InputActivation::SquaredRelu => ElementFunction::SquaredRelu,
        };
        let tiles = masked.then(|| packed.mask.tiles());
        let tensors = FunctionGradient { input: x, gradient: dx, out: dx, tiles };
        // SAFETY: the tensors have been found to be as long as their shape requires, and the stream is of their device.
        unsafe { context.elementwise(dtype)?.gradient(context.raw(), function, tensors, tokens, in_features) }
    }

    /// Launches the bias gradient: the column sums of `dy` `[tokens, out_features]`, in f32.
    ///
    /// # Errors
    /// Those of [`bias_gradient`].
    pub fn bias_gradient(
        &self,
        dy: DeviceSlice<'_>,
        tokens: usize,
        accumulate: Accumulate,
        db: DeviceSliceMut<'_>,
    ) -> Result<()> {
        bias_gradient(&self.context, dy, tokens, accumulate, db)
    }

    fn expect_packed(&self, packed: &PackedActivation) -> Result<()> {
        let (expected, found) = (self.dtype, packed.dtype);
        if expected != found {
            return Err(Error::SliceType { what: "the packed input", expected, found });
        }
        let (expected, found) = (self.context.ordinal(), packed.context.ordinal());
        if expected != found {
            return Err(Error::OtherDevice { what: "the packed input", expected, found });
        }
        Ok(())
    }
}
