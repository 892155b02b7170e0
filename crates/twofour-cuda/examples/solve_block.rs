//! Times the default solves of a block's layers on the first GPU: `solve_block HIDDEN INTERMEDIATE [TOKENS]`. Weights
//! and inputs are random numbers; the answer is JSON.

use std::{env, error::Error, time::Instant};

use twofour::{
    MatrixRef, Pattern,
    calibration::{DenseSide, Statistic},
    solve::{Pruning, method},
};
use twofour_cuda::{
    Device,
    layer::DeviceBuffer,
    solve::{GpuBackend, InputSums},
};

/// Tokens of a batch of inputs.
const BATCH: usize = 1024;

/// Numbers of a linear congruential generator, from -1 to 1.
fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Inputs of features that neighbours share.
fn inputs(features: usize, seed: u64) -> Vec<f32> {
    let noise = random((features + 1) * BATCH, seed);
    noise.chunks(features + 1).flat_map(|token| token.windows(2).map(|pair| pair[0] + pair[1])).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let numbers = env::args().skip(1).map(|text| text.parse()).collect::<Result<Vec<usize>, _>>()?;
    let (hidden, intermediate, tokens) = match numbers[..] {
        [hidden, intermediate] => (hidden, intermediate, 128 * 1024),
        [hidden, intermediate, tokens] => (hidden, intermediate, tokens),
        _ => return Err("usage: solve_block HIDDEN INTERMEDIATE [TOKENS]".into()),
    };
    let backend = GpuBackend::new(&Device::open(0)?)?;
    let alps = method("alps").ok_or("no method is named alps")?;
    let pruning = Pruning { compensation: 0.5, ..Pruning::new(alps, Pattern::TWO_FOUR) };
    let layers = [
        ("queries, keys and values", 3 * hidden, hidden),
        ("attention's output", hidden, hidden),
        ("gate and up", 2 * intermediate, hidden),
        ("down", hidden, intermediate),
    ];
    let mut rows = vec![];
    for (name, outputs, features) in layers {
        let weight = random(outputs * features, 7);
        let side = DenseSide::Inputs;
        let batches = [1, 2, 3, 4].map(|seed| inputs(features, seed));
        let batches = batches.iter().map(|x| DeviceBuffer::from_host(backend.context(), x));
        let batches = batches.collect::<Result<Vec<_>, _>>()?;
        backend.context().synchronize()?;
        let begin = Instant::now();
        let mut sums = InputSums::new(&backend, features, Some(side))?;
        for batch in 0..tokens.div_ceil(BATCH) {
            // Inputs of the dense model that are those of the pruned one, or others.
            let (x, dense) = (&batches[batch % 4], &batches[(batch + batch / 8 % 2) % 4]);
            sums.add(x.as_slice(), Some(dense.as_slice()))?;
        }
        let (hessian, cross) = sums.finish()?;
        let gathered = begin.elapsed().as_secs_f64();
        let begin = Instant::now();
        let (matrix, statistic) = (MatrixRef::new(outputs, features, &weight)?, Statistic::Hessian(hessian));
        pruning.prune(&backend, matrix, Some(&statistic), cross.as_ref())?;
        let solved = begin.elapsed().as_secs_f64();
        let shape = format!("[{outputs}, {features}]");
        let seconds = format!(r#""seconds_of_sums": {gathered:.3}, "seconds_of_solve": {solved:.3}"#);
        rows.push(format!(r#"  {{"layer": "{name}", "shape": {shape}, {seconds}}}"#));
    }
    println!("[\n{}\n]", rows.join(",\n"));
    Ok(())
}
