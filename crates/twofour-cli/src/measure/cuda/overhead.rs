//! The suite `overhead`: host time of a call.

use std::time::Instant;

use anyhow::{Context, Result};
use cudarc::driver::{CudaSlice, DevicePtr};
use serde::Serialize;
use twofour::select::Transposable;
use twofour_cuda::{
    DataType, Device, Stream,
    libraries::cublaslt::{self, DenseProblem, PartialSums},
    measure::RandomWeight,
    problem::GemmProblem,
    raw::{
        DenseWeight, MetaOrder, Packed,
        gemm::{Epilogue, Gemm, GemmOperands},
        prune::{BothWays, MaskChoice, NO_NAN, Pruner, Watch},
    },
};

use super::gemm::Libraries;

/// Host time of one contender's call.
#[derive(Debug, Serialize)]
pub(crate) struct OverheadRow {
    /// Data type of the GEMM's operands, or of the pruned weight.
    pub(crate) dtype: &'static str,
    /// Tokens, in_features, out_features; no tokens for pruning.
    pub(crate) shape: [usize; 3],
    /// The contender.
    pub(crate) contender: &'static str,
    /// The call.
    pub(crate) kernel: String,
    /// Median, microseconds.
    pub(crate) host_us: f64,
    /// The minimum, microseconds.
    pub(crate) min_us: f64,
    /// The maximum, microseconds.
    pub(crate) max_us: f64,
}

/// Calls between two readings of the clock: few enough that the driver's queue never fills.
const CALLS: u32 = 50;

/// Times planned calls on the host: launches without synchronization, on small tensors.
pub(crate) fn overhead(device: &Device, libraries: &Libraries, rounds: u32) -> Result<Vec<OverheadRow>> {
    let stream = device.context().new_stream()?;
    let raw = Stream(stream.cu_stream());
    let element = DataType::BF16;
    let (features, reduction, most) = (256, 256, 256);
    let weight = RandomWeight::new(&stream, element, features, reduction)?;
    let memory = |bytes: usize| -> Result<CudaSlice<u8>> { Ok(stream.alloc_zeros(bytes)?) };
    let (x, out, workspace) =
        (memory(most * reduction * 2)?, memory(most * features * 2)?, memory(cublaslt::WORKSPACE_BYTES)?);
    let packed = [memory(features * reduction)?, memory(features * reduction / 8)?];
    let nan = stream.clone_htod(&[NO_NAN])?;
    let at = |memory: &CudaSlice<u8>| memory.device_ptr(&stream).0;
    let mut rows = Vec::new();
    let mut row = |tokens, contender, kernel: String, call: &mut dyn FnMut() -> Result<()>| -> Result<()> {
        let mut times = Vec::new();
        for round in 0..rounds.max(20) + 3 {
            let begun = Instant::now();
            for _ in 0..CALLS {
                call()?;
            }
            let us = begun.elapsed().as_secs_f64() * 1e6 / f64::from(CALLS);
            stream.synchronize()?;
            // The first rounds are warm-up.
            if round >= 3 {
                times.push(us);
            }
        }
        times.sort_by(f64::total_cmp);
        rows.push(OverheadRow {
            dtype: element.name(),
            shape: [tokens, reduction, features],
            contender,
            kernel,
            host_us: times[times.len() / 2],
            min_us: times[0],
            max_us: times[times.len() - 1],
        });
        Ok(())
    };

    for tokens in [8, most] {
        let problem = GemmProblem::plain(element, element, features, tokens, reduction);
        let gemm = Gemm::new(device, problem)?;
        let packed = Packed { values: at(&weight.values), meta: at(&weight.meta) };
        let operands = GemmOperands { weight: packed, x: at(&x), out: at(&out), workspace: 0 };
        // SAFETY: the weight has the problem's shape, X and the result are allocated for `most` tokens, and all live until `row` has waited for the stream.
        let mut call = || Ok(unsafe { gemm.run(raw, operands, Epilogue::default()) }?);
        row(tokens, "twofour", gemm.kernel(), &mut call)?;

        let (rows, cols) = (features, tokens);
        let dense = DenseProblem {
            element,
            output: element,
            rows,
            cols,
            reduction,
            a_transposed: true,
            b_transposed: false,
            accumulate: false,
        };
        let plans = libraries.dense()?.plans(dense, PartialSums::Any, 1)?;
        let plan = plans.first().context("cuBLASLt has no algorithm for a small GEMM")?;
        // SAFETY: the weight has the problem's shape, X and the result are allocated for `most` tokens, and all live until `row` has waited for the stream.
        let mut call = || Ok(unsafe { plan.run(raw, at(&weight.dense), at(&x), at(&out), at(&workspace)) }?);
        row(tokens, "cublaslt", "heuristic 0".into(), &mut call)?;

        let Ok(sparse) = &libraries.sparse else { continue };
        let mut plan = sparse.plan(problem, None)?;
        let (bytes, scratch) = plan.compressed_bytes();
        let (compressed, scratch) = (memory(bytes)?, memory(scratch.max(16))?);
        // SAFETY: the weight is 2:4, both buffers have the plan's sizes, and all live until `row` has waited for the stream.
        unsafe { plan.compress(raw, at(&weight.dense), at(&compressed), at(&scratch)) }?;
        let workspace = memory(plan.workspace_bytes().max(16))?;
        // SAFETY: the weight was compressed by this plan, X and the result are allocated for `most` tokens, the workspace as the plan asks, and all live
        // until `row` has waited for the stream.
        let mut call = || Ok(unsafe { plan.run(raw, at(&compressed), at(&x), at(&out), at(&workspace)) }?);
        row(tokens, "cusparselt", "default algorithm".into(), &mut call)?;
    }

    let pruner = Pruner::new(device, element, element)?;
    let weight_there = DenseWeight { data: at(&weight.dense), rows: features, cols: reduction };
    let packed = Packed { values: at(&packed[0]), meta: at(&packed[1]) };
    let to = BothWays { packed: Some(packed), ..BothWays::default() };
    let watch = Watch { nan: nan.device_ptr(&stream).0, flips: None };
    let rule = Transposable::GreedyAbs;
    // SAFETY: the weight, its packed form and the counter are allocated above for `[features, reduction]`, and live until `row` has waited for the stream.
    let mut call =
        || unsafe { Ok(pruner.both_ways(raw, weight_there, MaskChoice::Rule(rule), to, MetaOrder::Canonical, watch)?) };
    row(0, "twofour", format!("prune, {}", rule.name()), &mut call)?;
    Ok(rows)
}
