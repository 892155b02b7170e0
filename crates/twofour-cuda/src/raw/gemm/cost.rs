//! A model of the time that each method takes on Hopper. [`super::Gemm::new`] chooses by it, and the dispatcher shortlists by it what it measures.
//!
//! A launch takes a fixed time, and then as long as its CTAs' loops or as reading the weight, X and the result from HBM, whichever is longer (joined smoothly).
//! Loops run in waves of as many CTAs as the device holds concurrently. A step takes the longer of the kernel's own time for a step and of L2's time
//! to deliver all CTAs' operands. Split-K adds the exchange of accumulators.
//!
//! Coefficients were fitted to 24 000 timings in bf16 on an H200 (`twofour-bench cuda sweep`; docs/explanation/kernels/cuda-gemm.md has the quality of its choices).

use super::{GemmMethod, GemmProblem};
use crate::problem::EpilogueKind;

/// Clusters of 1 to 8 CTAs that a Hopper GPU of 132 multiprocessors holds concurrently: the fewest of those measured, because they depend on which multiprocessors a GPU has.
const CLUSTERS: [u32; 8] = [132, 66, 39, 30, 21, 17, 14, 14];

/// A kernel family. Times are in microseconds, rates in bytes per microsecond.
struct Family {
    /// Time of a launch.
    launch: f64,
    /// L2's bandwidth into all SMs.
    l2: f64,
    /// HBM's bandwidth.
    hbm: f64,
    /// Time of an exchange of accumulators, besides `exchange`.
    split: f64,
    /// Time of an exchange for each thousand accumulators.
    exchange: f64,
    /// Slowdown of a step whose rows of X are multicast.
    sharing: f64,
    /// Time that a cluster of several CTAs adds.
    cluster: f64,
    /// Times of epilogues.
    epilogues: EpilogueTimes,
    kernels: &'static [Kernel],
}

/// A kernel of a family.
struct Kernel {
    key: [u32; 4],
    /// Time of a CTA besides its steps.
    round: f64,
    /// Time of a step of 128 bytes of X's rows.
    step: f64,
}

const fn kernel(key: [u32; 4], round: f64, step: f64) -> Kernel {
    Kernel { key, round, step }
}

impl Family {
    /// Returns the kernel of this key, or else the one with the nearest key.
    fn kernel(&self, key: [u32; 4]) -> &'static Kernel {
        let apart = |kernel: &&Kernel| -> f64 {
            let ratios = kernel.key.iter().zip(key).filter(|(_, b)| *b != 0);
            ratios.map(|(a, b)| (f64::from(*a) / f64::from(b)).ln().abs()).sum()
        };
        self.kernels.iter().min_by(|a, b| apart(a).total_cmp(&apart(b))).expect("a family has kernels")
    }
}

/// The work of a method's CTAs.
struct Work {
    family: &'static Family,
    key: [u32; 4],
    /// Rows of W and of X that a CTA computes, and rows of X that it loads.
    features: u32,
    tokens: u32,
    x_rows: u32,
    /// Clusters that the device holds concurrently.
    at_once: u32,
    /// CTAs that share rows of X by multicast, and CTAs that divide the reduction among them.
    sharing: u32,
    split: u32,
    /// Steps of 128 bytes in a stage.
    together: u32,
    /// Warps of a CTA that divide the reduction among them.
    warps: u32,
}

impl Work {
    fn of(method: GemmMethod, problem: GemmProblem) -> Option<Work> {
        let rows = |tokens: u32| {
            let tiles = problem.tokens.div_ceil(tokens as usize);
            (problem.tokens.div_ceil(tiles).next_multiple_of(8) as u32).min(tokens)
        };
        Some(match method {
            GemmMethod::Tiled(tile) => {
                let (sharing, split) = (tile.cluster, tile.split.unwrap_or(1));
                let (features, tokens) = (tile.features, tile.tokens);
                let (family, key, at_once) = match tile.split {
                    Some(_) => (&SPLIT, [features, tokens, 0, 0], clusters(sharing * split)),
                    None => (&PERSISTENT, [features, tokens, sharing, 0], CLUSTERS[0] / sharing),
                };
                let x_rows = if sharing == 1 { rows(tokens) } else { tokens };
                Work { family, key, features, tokens, x_rows, at_once, sharing, split, together: tile.atoms, warps: 1 }
            }
            GemmMethod::Streamed(shape) => {
                let (features, tokens, split) = (shape.tile.features, shape.tile.tokens, shape.split);
                let small = features <= 128 && tokens < 64;
                let at_once = clusters(split) * if small { 2 } else { 1 };
                let (key, x_rows) = ([features, tokens, 0, 0], rows(tokens));
                Work {
                    family: &STREAMED,
                    key,
                    features,
                    tokens,
                    x_rows,
                    at_once,
                    sharing: 1,
                    split,
                    together: 2,
                    warps: 1,
                }
            }
            GemmMethod::Rings(shape) => {
                let (features, tokens, warps) = (16 * shape.height, shape.tokens, shape.warps);
                let (key, x_rows) = ([features, tokens, warps, shape.blocks], rows(tokens));
                let at_once = CLUSTERS[0] * shape.blocks;
                Work {
                    family: &RINGS,
                    key,
                    features,
                    tokens,
                    x_rows,
                    at_once,
                    sharing: 1,
                    split: 1,
                    together: 1,
                    warps,
                }
            }
            GemmMethod::Direct(shape) => {
                let (features, tokens, warps) = (16 * shape.height, 8, shape.warps);
                let (key, x_rows) = ([features, warps, shape.depth, 0], rows(tokens));
                let at_once = CLUSTERS[0] * 2;
                Work {
                    family: &DIRECT,
                    key,
                    features,
                    tokens,
                    x_rows,
                    at_once,
                    sharing: 1,
                    split: 1,
                    together: 1,
                    warps,
                }
            }
            GemmMethod::Mma(_) => return None,
        })
    }
}

/// Time that an epilogue adds to a round: a part that does not depend on the results of a CTA, and one for each thousand of them.
#[derive(Clone, Copy)]
struct EpilogueTime {
    fixed: f64,
    results: f64,
}

const fn time(fixed: f64, results: f64) -> EpilogueTime {
    EpilogueTime { fixed, results }
}

/// Times of a family's epilogues, fitted to all methods of 392 products of 11 layers in bf16 and i8, measured on an H100 (`twofour-bench cuda sweep`). Those of GELU in tiles
/// without split-K are fitted to 28 products of 7 layers in bf16 on an H200. SiLU was not measured, and is taken for GELU.
struct EpilogueTimes {
    /// A bias, alone or with ReLU.
    bias: EpilogueTime,
    /// A bias and GELU or SiLU.
    activation: EpilogueTime,
    /// Scales and a bias.
    scales: EpilogueTime,
}

impl EpilogueTimes {
    /// Returns the time of an epilogue for a number of results.
    fn time(&self, kind: EpilogueKind, results: f64) -> f64 {
        let of = |time: EpilogueTime| time.fixed + time.results * results / 1000.0;
        match kind {
            EpilogueKind::Bias => of(self.bias),
            EpilogueKind::Activation => of(self.activation),
            EpilogueKind::Scales => of(self.scales),
            EpilogueKind::ScaledActivation => of(self.activation) + of(self.scales) - of(self.bias),
        }
    }
}

/// Epilogues of the largest tile with split-K: all pass through shared memory, because it leaves no registers for them (`sm90/kernel.cu`).
const THROUGH_MEMORY: EpilogueTimes =
    EpilogueTimes { bias: time(0.57, 0.172), activation: time(0.5, 0.237), scales: time(1.04, 0.225) };

/// Epilogues of `rings`. Those of `direct` were not measured, and are taken to be the same.
const OF_FEW_TOKENS: EpilogueTimes =
    EpilogueTimes { bias: time(0.34, 0.01), activation: time(0.47, 0.4), scales: time(0.59, 0.27) };

/// Whether all epilogues of a method pass through shared memory.
fn ends_through_memory(method: GemmMethod) -> bool {
    matches!(method, GemmMethod::Tiled(tile) if tile.split.is_some() && tile.features / 128 * tile.tokens > 320)
}

/// Returns the time that the problem's epilogue adds to each round.
fn epilogue_time(method: GemmMethod, problem: GemmProblem, work: &Work) -> f64 {
    let Some(kind) = problem.epilogue else { return 0.0 };
    let times = if ends_through_memory(method) { &THROUGH_MEMORY } else { &work.family.epilogues };
    // CTAs that divide the reduction of a tile divide its results, too. Those of `stream` do as well, but each has as many for a thread.
    let shares = if matches!(method, GemmMethod::Tiled(_)) { work.split } else { 1 };
    times.time(kind, f64::from(work.features * work.tokens) / f64::from(shares))
}

/// Returns the clusters of `ctas` CTAs that the device holds concurrently.
fn clusters(ctas: u32) -> u32 {
    CLUSTERS[(ctas.clamp(1, 8) - 1) as usize]
}

/// Returns the estimated time of a method for a problem on an H200, in microseconds; infinity for a method without a model.
pub(super) fn microseconds(method: GemmMethod, problem: GemmProblem) -> f64 {
    let Some(work) = Work::of(method, problem) else { return f64::INFINITY };
    let Family { launch, l2, hbm, split, exchange, sharing, cluster, .. } = *work.family;
    let kernel = work.family.kernel(work.key);
    let row_bytes = problem.reduction * problem.element.bytes();
    let tiles = problem.features.div_ceil((work.features * work.sharing) as usize)
        * problem.tokens.div_ceil(work.tokens as usize);
    let rounds = tiles.div_ceil(work.at_once as usize);
    let ctas = (tiles.min(work.at_once as usize) * (work.sharing * work.split) as usize) as f64;
    let parts = (128 * work.together * work.split * work.warps) as usize;
    let steps = (row_bytes.div_ceil(parts) * work.together as usize) as f64;

    let x_bytes = f64::from(work.x_rows * 128) / if work.sharing == 2 { 1.6 } else { 1.0 };
    let step_bytes = (f64::from(work.features * 72) + x_bytes) * f64::from(work.warps);
    let fill = ctas * step_bytes / l2;
    let step = (kernel.step.powi(4) + fill.powi(4)).powf(0.25) * if work.sharing == 2 { sharing } else { 1.0 };
    let parted = f64::from(work.split - 1) / f64::from(work.split);
    let exchanged = f64::from(work.features * work.tokens) * parted / 1000.0;
    let split = if work.split > 1 { split + exchange * exchanged } else { 0.0 };
    let cluster = if work.split * work.sharing > 1 { cluster } else { 0.0 };
    let epilogue = epilogue_time(method, problem, &work);
    let loops = rounds as f64 * (kernel.round + steps * step + split + epilogue) + cluster;

    let weight_bytes = problem.features as f64 * row_bytes as f64 * 9.0 / 16.0;
    let bytes = weight_bytes + problem.tokens as f64 * (row_bytes + problem.features * problem.output.bytes()) as f64;
    launch + (loops.powi(3) + (bytes / hbm).powi(3)).cbrt()
}

/// Keys: rows, warps and prefetch distance of `direct`.
const DIRECT: Family = Family {
    launch: 4.427,
    l2: 1.373e+07,
    hbm: 3.918e+06,
    split: 0.0,
    exchange: 0.0,
    sharing: 1.0,
    cluster: 0.0,
    epilogues: OF_FEW_TOKENS,
    kernels: &[kernel([16, 16, 2, 0], 1.168, 0.0516)],
};

/// Keys: rows, tokens, warps and CTAs of an SM of `rings`.
const RINGS: Family = Family {
    launch: 4.354,
    l2: 1.798e+07,
    hbm: 3.957e+06,
    split: 0.0,
    exchange: 0.0,
    sharing: 1.0,
    cluster: 0.0,
    epilogues: OF_FEW_TOKENS,
    kernels: &[
        kernel([32, 8, 4, 2], 1.133, 0.06118),
        kernel([32, 8, 8, 1], 1.157, 0.05636),
        kernel([32, 32, 4, 2], 1.308, 0.06385),
        kernel([32, 16, 8, 1], 1.325, 0.05874),
        kernel([48, 8, 8, 1], 1.259, 0.06246),
        kernel([48, 32, 4, 1], 1.519, 0.06892),
    ],
};

/// Keys: rows and tokens of `stream`.
const STREAMED: Family = Family {
    launch: 4.066,
    l2: 1.521e+07,
    hbm: 3.847e+06,
    split: 0.2966,
    exchange: 0.1117,
    sharing: 1.0,
    cluster: 5.532e-09,
    epilogues: EpilogueTimes { bias: time(0.32, 0.002), activation: time(0.67, 0.057), scales: time(0.76, 0.036) },
    kernels: &[
        kernel([64, 8, 0, 0], 1.458, 0.05263),
        kernel([64, 16, 0, 0], 1.487, 0.05516),
        kernel([64, 64, 0, 0], 1.636, 0.07106),
        kernel([64, 96, 0, 0], 1.671, 0.08882),
        kernel([64, 128, 0, 0], 1.578, 0.1127),
        kernel([96, 128, 0, 0], 2.292, 0.1887),
        kernel([128, 8, 0, 0], 1.447, 0.09483),
        kernel([128, 16, 0, 0], 1.503, 0.1022),
        kernel([128, 64, 0, 0], 1.99, 0.1266),
        kernel([128, 96, 0, 0], 2.684, 0.1493),
        kernel([128, 128, 0, 0], 2.799, 0.1879),
        kernel([224, 16, 0, 0], 1.92, 0.1301),
        kernel([224, 64, 0, 0], 2.501, 0.2537),
        kernel([224, 128, 0, 0], 3.068, 0.4298),
        kernel([256, 96, 0, 0], 3.047, 0.3475),
    ],
};

/// Keys: rows and tokens of the tiles of `sm90` with split-K.
const SPLIT: Family = Family {
    launch: 4.665,
    l2: 1.459e+07,
    hbm: 3.591e+06,
    split: 1.188,
    exchange: 0.1081,
    sharing: 1.197,
    cluster: 0.0,
    epilogues: EpilogueTimes { bias: time(0.38, 0.028), activation: time(0.32, 0.235), scales: time(0.44, 0.066) },
    kernels: &[
        kernel([128, 64, 0, 0], 1.693, 0.1328),
        kernel([128, 96, 0, 0], 1.785, 0.1701),
        kernel([128, 128, 0, 0], 1.868, 0.1917),
        kernel([128, 160, 0, 0], 1.814, 0.2761),
        kernel([128, 192, 0, 0], 1.967, 0.2962),
        kernel([128, 208, 0, 0], 2.035, 0.365),
        kernel([256, 96, 0, 0], 2.595, 0.3351),
        kernel([256, 128, 0, 0], 3.759, 0.3978),
        kernel([256, 144, 0, 0], 2.77, 0.449),
        kernel([256, 160, 0, 0], 2.643, 0.485),
        kernel([256, 192, 0, 0], 3.133, 0.5626),
    ],
};

/// Keys: rows, tokens and CTAs of a cluster of the other tiles of `sm90`.
const PERSISTENT: Family = Family {
    launch: 5.431,
    l2: 1.655e+07,
    hbm: 2.987e+06,
    split: 0.0,
    exchange: 0.0,
    sharing: 1.405,
    cluster: 0.02675,
    epilogues: EpilogueTimes { bias: time(0.4, 0.02), activation: time(0.4, 0.086), scales: time(1.7, 0.03) },
    kernels: &[
        kernel([128, 200, 2, 0], 1.168, 0.2198),
        kernel([128, 256, 1, 0], 1.441, 0.3944),
        kernel([128, 256, 2, 0], 1.997, 0.2838),
        kernel([256, 192, 2, 0], 1.671, 0.4072),
        kernel([256, 200, 2, 0], 1.734, 0.4224),
    ],
};

#[cfg(test)]
mod tests {
    use super::{GemmMethod, GemmProblem, ends_through_memory, microseconds};
    use crate::{Architecture, DataType, problem::EpilogueKind};

    /// BERT's layers at batches of 64 and more took 1.3 to 1.7 times as long as without a bias.
    #[test]
    fn a_bias_is_not_for_tiles_that_pass_it_through_memory() {
        for (tokens, inputs, outputs) in [(98304, 768, 768), (8192, 768, 768), (98304, 3072, 768), (384, 4096, 14336)] {
            let plain = GemmProblem::plain(DataType::BF16, DataType::BF16, outputs, tokens, inputs);
            let best =
                |epilogue| GemmMethod::best(GemmProblem { epilogue, ..plain }, Architecture::SM_90, 132).unwrap();
            assert!(ends_through_memory(best(None)), "{:?}", best(None));
            assert!(!ends_through_memory(best(Some(EpilogueKind::Bias))), "{:?}", best(Some(EpilogueKind::Bias)));
        }
    }

    /// 8192 tokens by `[768, 768]` in i8 with scales took 27.0 us in tiles of 128 by 208, and 20.2 in the best.
    #[test]
    fn the_choice_depends_on_the_kind_of_epilogue() {
        let plain = GemmProblem::plain(DataType::I8, DataType::BF16, 768, 8192, 768);
        let kinds = [None, Some(EpilogueKind::Scales), Some(EpilogueKind::Activation)];
        let best = |epilogue| GemmMethod::best(GemmProblem { epilogue, ..plain }, Architecture::SM_90, 132).unwrap();
        let best = kinds.map(best);
        assert!(best[0] != best[1] && best[0] != best[2], "{best:?}");
    }

    #[test]
    fn an_epilogue_takes_time_and_more_of_it_more() {
        let plain = GemmProblem::plain(DataType::BF16, DataType::BF16, 4096, 640, 4096);
        let time = |method, epilogue| microseconds(method, GemmProblem { epilogue, ..plain });
        for method in GemmMethod::all(plain, Architecture::SM_90) {
            let [bias, activation, scales, both] = EpilogueKind::ALL.map(|kind| time(method, Some(kind)));
            assert!(time(method, None) < bias && bias < activation && bias < scales, "{method:?}");
            assert!(both > activation && both > scales, "{method:?}");
        }
    }

    /// 577 tokens by `[1024, 8192]` took 1.52 times the best in 20 clusters of six CTAs: a GPU that holds 17 of them took two rounds.
    #[test]
    fn clusters_of_six_are_not_chosen_where_some_gpus_take_two_rounds() {
        let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, 1024, 577, 8192);
        let best = GemmMethod::best(problem, Architecture::SM_90, 132).unwrap();
        assert!(!matches!(best, GemmMethod::Tiled(tile) if tile.cluster * tile.split.unwrap_or(1) == 6), "{best:?}");
    }
}
