//! The suite `layer`: a training step of a linear layer with bias, by the 2:4 layer's own calls and by cuBLASLt.

use std::cell::RefCell;

use anyhow::{Context, Result};
use clap::Args;
use cudarc::driver::{CudaSlice, DevicePtr};
use serde::Serialize;
use twofour::select::Transposable;
use twofour_cli::present::{table::Table, units};
use twofour_cuda::{
    DataType, Device, DevicePtr as Address, Stream,
    compare::{Contender, HEURISTICS, Time, Timer, random},
    cublaslt::{CublasLtPlan, DenseEpilogue, DenseProblem, PartialSums, WORKSPACE_BYTES},
    layer::{
        Accumulate, DeviceSlice, DeviceSliceMut, Forward, InputGradient, LayerContext, MaskRule, SparseLinear,
        SparseLinearSettings, WeightGradient, bias_gradient,
    },
};

use super::{
    libraries::Libraries,
    shapes::{ProductOptions, product},
    suite::{Bench, Suite},
};

/// One baseline's time for one part of a training step of a linear layer, or for all of it.
#[derive(Debug, Serialize)]
pub(crate) struct LayerRow {
    /// Data type of weights, activations and gradients.
    dtype: &'static str,
    /// Tokens, input features, output features.
    shape: [usize; 3],
    /// The baseline.
    contender: &'static str,
    /// The part, or the whole step.
    part: &'static str,
    /// The kernels.
    kernel: String,
    /// Median, microseconds.
    us: f64,
    /// The minimum, microseconds.
    min_us: f64,
    /// The maximum, microseconds.
    max_us: f64,
}

/// Tokens, in_features, out_features: the layers of the ViT that 2:4 training was designed for.
const SHAPES: [[usize; 3]; 2] = [[13008, 1024, 4096], [13008, 4096, 1024]];

/// Data types of training.
const TYPES: [DataType; 2] = [DataType::F16, DataType::BF16];

/// Measure a training step of a linear layer with bias
///
/// By the 2:4 layer's calls, its mask selected and packed in every step, and dense by cuBLASLt with the bias and its
/// gradient in epilogues.
#[derive(Debug, Args)]
#[command(after_help = "Example: twofour-bench cuda layer --shape 3072x768 --tokens 2048,8192")]
pub(crate) struct Layer {
    #[command(flatten)]
    products: ProductOptions,
}

impl Suite for Layer {
    const NAME: &'static str = "layer";
    const NOTE: &'static str = "Medians.";
    const HAS_LIBRARIES: bool = true;
    type Row = LayerRow;

    fn measure(&self, bench: &mut Bench<'_>) -> Result<Vec<LayerRow>> {
        let shapes = self.products.products(&SHAPES);
        let works: Vec<_> = TYPES.iter().flat_map(|t| shapes.iter().map(move |s| (*t, *s))).collect();
        let mut rows = Vec::new();
        for (done, (element, shape)) in works.iter().enumerate() {
            bench.begin(&format!("{element} {}", product(*shape)), done, works.len());
            rows.extend(layer(bench.device, bench.libraries, *element, *shape, bench.rounds)?);
        }
        Ok(rows)
    }

    fn table(rows: &[LayerRow]) -> Table {
        let mut table = Table::of(["layer", "dtype", "part", "baseline", "kernel"], ["time"]);
        for row in rows {
            table.row([
                product(row.shape),
                row.dtype.into(),
                row.part.into(),
                row.contender.into(),
                row.kernel.clone(),
                units::microseconds(row.us),
            ]);
        }
        table
    }

    fn told(&self) -> String {
        self.products.told()
    }
}

/// Rounds that decide how the dense layer computes its weight and bias gradients.
const CHOOSING_ROUNDS: u32 = 11;

/// The tensors of a layer in device memory.
struct Tensors {
    device: Device,
    element: DataType,
    w: Tensor,
    bias: Tensor,
    x: Tensor,
    dy: Tensor,
    y: Tensor,
    dx: Tensor,
    dw: Tensor,
    db: Tensor,
}

/// A tensor and its length.
struct Tensor {
    _memory: CudaSlice<u8>,
    at: Address,
    len: usize,
}

impl Tensors {
    fn read(&self, tensor: &Tensor) -> DeviceSlice<'_> {
        // SAFETY: the memory is as long, and outlives the stream's work, which is waited for before tensors are
        // dropped; contenders run one after the other on one stream, so what a call reads is not written meanwhile.
        unsafe { DeviceSlice::from_raw(&self.device, tensor.at, tensor.len, self.element) }
    }

    fn write(&self, tensor: &Tensor) -> DeviceSliceMut<'_> {
        // SAFETY: the memory is as long, and outlives the stream's work, which is waited for before tensors are
        // dropped; contenders run one after the other on one stream, so nothing else reads or writes it meanwhile.
        unsafe { DeviceSliceMut::from_raw(&self.device, tensor.at, tensor.len, self.element) }
    }
}

/// Times a step and its parts: the forward pass with bias, the input gradient, and the weight and bias gradients.
/// Dense: cuBLASLt's fastest algorithms, with the bias in the epilogue, and its gradient in an epilogue or by column
/// sums, whichever is faster. 2:4: [`SparseLinear`] with a transposable mask that is selected and packed along both
/// axes in every step, and the weight gradient dense or by MVUE.
fn layer(
    device: &Device,
    libraries: &Libraries,
    element: DataType,
    [tokens, inputs, outputs]: [usize; 3],
    rounds: u32,
) -> Result<Vec<LayerRow>> {
    let stream = device.context().new_stream()?;
    let context = LayerContext::on_stream(device, stream.clone());
    let raw = Stream(stream.cu_stream());
    let mut timer = Timer::new(device, &stream)?;
    let tensor = |len: usize, seed| -> Result<Tensor> {
        let memory = random(&stream, element, len, seed)?;
        let at = memory.device_ptr(&stream).0;
        Ok(Tensor { _memory: memory, at, len })
    };
    let tensors = &Tensors {
        device: device.clone(),
        element,
        w: tensor(outputs * inputs, 1)?,
        bias: tensor(outputs, 4)?,
        x: tensor(tokens * inputs, 2)?,
        dy: tensor(tokens * outputs, 3)?,
        y: tensor(tokens * outputs, 5)?,
        dx: tensor(tokens * inputs, 6)?,
        dw: tensor(outputs * inputs, 7)?,
        db: tensor(outputs, 8)?,
    };
    let Tensors { w, bias, x, dy, y, dx, dw, db, .. } = tensors;
    let workspace: CudaSlice<u8> = stream.alloc_zeros(WORKSPACE_BYTES)?;
    let workspace = workspace.device_ptr(&stream).0;

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
    let run = |plan: &CublasLtPlan, a: &Tensor, b: &Tensor, d: &Tensor| -> Result<()> {
        // SAFETY: all memory is allocated above, as long as the product requires, and lives until the stream has been
        // waited for.
        Ok(unsafe { plan.run(raw, a.at, b.at, d.at, workspace) }?)
    };
    let mut fastest = |plans: Vec<CublasLtPlan>, a, b, d| -> Result<Option<(CublasLtPlan, usize)>> {
        let all = plans.iter().map(|plan| Contender::new("cublaslt", "", move || run(plan, a, b, d))).collect();
        let found = timer.fastest::<anyhow::Error>(all)?;
        Ok(found.map(|(which, _)| (plans[which].clone(), which)))
    };
    let missing = "cuBLASLt has no algorithm for a training step";
    let problem = dense(outputs, tokens, inputs, true, false);
    // SAFETY: the bias is as long as the result's rows, and lives until the stream has been waited for.
    let plans =
        unsafe { libraries.dense()?.plans_with(problem, DenseEpilogue::Bias, bias.at, PartialSums::Any, HEURISTICS) }?;
    let (forward, forward_kernel) = fastest(plans, w, x, y)?.context(missing)?;
    let plans = libraries.dense()?.plans(dense(inputs, tokens, outputs, false, false), PartialSums::Any, HEURISTICS)?;
    let (input, input_kernel) = fastest(plans, w, dy, dx)?.context(missing)?;
    let problem = dense(inputs, outputs, tokens, false, true);
    let plans = libraries.dense()?.plans(problem, PartialSums::Any, HEURISTICS)?;
    let (weight, weight_kernel) = fastest(plans, x, dy, dw)?.context(missing)?;
    // SAFETY: the bias gradient is as long as the result's columns, and lives until the stream has been waited for.
    let plans = unsafe {
        libraries.dense()?.plans_with(problem, DenseEpilogue::BiasGradient, db.at, PartialSums::Any, HEURISTICS)
    };
    // The library may lack that epilogue.
    let fused = fastest(plans.unwrap_or_default(), x, dy, dw)?;

    let sums = || -> Result<()> {
        Ok(bias_gradient(&context, tensors.read(dy), tokens, Accumulate::Overwrite, tensors.write(db))?)
    };
    let apart = || run(&weight, x, dy, dw).and_then(|()| sums());
    let together = || fused.as_ref().map_or(Ok(()), |(plan, _)| run(plan, x, dy, dw));
    let mut ways = vec![Contender::new("cublaslt", "", apart)];
    if fused.is_some() {
        ways.push(Contender::new("cublaslt", "", together));
    }
    let times = timer.alternate::<anyhow::Error>(&mut ways, CHOOSING_ROUNDS)?;
    drop(ways);
    let fused = fused.as_ref().filter(|_| times.get(1).is_some_and(|fused| fused.us < times[0].us));
    let gradients_kernel = match fused {
        Some((_, which)) => format!("heuristic {which}, bias gradient in its epilogue"),
        None => format!("heuristic {weight_kernel}, column sums"),
    };
    let d_forward = || run(&forward, w, x, y);
    let d_input = || run(&input, w, dy, dx);
    let d_gradients = || fused.map_or_else(apart, |(plan, _)| run(plan, x, dy, dw));
    let d_step = || d_forward().and_then(|()| d_input()).and_then(|()| d_gradients());

    let rule = Transposable::GreedyAbs;
    let sparse = |weight_gradient| -> Result<RefCell<SparseLinear>> {
        let input_gradient = InputGradient::PackedTranspose;
        let settings = SparseLinearSettings { rule: MaskRule::Transposable(rule), input_gradient, weight_gradient };
        let layer = SparseLinear::new(&context, tensors.read(w), (outputs, inputs), element, settings)?;
        layer.prepare(tokens, element)?;
        Ok(RefCell::new(layer))
    };
    let (plain, mvue) = (&sparse(WeightGradient::Dense)?, &sparse(WeightGradient::Mvue)?);
    let s_mask = |layer: &RefCell<SparseLinear>| -> Result<()> { Ok(layer.borrow_mut().remask(tensors.read(w))?) };
    let s_forward = |layer: &RefCell<SparseLinear>| -> Result<()> {
        let with_bias = Forward { bias: Some(tensors.read(bias)), ..Forward::default() };
        Ok(layer.borrow().forward(tensors.read(x), tokens, with_bias, tensors.write(y))?)
    };
    let s_input = |layer: &RefCell<SparseLinear>| -> Result<()> {
        Ok(layer.borrow().input_gradient(tensors.read(dy), tokens, tensors.write(dx))?)
    };
    let s_gradients = |layer: &RefCell<SparseLinear>| -> Result<()> {
        let (layer, overwrite) = (layer.borrow(), Accumulate::Overwrite);
        let (dy, x, dw, db) = (tensors.read(dy), tensors.read(x), tensors.write(dw), tensors.write(db));
        Ok(layer.parameter_gradients(dy, x, tokens, overwrite, dw, db)?)
    };
    let s_step = |layer: &RefCell<SparseLinear>| {
        s_mask(layer).and_then(|()| s_forward(layer)).and_then(|()| s_input(layer)).and_then(|()| s_gradients(layer))
    };

    let gradients = "weight and bias gradients";
    let (dense_weight, sampled) = ("2:4, the weight gradient dense", "2:4, the weight gradient by MVUE");
    let (mut parts, mut contenders) = (Vec::new(), Vec::<Contender<'_, anyhow::Error>>::new());
    let mut add = |part, contender| {
        parts.push(part);
        contenders.push(contender);
    };
    add("all", Contender::new("cublaslt", "dense", d_step));
    add("all", Contender::new("twofour", dense_weight, || s_step(plain)));
    add("all", Contender::new("twofour-mvue", sampled, || s_step(mvue)));
    add("mask and packing", Contender::new("twofour", rule.name(), || s_mask(plain)));
    add("forward", Contender::new("cublaslt", format!("heuristic {forward_kernel}"), d_forward));
    add("forward", Contender::new("twofour", dense_weight, || s_forward(plain)));
    add("input gradient", Contender::new("cublaslt", format!("heuristic {input_kernel}"), d_input));
    add("input gradient", Contender::new("twofour", dense_weight, || s_input(plain)));
    add(gradients, Contender::new("cublaslt", gradients_kernel, d_gradients));
    add(gradients, Contender::new("twofour", dense_weight, || s_gradients(plain)));
    add(gradients, Contender::new("twofour-mvue", sampled, || s_gradients(mvue)));
    let times = timer.alternate(&mut contenders, rounds)?;
    drop(contenders);
    for layer in [plain, mvue] {
        layer.borrow().check().context("random weights")?;
    }
    let row = |(time, part): (Time, &'static str)| LayerRow {
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
