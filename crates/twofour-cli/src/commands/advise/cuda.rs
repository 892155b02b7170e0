//! `twofour advise --device cuda`.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context, Result, bail};
use twofour::int4::Granularity;
use twofour_cuda::{
    DataType, Device,
    compare::{Contender, Dispatcher, Engine, Int4Trial, RandomInt4, RandomWeight, Timer, Trial},
    problem::{GemmProblem, Int4Problem, Order},
    raw::gemm::int4::Int4Gemm,
};

use super::{
    answer::{Machinery, ShapeAnswer},
    format::OnGpu,
    passes::{medians, settled},
    timing::{Side, Timing},
};
use crate::{
    interrupt,
    measure::{self, Pass, Shape},
    present::{Screen, units},
    weight_format::WeightFormat,
};

/// Rounds of a pass. The median of a pass counts as one sample.
const ROUNDS: u32 = 7;

/// The measuring state.
struct Bench<'a> {
    device: &'a Device,
    dispatcher: &'a Dispatcher,
    limits: Option<Limits>,
}

/// The highest rates of the dense library on a large shape.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// At one token.
    bytes_per_us: f64,
    /// At many tokens; a multiplication and an addition are two.
    operations_per_us: f64,
}

/// Measures every shape on the GPU of a number with the installed engines: cuBLASLt for dense weights, this project's
/// kernels and cuSPARSELt for 2:4 ones. The choice of the fastest kernels is cached; times are not.
pub(super) fn measure(
    screen: &Screen,
    number: usize,
    format: WeightFormat,
    tokens: &[u32],
    shapes: &BTreeMap<Shape, usize>,
) -> Result<(Machinery, Vec<ShapeAnswer>)> {
    let weights = format.on_gpu(tokens)?;
    let device = Device::open(number)?;
    let dispatcher = Dispatcher::open(&device);
    if dispatcher.libraries().dense.is_none() {
        bail!(
            "there is nothing to compare with: cuBLASLt was not found; install the CUDA toolkit, or name the library's \
             folder in \
             TWOFOUR_CUBLASLT"
        );
    }
    if !device.architecture().features().measured {
        screen.warn(format!(
            "the kernels for this GPU ({}) are compiled by tests and were never tuned; those for Hopper (sm_90a) were",
            device.architecture()
        ));
    }
    let mut bench = Bench { device: &device, dispatcher: &dispatcher, limits: None };
    let mut progress = screen.progress();
    let all = (shapes.len() * tokens.len()) as u64;
    if tokens.iter().any(|count| *count > 1) {
        progress.steps("limits of the dense library", 0, all);
        bench.limits = Some(bench.limits(weights.dense()).context("measuring the limits of the dense library")?);
    }
    let mut answers = Vec::new();
    for (place, (shape, &layers)) in shapes.iter().enumerate() {
        let mut timings = Vec::new();
        for (i, &count) in tokens.iter().enumerate() {
            let what = format!("{shape}, {}", units::plural(count as usize, "token"));
            progress.steps(&what, (place * tokens.len() + i) as u64, all);
            let timing = match weights {
                OnGpu::Plain { sparse, dense } => bench.plain([dense, sparse], *shape, count as usize),
                OnGpu::FourBits => bench.four_bits(*shape, count as usize),
            };
            timings.push(timing.with_context(|| what)?);
        }
        answers.push(ShapeAnswer { out: shape.out, inputs: shape.inputs, layers, timings });
    }
    drop(progress);
    Ok((Machinery::Gpu(measure::gpu(&device)?), answers))
}

/// Returns a problem whose result is bf16 where the library supports that.
fn problem(element: DataType, shape: Shape, tokens: usize) -> GemmProblem {
    let output = if element == DataType::F16 { DataType::F16 } else { DataType::BF16 };
    GemmProblem::plain(element, output, shape.out, tokens, shape.inputs)
}

impl Bench<'_> {
    fn trial(&self, problem: GemmProblem) -> Result<Trial> {
        Ok(Trial::random(self.device, self.dispatcher.libraries(), problem)?)
    }

    /// Of the dense library, by the first choice of its heuristics: a large weight with one token and with many.
    fn limits(&self, element: DataType) -> Result<Limits> {
        const WEIGHT: Shape = Shape { out: 28672, inputs: 4096 };
        const TOKENS: usize = 4096;
        let one = self.trial(problem(element, WEIGHT, 1))?;
        let stream = one.stream();
        let weight = Arc::new(RandomWeight::new(stream, element, WEIGHT.out, WEIGHT.inputs)?);
        let libraries = self.dispatcher.libraries();
        let many = Trial::with_weight(self.device, libraries, problem(element, WEIGHT, TOKENS), stream, weight)?;
        let (engine, elements) = (Engine::CublasLt(0), WEIGHT.out * WEIGHT.inputs);
        let products = [one.product(engine)?, many.product(engine)?];
        let mut contenders = [one.contender(&products[0]), many.contender(&products[1])];
        let times = Timer::new(self.device, stream)?.alternate(&mut contenders, ROUNDS)?;
        Ok(Limits {
            bytes_per_us: (elements * element.bytes()) as f64 / times[0].us,
            operations_per_us: (2 * elements * TOKENS) as f64 / times[1].us,
        })
    }

    /// The best 2:4 kernel against the best dense one; element types of dense and 2:4.
    fn plain(&self, [dense, sparse]: [DataType; 2], shape: Shape, tokens: usize) -> Result<Timing> {
        let trial = self.trial(problem(sparse, shape, tokens))?;
        let choice = self.dispatcher.choose_by(&trial)?;
        tracing::info!(%choice, "chosen");
        let best = choice.measured().iter().find(|measured| measured.how.name() != "cublaslt");
        let best = best.with_context(|| format!("there is no 2:4 kernel for {:?}", choice.problem()))?;
        let product = trial.product(best.how)?;
        let elements = shape.out * shape.inputs;
        let width = sparse.bytes();
        let sparse_side = Side {
            us: 0.0,
            contender: format!("{}, {}", best.how.name(), best.kernel),
            bytes: elements / 2 * width + elements / 8,
        };
        if dense == sparse {
            return self.against(&trial, trial.contender(&product), sparse_side, tokens);
        }
        let weight = Arc::new(RandomWeight::new(trial.stream(), dense, shape.out, shape.inputs)?);
        let libraries = self.dispatcher.libraries();
        let other = problem(dense, shape, tokens);
        let dense = Trial::with_weight(self.device, libraries, other, trial.stream(), weight)?;
        self.against(&dense, trial.contender(&product), sparse_side, tokens)
    }

    /// The best int4 kernel against the best dense one in bf16.
    fn four_bits(&self, shape: Shape, tokens: usize) -> Result<Timing> {
        let element = DataType::BF16;
        let dense = self.trial(problem(element, shape, tokens))?;
        let problem = Int4Problem {
            element,
            output: element,
            granularity: Granularity::Group,
            features: shape.out,
            tokens,
            reduction: shape.inputs,
            order: Order::TokensFirst,
            epilogue: None,
        };
        let weight = RandomInt4::new(dense.stream(), shape.out, shape.inputs, problem.granularity)?;
        let sparse = Int4Trial::with_weight(self.device, problem, dense.stream(), Arc::new(weight))?;
        let choice = self.dispatcher.choose_int4_by(&sparse)?;
        tracing::info!(%choice, "chosen");
        let best = choice.best();
        let decode = Int4Gemm::with(self.device, problem, best.how)?;
        let side = Side { us: 0.0, contender: format!("twofour, {}", best.kernel), bytes: problem.weight_bytes() };
        self.against(&dense, sparse.contender(&decode), side, tokens)
    }

    /// Measures a 2:4 contender against the best dense one of a trial, in passes until the spread is known.
    fn against(&self, dense: &Trial, sparse: Contender<'_>, sparse_side: Side, tokens: usize) -> Result<Timing> {
        let choice = self.dispatcher.choose_by(dense)?;
        let problem = choice.problem();
        let best = choice.of("cublaslt").with_context(|| {
            format!(
                "there is nothing to compare with: cuBLASLt multiplies no dense {} weight of this shape; 8-bit types \
                 need in and out features that are multiples of 16",
                problem.element
            )
        })?;
        let product = dense.product(best.how)?;
        let mut contenders = [dense.contender(&product), sparse];
        let mut timer = Timer::new(self.device, dense.stream())?;
        let mut passes = Vec::new();
        let found = loop {
            interrupt::check()?;
            let times = timer.alternate(&mut contenders, ROUNDS)?;
            passes.push(Pass { sparse: vec![times[1].us], dense: vec![vec![times[0].us]] });
            if let Some(found) = settled(&passes) {
                break found;
            }
        };
        let [dense_us, sparse_us] = medians(&passes, found.dense);
        let bytes = problem.features * problem.reduction * problem.element.bytes();
        let dense_side = Side { us: dense_us, contender: format!("cublaslt, {}", best.kernel), bytes };
        let least_us = self.limits.map(|limits| {
            let operations = 2.0 * problem.features as f64 * problem.reduction as f64 * tokens as f64;
            (bytes as f64 / limits.bytes_per_us).max(operations / limits.operations_per_us)
        });
        let sides = [dense_side, Side { us: sparse_us, ..sparse_side }];
        Ok(Timing::new(tokens, sides, found.interval, &passes, least_us))
    }
}
