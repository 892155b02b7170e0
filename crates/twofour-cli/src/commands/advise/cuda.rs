//! `twofour advise --device cuda`.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use twofour_cuda::{
    Device, Element,
    dispatch::{Choice, Dispatcher},
    gemm::Problem,
};

use super::{Machinery, ShapeAnswer, Timing};
use crate::{
    exit::Usage,
    measure::{Shape, WeightDType, cuda},
    present::{Screen, units},
};

/// What every shape takes on the first GPU, by the engines that are there: cuBLASLt for dense weights, this project's kernels and cuSPARSELt for 2:4
/// ones. What was measured before is remembered.
pub(super) fn measure(
    screen: &Screen,
    dtype: WeightDType,
    tokens: &[u32],
    shapes: &BTreeMap<Shape, usize>,
) -> Result<(Machinery, Vec<ShapeAnswer>)> {
    let element = match dtype {
        WeightDType::Bf16 => Element::BF16,
        WeightDType::F16 => Element::F16,
        WeightDType::I8 => Element::I8,
        WeightDType::F32 => {
            bail!(Usage("--dtype f32: tensor cores have no 2:4 for it; use bf16, f16 or i8".to_owned()))
        }
    };
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
            let output = if element == Element::I8 { Element::BF16 } else { element };
            let problem = Problem::plain(element, output, shape.out, count as usize, shape.inputs);
            let choice = dispatcher.choose(problem).with_context(|| what)?;
            tracing::info!(%choice, "chosen");
            timings.push(timing(&choice)?);
        }
        answers.push(ShapeAnswer { out: shape.out, inputs: shape.inputs, layers, timings });
    }
    drop(progress);
    Ok((Machinery::Gpu(cuda::gpu(&device)?), answers))
}

fn timing(choice: &Choice) -> Result<Timing> {
    let problem = choice.problem();
    let dense = choice.of("cublaslt").with_context(|| format!("cuBLASLt has no kernel for {problem:?}"))?;
    let sparse = choice.measured().iter().find(|measured| measured.engine.name() != "cublaslt");
    let sparse = sparse.with_context(|| format!("there is no 2:4 kernel for {problem:?}"))?;
    let elements = problem.features * problem.reduction;
    let width = problem.element.bytes();
    Ok(Timing {
        tokens: problem.tokens,
        dense_us: dense.us,
        dense_contender: format!("cublaslt, {}", dense.kernel),
        sparse_us: sparse.us,
        sparse_contender: format!("{}, {}", sparse.engine.name(), sparse.kernel),
        dense_bytes: elements * width,
        sparse_bytes: elements / 2 * width + elements / 8,
        speed_up: dense.us / sparse.us,
    })
}
