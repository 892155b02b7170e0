//! `twofour advise --device cuda`.

use std::{collections::BTreeMap, sync::Arc};

use anyhow::{Context, Result, bail};
use twofour::int4::Granularity;
use twofour_cuda::{
    DataType, Device,
    dispatch::{Dispatcher, MeasuredChoice},
    gemm::{
        Order, Problem,
        int4::{self, Decode},
    },
    measure::{Int4Trial, RandomInt4, Timer, Trial},
};

use super::{
    Machinery, ShapeAnswer, Timing,
    dtype::{DType, OnGpu},
};
use crate::{
    measure::{Shape, cuda},
    present::{Screen, units},
};

/// What every shape takes on the first GPU, by the engines that are there: cuBLASLt for dense weights, this project's kernels and cuSPARSELt for 2:4
/// ones. What was measured before is remembered.
pub(super) fn measure(
    screen: &Screen,
    dtype: DType,
    tokens: &[u32],
    shapes: &BTreeMap<Shape, usize>,
) -> Result<(Machinery, Vec<ShapeAnswer>)> {
    let weights = dtype.on_gpu(tokens)?;
    let device = Device::open(0)?;
    let dispatcher = Dispatcher::open(&device);
    if dispatcher.libraries().dense.is_none() {
        bail!(
            "there is nothing to compare with: cuBLASLt was not found; install the CUDA toolkit, or name the library's folder in \
             TWOFOUR_CUBLASLT"
        );
    }
    let mut progress = screen.progress();
    let all = (shapes.len() * tokens.len()) as u64;
    let mut answers = Vec::new();
    for (place, (shape, &layers)) in shapes.iter().enumerate() {
        let mut timings = Vec::new();
        for (i, &count) in tokens.iter().enumerate() {
            let what = format!("{shape}, {}", units::plural(count as usize, "token"));
            progress.steps(&what, (place * tokens.len() + i) as u64, all);
            let timing = match weights {
                OnGpu::Plain(element) => plain(&dispatcher, element, *shape, count as usize),
                OnGpu::FourBits => four_bits(&device, &dispatcher, *shape, count as usize),
            };
            timings.push(timing.with_context(|| what)?);
        }
        answers.push(ShapeAnswer { out: shape.out, inputs: shape.inputs, layers, timings });
    }
    drop(progress);
    Ok((Machinery::Gpu(cuda::gpu(&device)?), answers))
}

fn plain(dispatcher: &Dispatcher, element: DataType, shape: Shape, tokens: usize) -> Result<Timing> {
    let output = if element == DataType::I8 { DataType::BF16 } else { element };
    let choice = dispatcher.choose(Problem::plain(element, output, shape.out, tokens, shape.inputs))?;
    tracing::info!(%choice, "chosen");
    timing(&choice)
}

/// Rounds of the best dense product and the best with four bits, by turns.
const ROUNDS: u32 = 21;

/// The best with four bits against the best dense one in bf16.
fn four_bits(device: &Device, dispatcher: &Dispatcher, shape: Shape, tokens: usize) -> Result<Timing> {
    let (element, output) = (DataType::BF16, DataType::BF16);
    let dense = Trial::random(
        device,
        dispatcher.libraries(),
        Problem::plain(element, output, shape.out, tokens, shape.inputs),
    )?;
    let choice = dispatcher.choose_by(&dense)?;
    let best = choice.of("cublaslt").with_context(|| format!("cuBLASLt has no kernel for {:?}", choice.problem()))?;
    let problem = int4::Problem {
        element,
        output,
        granularity: Granularity::Group,
        features: shape.out,
        tokens,
        reduction: shape.inputs,
        order: Order::TokensFirst,
    };
    let weight = RandomInt4::new(dense.stream(), shape.out, shape.inputs, problem.granularity)?;
    let sparse = Int4Trial::with_weight(device, problem, dense.stream(), Arc::new(weight))?;
    let choice = dispatcher.choose_int4_by(&sparse)?;
    tracing::info!(%choice, "chosen");
    let product = dense.product(best.how)?;
    let decode = Decode::with(device, problem, choice.best().how)?;
    let mut contenders = [dense.contender(&product), sparse.contender(&decode)];
    let times = Timer::new(device, dense.stream())?.alternate(&mut contenders, ROUNDS)?;
    Ok(Timing {
        tokens,
        dense_us: times[0].us,
        dense_contender: format!("cublaslt, {}", times[0].kernel),
        sparse_us: times[1].us,
        sparse_contender: format!("twofour, {}", times[1].kernel),
        dense_bytes: shape.out * shape.inputs * element.bytes(),
        sparse_bytes: problem.weight_bytes(),
        speed_up: times[0].us / times[1].us,
    })
}

fn timing(choice: &MeasuredChoice) -> Result<Timing> {
    let problem = choice.problem();
    let dense = choice.of("cublaslt").with_context(|| format!("cuBLASLt has no kernel for {problem:?}"))?;
    let sparse = choice.measured().iter().find(|measured| measured.how.name() != "cublaslt");
    let sparse = sparse.with_context(|| format!("there is no 2:4 kernel for {problem:?}"))?;
    let elements = problem.features * problem.reduction;
    let width = problem.element.bytes();
    Ok(Timing {
        tokens: problem.tokens,
        dense_us: dense.us,
        dense_contender: format!("cublaslt, {}", dense.kernel),
        sparse_us: sparse.us,
        sparse_contender: format!("{}, {}", sparse.how.name(), sparse.kernel),
        dense_bytes: elements * width,
        sparse_bytes: elements / 2 * width + elements / 8,
        speed_up: dense.us / sparse.us,
    })
}
