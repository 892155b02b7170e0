//! The suite `train-linear`: a layer forward and backward, with a new mask in every step.

use anyhow::{Context, Result};
use cudarc::driver::{CudaSlice, DevicePtr};
use serde::Serialize;
use twofour::{Axis, estimate::Estimator, select::Transposable};
use twofour_cuda::{
    DataType, Device, Stream,
    libraries::cublaslt::{self, DenseProblem, PartialSums},
    measure::{Contender, Time, Timer, random},
    problem::{GemmProblem, Order, XOrder},
    raw::{
        DenseWeight, Packed,
        compress::{CompressRule, CompressTarget, Compressor},
        engine,
        gemm::{Epilogue, Gemm, GemmMethod, GemmOperands},
        prune::{BothWays, MaskChoice, NO_NAN, Pruner, Watch, first_nan},
    },
};

use super::gemm::Libraries;

/// One contender's time for one part of a training step of a linear layer, or for all of it.
#[derive(Debug, Serialize)]
pub(crate) struct TrainRow {
    /// Data type of weights, activations and gradients.
    pub(crate) dtype: &'static str,
    /// Tokens, input features, output features.
    pub(crate) shape: [usize; 3],
    /// The contender.
    pub(crate) contender: &'static str,
    /// The part, or the whole step.
    pub(crate) part: &'static str,
    /// The kernels.
    pub(crate) kernel: String,
    /// Median, microseconds.
    pub(crate) us: f64,
    /// The minimum, microseconds.
    pub(crate) min_us: f64,
    /// The maximum, microseconds.
    pub(crate) max_us: f64,
}

/// Tokens, in_features, out_features: the layers of the ViT that 2:4 training was designed for.
pub(crate) const TRAIN_SHAPES: [[usize; 3]; 2] = [[13008, 1024, 4096], [13008, 4096, 1024]];

/// Data types of training.
pub(crate) const TRAIN_TYPES: [DataType; 2] = [DataType::F16, DataType::BF16];

/// Times the parts of a step and the whole step. Dense: cuBLASLt. 2:4: a greedy transposable mask selected in every step, forward pass and input
/// gradient by our kernels, and the weight gradient dense by cuBLASLt, or by our kernels from an unbiased 2:4 estimate of the output gradient (MVUE,
/// computed in every step).
pub(crate) fn train_linear(
    device: &Device,
    libraries: &Libraries,
    element: DataType,
    [tokens, inputs, outputs]: [usize; 3],
    rounds: u32,
) -> Result<Vec<TrainRow>> {
    let stream = device.context().new_stream()?;
    let raw = Stream(stream.cu_stream());
    let mut timer = Timer::new(device, &stream)?;
    let tensor = |len: usize, seed| random(&stream, element, len, seed);
    let (w, x, dy) = (tensor(outputs * inputs, 1)?, tensor(tokens * inputs, 2)?, tensor(tokens * outputs, 3)?);
    let memory = |bytes: usize| -> Result<CudaSlice<u8>> { Ok(stream.alloc_zeros(bytes)?) };
    let (y, dx, dw) = (memory(tokens * outputs * 2)?, memory(tokens * inputs * 2)?, memory(outputs * inputs * 2)?);
    let packed = [memory(outputs * inputs)?, memory(outputs * inputs / 8)?];
    let transposed = [memory(outputs * inputs)?, memory(outputs * inputs / 8)?];
    let depth = tokens.next_multiple_of(64);
    let estimate = [memory(outputs * depth)?, memory(outputs * depth / 8)?];
    let workspace = memory(cublaslt::WORKSPACE_BYTES)?;
    let nan = stream.clone_htod(&[NO_NAN])?;
    let at = |memory: &CudaSlice<u8>| memory.device_ptr(&stream).0;
    let packed_at = |memory: &[CudaSlice<u8>; 2]| Packed { values: at(&memory[0]), meta: at(&memory[1]) };
    let (packed, transposed, estimate) = (packed_at(&packed), packed_at(&transposed), packed_at(&estimate));
    let (w, x, dy, y, dx, dw, workspace) = (at(&w), at(&x), at(&dy), at(&y), at(&dx), at(&dw), at(&workspace));

    // Column-major: `[features, tokens]` is `[tokens, features]` row-major.
    let dense = |rows, cols, reduction, a_transposed, b_transposed| DenseProblem {
        element,
        output: element,
        rows,
        cols,
        reduction,
        a_transposed,
        b_transposed,
        accumulate: false,
    };
    let mut dense_part = |dense: DenseProblem, a, b, d| -> Result<(cublaslt::CublasLtPlan, String)> {
        let plans = libraries.dense()?.plans(dense, PartialSums::Any, engine::HEURISTICS)?;
        // SAFETY: `a`, `b` and `d` are tensors allocated above with the shapes that `dense` describes, and live until the stream has been waited for.
        let run = |plan: &cublaslt::CublasLtPlan| unsafe { plan.run(raw, a, b, d, workspace) };
        let all = plans.iter().map(|plan| Contender::new("cublaslt", "", move || run(plan))).collect();
        let (which, _) = timer.fastest(all)?.context("cuBLASLt has no algorithm for a training step")?;
        Ok((plans[which].clone(), format!("heuristic {which}")))
    };
    let forward = dense_part(dense(outputs, tokens, inputs, true, false), w, x, y)?;
    let input = dense_part(dense(inputs, tokens, outputs, false, false), w, dy, dx)?;
    let weight = dense_part(dense(inputs, outputs, tokens, false, true), x, dy, dw)?;

    let mut sparse_part = |problem: GemmProblem, weight, x, out| -> Result<Gemm> {
        let plans = GemmMethod::all(problem, device.architecture())
            .into_iter()
            .map(|method| Ok(Gemm::with(device, problem, method)?));
        let plans = plans.collect::<Result<Vec<_>>>()?;
        // SAFETY: `weight` is 2:4 and packed in the order of GEMMs; `x` and `out` have the problem's shapes; all live until the stream has been waited for.
        let run =
            |plan: &Gemm| unsafe { plan.run(raw, GemmOperands { weight, x, out, workspace: 0 }, Epilogue::default()) };
        let all = plans.iter().map(|plan| Contender::new("twofour", plan.kernel(), move || run(plan))).collect();
        let (which, _) = timer.fastest(all)?.context("there is no kernel")?;
        Ok(plans[which].clone())
    };
    let pruner = Pruner::new(device, element, element)?;
    let to = BothWays { packed: Some(packed), transposed: Some(transposed), ..BothWays::default() };
    let watch = Watch { nan: nan.device_ptr(&stream).0, flips: None };
    let weight_there = DenseWeight { data: w, rows: outputs, cols: inputs };
    // The order of metadata depends on the element type only, not on the tile.
    let order = Gemm::meta_order_of(element);
    let rule = Transposable::GreedyAbs;
    // SAFETY: the weight, its packed forms and the counter are allocated above for `[outputs, inputs]`, and live until the stream has been waited for.
    let prune = || unsafe { pruner.both_ways(raw, weight_there, MaskChoice::Rule(rule), to, order, watch) };
    prune()?;
    let product = |features, reduction| GemmProblem::plain(element, element, features, tokens, reduction);
    let sparse_forward = sparse_part(product(outputs, inputs), packed, x, y)?;
    let sparse_input = sparse_part(product(inputs, outputs), transposed, dy, dx)?;
    // The weight gradient, [outputs, inputs]: the reduction is over tokens, and the output gradient is estimated in groups of tokens.
    let compressor = Compressor::new(device, element, element)?;
    let estimator = Estimator::Mvue { seed: 1 };
    let gradient = DenseWeight { data: dy, rows: tokens, cols: outputs };
    let to = CompressTarget { packed: estimate, order, factor: None, seed: None, wrong: nan.device_ptr(&stream).0 };
    // SAFETY: the gradient is `[tokens, outputs]`, the estimate is allocated for its padded transpose, and both live until the stream has been waited for.
    let estimate_gradient =
        || unsafe { compressor.run(raw, gradient, Axis::Column, CompressRule::Estimate(estimator), to) };
    estimate_gradient()?;
    let weight_gradient = GemmProblem {
        tokens: inputs,
        x: XOrder::ReductionFirst,
        order: Order::FeaturesFirst,
        ..product(outputs, tokens)
    };
    let sparse_weight = sparse_part(weight_gradient, estimate, x, dw)?;

    let run_dense = |part: &cublaslt::CublasLtPlan, a, b, d| -> Result<()> {
        // SAFETY: each part is called with the tensors that it was planned with, which live until the stream has been waited for.
        Ok(unsafe { part.run(raw, a, b, d, workspace) }?)
    };
    let run_sparse = |part: &Gemm, weight, x, out| -> Result<()> {
        // SAFETY: each part is called with the tensors that it was planned with, which live until the stream has been waited for.
        Ok(unsafe { part.run(raw, GemmOperands { weight, x, out, workspace: 0 }, Epilogue::default()) }?)
    };
    let d_forward = || run_dense(&forward.0, w, x, y);
    let d_input = || run_dense(&input.0, w, dy, dx);
    let d_weight = || run_dense(&weight.0, x, dy, dw);
    let s_prune = || Ok(prune()?);
    let s_forward = || run_sparse(&sparse_forward, packed, x, y);
    let s_input = || run_sparse(&sparse_input, transposed, dy, dx);
    let s_estimate = || Ok(estimate_gradient()?);
    let s_weight = || run_sparse(&sparse_weight, estimate, x, dw);
    let (s_kernel, t_kernel, w_kernel) = (sparse_forward.kernel(), sparse_input.kernel(), sparse_weight.kernel());
    let dense_all = || d_forward().and_then(|()| d_input()).and_then(|()| d_weight());
    let sparse_all = || s_prune().and_then(|()| s_forward()).and_then(|()| s_input()).and_then(|()| d_weight());
    let mvue_all = || {
        s_prune()
            .and_then(|()| s_forward())
            .and_then(|()| s_input())
            .and_then(|()| s_estimate())
            .and_then(|()| s_weight())
    };
    let mut contenders: Vec<Contender<'_, anyhow::Error>> = vec![
        Contender::new("cublaslt", "dense", dense_all),
        Contender::new("twofour", "2:4, the weight's gradient dense", sparse_all),
        Contender::new("twofour-mvue", "2:4, the weight's gradient by MVUE", mvue_all),
        Contender::new("cublaslt", forward.1.clone(), d_forward),
        Contender::new("twofour", s_kernel, s_forward),
        Contender::new("cublaslt", input.1.clone(), d_input),
        Contender::new("twofour", t_kernel, s_input),
        Contender::new("cublaslt", weight.1.clone(), d_weight),
        Contender::new("twofour-mvue", w_kernel, s_weight),
        Contender::new("twofour", rule.name(), s_prune),
        Contender::new("twofour-mvue", "mvue", s_estimate),
    ];
    let parts = [
        "all",
        "all",
        "all",
        "forward",
        "forward",
        "input gradient",
        "input gradient",
        "weight gradient",
        "weight gradient",
        "prune and compress",
        "estimate the output's gradient",
    ];
    let times = timer.alternate(&mut contenders, rounds)?;
    drop(contenders);
    let found = stream.clone_dtoh(&nan)?;
    stream.synchronize()?;
    first_nan(found[0], inputs).context("random weights")?;
    let row = |(time, part): (Time, &'static str)| TrainRow {
        dtype: element.name(),
        shape: [tokens, inputs, outputs],
        contender: time.contender,
        part,
        kernel: time.kernel,
        us: time.us,
        min_us: time.min_us,
        max_us: time.max_us,
    };
    Ok(times.into_iter().zip(parts).map(row).collect())
}
