//! The forward pass and the input gradient of a sparse layer.

use twofour::layer::Accumulate;

use super::{
    DeviceSlice, DeviceSliceMut, LayerContext, SparseLinear,
    dense::{prepare_unpacked, unpacked_product},
    elements,
    gradient::zero,
    quantized::{self, quantized_linear},
    weight::PackedBuffer,
};
use crate::{
    Activation, DataType, DevicePtr, Error, Result,
    problem::{EpilogueKind, GemmProblem},
    raw::{
        Packed,
        elementwise::{ElementFunction, FunctionGradient},
        gemm::{Epilogue, Gemm, GemmOperands},
        prune::MaskChoice,
    },
};

/// The epilogue of a forward pass, and the tensors that it stores besides the output.
#[derive(Debug, Default)]
pub struct Forward<'a> {
    /// One value for each output feature, of the activations' type.
    pub bias: Option<DeviceSlice<'a>>,
    /// The activation.
    pub activation: Activation,
    /// The destination of the pre-activation, `[tokens, out_features]`, which [`activation_gradient`] requires. The
    /// activation is then applied to the stored values, which are rounded to their type.
    pub pre_activation: Option<DeviceSliceMut<'a>>,
}

impl SparseLinear {
    /// Launches `y = activation(x · Wᵀ + bias)` with the packed weight, for `x` `[tokens, in_features]` and `y`
    /// `[tokens, out_features]`. The GEMM accumulates in f32.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length), [`Error::SliceType`](crate::Error::SliceType) and
    /// [`Error::OtherDevice`](crate::Error::OtherDevice) for a slice with another length, type or device;
    /// [`Error::Capturing`](crate::Error::Capturing) where a plan is missing while the stream is captured.
    pub fn forward(
        &self,
        x: DeviceSlice<'_>,
        tokens: usize,
        forward: Forward<'_>,
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (context, dtype) = (&self.context, self.dtype);
        let Forward { bias, activation, pre_activation } = forward;
        let x = x.expect("the input", context, dtype, elements(tokens, self.in_features)?)?;
        let outputs = elements(tokens, self.out_features)?;
        let y = y.expect("the output", context, dtype, outputs)?;
        let bias = bias.map(|bias| bias.expect("the bias", context, dtype, self.out_features)).transpose()?;
        let problem = forward_problem(self, tokens);
        let weight = self.float8_rows.as_ref().map_or(&self.packed, |(packed, _)| packed);
        let Some(pre) = pre_activation else {
            return self.multiply(problem, weight, x, Epilogue { bias, activation, ..Epilogue::default() }, y);
        };
        let pre = pre.expect("the pre-activation", context, dtype, outputs)?;
        self.multiply(problem, weight, x, Epilogue { bias, ..Epilogue::default() }, pre)?;
        let function = ElementFunction::Activation(activation);
        // SAFETY: both tensors have that many elements, as was checked; the stream is of their device.
        unsafe { context.elementwise(dtype)?.apply(context.raw(), function, pre, y, outputs) }
    }

    /// Launches `dx = dy · W` with the packed weight, for the gradient `dy` `[tokens, out_features]` of the
    /// pre-activation and `dx` `[tokens, in_features]`. The GEMM uses the packed transpose where there is one,
    /// otherwise it is dense, with the weight unpacked to the workspace.
    ///
    /// # Errors
    /// Those of [`SparseLinear::forward`]; [`Error::NoLibrary`](crate::Error::NoLibrary) where the GEMM is dense and
    /// cuBLASLt is not installed.
    pub fn input_gradient(&self, dy: DeviceSlice<'_>, tokens: usize, dx: DeviceSliceMut<'_>) -> Result<()> {
        let (context, dtype) = (&self.context, self.dtype);
        let dy = dy.expect("the output gradient", context, dtype, elements(tokens, self.out_features)?)?;
        let dx = dx.expect("the input gradient", context, dtype, elements(tokens, self.in_features)?)?;
        if let Some(transposed) = &self.transposed {
            return self.multiply(input_gradient_problem(self, tokens), transposed, dy, Epilogue::default(), dx);
        }
        unpacked_product(context, (self.packed.packed(), self.packed.shape(), dtype), (dy, tokens), dx)
    }

    /// Launches a GEMM with one of the packed weights, in the layer's precision.
    fn multiply(
        &self,
        problem: GemmProblem,
        weight: &PackedBuffer,
        x: DevicePtr,
        epilogue: Epilogue,
        out: DevicePtr,
    ) -> Result<()> {
        let context = &self.context;
        match &self.float8 {
            None => linear(context, problem, weight.packed(), x, epilogue, out),
            Some(_) if problem.tokens == 0 => Ok(()),
            Some(scale) => {
                let epilogue = Epilogue { feature_scales: Some(scale.scales()), ..epilogue };
                quantized_linear(context, problem, weight.packed(), (x, self.dtype), epilogue, out)
            }
        }
    }
}

/// Returns the problem of the forward pass.
fn forward_problem(layer: &SparseLinear, tokens: usize) -> GemmProblem {
    let element = if layer.float8.is_some() { DataType::E4M3 } else { layer.dtype };
    GemmProblem::plain(element, layer.dtype, layer.out_features, tokens, layer.in_features)
}

/// Returns the problem of the input gradient with the packed transpose.
fn input_gradient_problem(layer: &SparseLinear, tokens: usize) -> GemmProblem {
    let (features, reduction) = (layer.in_features, layer.out_features);
    if layer.float8.is_none() {
        return GemmProblem::plain(layer.dtype, layer.dtype, features, tokens, reduction);
    }
    let problem = GemmProblem::plain(DataType::E4M3, layer.dtype, features, tokens, reduction);
    GemmProblem { x_element: DataType::E5M2, ..problem }
}

/// Plans the GEMMs of the forward pass and the input gradient for a number of tokens.
pub(super) fn prepare(layer: &SparseLinear, tokens: usize) -> Result<()> {
    if tokens == 0 || layer.out_features == 0 || layer.in_features == 0 {
        return Ok(());
    }
    let (context, dtype) = (&layer.context, layer.dtype);
    context.elementwise(dtype)?;
    // Weights are packed again in every step.
    layer.pruner.load(&[MaskChoice::Given], layer.packed.shape(), layer.packed.order())?;
    if layer.float8.is_some() {
        for kind in [EpilogueKind::Scales, EpilogueKind::ScaledActivation] {
            quantized::prepare(context, forward_problem(layer, tokens), kind, dtype)?;
        }
        if layer.float8_rows.is_some() {
            return prepare_unpacked(context, layer.packed.shape(), dtype, tokens);
        }
        return quantized::prepare(context, input_gradient_problem(layer, tokens), EpilogueKind::Scales, dtype);
    }
    let mut bytes = 0;
    for epilogue in [None, Some(EpilogueKind::Bias), Some(EpilogueKind::Activation)] {
        let gemm = context.packed_gemm(GemmProblem { epilogue, ..forward_problem(layer, tokens) })?;
        bytes = bytes.max(gemm.most_sparse_bytes());
    }
    if layer.transposed.is_some() {
        bytes = bytes.max(context.packed_gemm(input_gradient_problem(layer, tokens))?.most_sparse_bytes());
    } else {
        prepare_unpacked(context, layer.packed.shape(), dtype, tokens)?;
    }
    context.work().parts([bytes])?;
    Ok(())
}

/// Launches a GEMM with a packed weight; without input features the result is zeros.
pub(super) fn linear(
    context: &LayerContext,
    problem: GemmProblem,
    weight: Packed,
    x: DevicePtr,
    epilogue: Epilogue,
    out: DevicePtr,
) -> Result<()> {
    if problem.features == 0 || problem.tokens == 0 {
        return Ok(());
    }
    if problem.reduction == 0 {
        if epilogue != Epilogue::default() {
            return Err(Error::NoMethod { what: "a bias or an activation without input features".into() });
        }
        return zero(context, Accumulate::Overwrite, out, problem.features * problem.tokens * problem.output.bytes());
    }
    let gemm = context.packed_gemm(GemmProblem { epilogue: epilogue.kind(), ..problem })?;
    let mut work = context.work();
    let mut parts = |bytes| work.parts([bytes]);
    let (way, [workspace]) = gemm.place(context, (x, out), &mut parts)?;
    // SAFETY: the operands come from slices that have been found to be as long as the problem reads and writes; the
    // stream is of the plan's device.
    unsafe { gemm.run(context, way, GemmOperands { weight, x, out, workspace }, epilogue, &mut parts) }
}

/// Returns the bytes of workspace of a GEMM with operands at these addresses.
pub(super) fn workspace_bytes(gemm: &Gemm, x: DevicePtr, out: DevicePtr) -> usize {
    if (x | out).is_multiple_of(16) { gemm.workspace_bytes() } else { gemm.unaligned_workspace_bytes() }
}

/// Launches `dy ← dy · activation'(pre)` for `[tokens, out_features]` tensors of f32, f16 or bf16. It replaces the
/// gradient of a layer's output by that of its pre-activation, from which the other gradients are computed.
///
/// # Errors
/// Those of [`SparseLinear::forward`].
pub fn activation_gradient(
    context: &LayerContext,
    activation: Activation,
    pre: DeviceSlice<'_>,
    dy: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len): (DataType, usize) = (dy.dtype(), dy.len());
    let input = pre.expect("the pre-activation", context, dtype, len)?;
    let gradient = dy.expect("the output gradient", context, dtype, len)?;
    if activation == Activation::Identity {
        return Ok(());
    }
    let tensors = FunctionGradient { input, gradient, out: gradient, tiles: None };
    let function = ElementFunction::Activation(activation);
    // SAFETY: both tensors have that many elements, as was checked; the stream is of their device.
    unsafe { context.elementwise(dtype)?.gradient(context.raw(), function, tensors, len, 1) }
}
