//! A model of the time that a method takes on Hopper: [`super::GemmMethod::best`] chooses by it, and measurements
//! shortlist by it.
//!
//! A launch takes a fixed time, and then as long as its CTAs' loops or as reading the weight, X and the result from
//! HBM, whichever is longer (joined smoothly). Loops run in waves of as many CTAs as the device holds concurrently. A
//! step takes the longer of the kernel's own time for a step and of L2's time to deliver all CTAs' operands. Split-K
//! adds the exchange of accumulators.
//!
//! Each family has its coefficients beside its kernels. They were fitted to 24 000 timings in bf16 on an H200
//! (`twofour-bench cuda sweep`; docs/explanation/kernels/cuda-gemm.md has the quality of its choices).

use crate::{
    Architecture,
    problem::{EpilogueKind, GemmProblem},
};

/// Clusters of 1 to 8 CTAs that a Hopper GPU of 132 SMs holds concurrently: the fewest of those measured,
/// because they depend on which SMs a GPU has.
const CLUSTERS: [u32; 8] = [132, 66, 39, 30, 21, 17, 14, 14];

/// The coefficients of a family. Times are in microseconds, rates in bytes per microsecond.
#[derive(Debug)]
pub(super) struct FamilyTimes {
    /// Time of a launch.
    pub(super) launch: f64,
    /// L2's bandwidth into all SMs.
    pub(super) l2: f64,
    /// HBM's bandwidth.
    pub(super) hbm: f64,
    /// Time of an exchange of accumulators, besides `exchange`.
    pub(super) split: f64,
    /// Time of an exchange for each thousand accumulators.
    pub(super) exchange: f64,
    /// Slowdown of a step whose rows of X are multicast.
    pub(super) sharing: f64,
    /// Time that a cluster of several CTAs adds.
    pub(super) cluster: f64,
    /// Times of epilogues.
    pub(super) epilogues: EpilogueTimes,
    pub(super) kernels: &'static [KernelTimes],
}

/// The coefficients of a kernel.
#[derive(Debug)]
pub(super) struct KernelTimes {
    key: [u32; 4],
    /// Time of a CTA besides its steps.
    round: f64,
    /// Time of a step of 128 bytes of X's rows.
    step: f64,
}

/// Returns a kernel's times of a CTA and of a step. The key is what a family distinguishes its kernels by.
pub(super) const fn kernel(key: [u32; 4], round: f64, step: f64) -> KernelTimes {
    KernelTimes { key, round, step }
}

impl FamilyTimes {
    /// A family without clusters, in whose place a family writes its own coefficients.
    pub(super) const NO_CLUSTERS: Self = Self {
        launch: 0.0,
        l2: f64::INFINITY,
        hbm: f64::INFINITY,
        split: 0.0,
        exchange: 0.0,
        sharing: 1.0,
        cluster: 0.0,
        epilogues: EpilogueTimes::OF_FEW_TOKENS,
        kernels: &[],
    };

    /// Returns the kernel of this key, or else the one with the nearest key.
    fn kernel(&self, key: [u32; 4]) -> Option<&'static KernelTimes> {
        let apart = |kernel: &&KernelTimes| -> f64 {
            let ratios = kernel.key.iter().zip(key).filter(|(_, b)| *b != 0);
            ratios.map(|(a, b)| (f64::from(*a) / f64::from(b)).ln().abs()).sum()
        };
        self.kernels.iter().min_by(|a, b| apart(a).total_cmp(&apart(b)))
    }
}

/// The work of a method's CTAs.
pub(super) struct CtaWork {
    pub(super) times: &'static FamilyTimes,
    pub(super) key: [u32; 4],
    /// Rows of W and of X that a CTA computes, and rows of X that it loads.
    pub(super) features: u32,
    pub(super) tokens: u32,
    pub(super) x_rows: u32,
    /// CTAs that are resident on an SM.
    pub(super) resident: u32,
    /// CTAs that share rows of X by multicast, and CTAs that divide the reduction among them.
    pub(super) sharing: u32,
    pub(super) split: u32,
    /// CTAs that divide the results of a tile among them.
    pub(super) storing: u32,
    /// Steps of 128 bytes in a stage.
    pub(super) together: u32,
    /// Warps of a CTA that divide the reduction among them.
    pub(super) warps: u32,
}

impl CtaWork {
    /// Returns the work of CTAs that share nothing, each for a tile of (rows of W, rows of X).
    pub(super) fn new(
        times: &'static FamilyTimes,
        key: [u32; 4],
        (features, tokens): (u32, u32),
        problem: GemmProblem,
    ) -> Self {
        let tiles = problem.tokens.div_ceil(tokens as usize);
        let x_rows = (problem.tokens.div_ceil(tiles).next_multiple_of(8) as u32).min(tokens);
        let (resident, sharing, split, storing, together, warps) = (1, 1, 1, 1, 1, 1);
        Self { times, key, features, tokens, x_rows, resident, sharing, split, storing, together, warps }
    }

    /// Returns the clusters that the device holds concurrently.
    fn at_once(&self) -> u32 {
        CLUSTERS[((self.sharing * self.split).clamp(1, 8) - 1) as usize] * self.resident
    }
}

/// Time that an epilogue adds to a round: a part that does not depend on the results of a CTA, and one for each
/// thousand of them.
#[derive(Debug, Clone, Copy)]
pub(super) struct EpilogueTime {
    fixed: f64,
    results: f64,
}

pub(super) const fn time(fixed: f64, results: f64) -> EpilogueTime {
    EpilogueTime { fixed, results }
}

/// Times of a family's epilogues, fitted to all methods of 392 products of 11 layers in bf16 and i8, measured on an
/// H100 (`twofour-bench cuda sweep`). Those of GELU in tiles without split-K are fitted to 28 products of 7 layers in
/// bf16 on an H200. SiLU was not measured, and is taken for GELU.
#[derive(Debug)]
pub(super) struct EpilogueTimes {
    /// A bias, alone or with ReLU.
    pub(super) bias: EpilogueTime,
    /// A bias and GELU or SiLU.
    pub(super) activation: EpilogueTime,
    /// Scales and a bias.
    pub(super) scales: EpilogueTime,
}

impl EpilogueTimes {
    /// Those of kernels whose accumulators of all warps come from shared memory: warp pipelines, and, where they were
    /// not measured, direct kernels.
    pub(super) const OF_FEW_TOKENS: Self =
        Self { bias: time(0.34, 0.01), activation: time(0.47, 0.4), scales: time(0.59, 0.27) };

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

/// Returns the estimated time of a problem in microseconds, or `None` for an architecture that was not measured.
pub(super) fn microseconds(work: &CtaWork, problem: GemmProblem, architecture: Architecture) -> Option<f64> {
    if !architecture.features().measured {
        return None;
    }
    let &FamilyTimes { launch, l2, hbm, split, exchange, sharing, cluster, .. } = work.times;
    let (kernel, at_once) = (work.times.kernel(work.key)?, work.at_once());
    let row_bytes = problem.reduction * problem.element.bytes();
    let tiles = problem.features.div_ceil((work.features * work.sharing) as usize)
        * problem.tokens.div_ceil(work.tokens as usize);
    let rounds = tiles.div_ceil(at_once as usize);
    let ctas = (tiles.min(at_once as usize) * (work.sharing * work.split) as usize) as f64;
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
    let results = f64::from(work.features * work.tokens) / f64::from(work.storing);
    let epilogue = problem.epilogue.map_or(0.0, |kind| work.times.epilogues.time(kind, results));
    let loops = rounds as f64 * (kernel.round + steps * step + split + epilogue) + cluster;

    let weight_bytes = problem.features as f64 * row_bytes as f64 * 9.0 / 16.0;
    let bytes = weight_bytes + problem.tokens as f64 * (row_bytes + problem.features * problem.output.bytes()) as f64;
    Some(launch + (loops.powi(3) + (bytes / hbm).powi(3)).cbrt())
}

#[cfg(test)]
mod tests {
    use crate::{
        Architecture, DataType,
        problem::{EpilogueKind, GemmProblem},
        raw::gemm::{GemmMethod, choice::Methods},
    };

    fn ends_through_memory(method: GemmMethod) -> bool {
        matches!(method, GemmMethod::Tiled(tile) if tile.ends_through_memory())
    }

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
        let time = |method: GemmMethod, epilogue| {
            method.method().cost(GemmProblem { epilogue, ..plain }, Architecture::SM_90).unwrap()
        };
        for method in GemmMethod::all(plain, Architecture::SM_90) {
            let [bias, activation, scales, both] = EpilogueKind::ALL.map(|kind| time(method, Some(kind)));
            assert!(time(method, None) < bias && bias < activation && bias < scales, "{method:?}");
            assert!(both > activation && both > scales, "{method:?}");
        }
    }

    /// 577 tokens by `[1024, 8192]` took 1.52 times the best in 20 clusters of six CTAs: a GPU that holds 17 of them
    /// took two rounds.
    #[test]
    fn clusters_of_six_are_not_chosen_where_some_gpus_take_two_rounds() {
        let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, 1024, 577, 8192);
        let best = GemmMethod::best(problem, Architecture::SM_90, 132).unwrap();
        assert!(!matches!(best, GemmMethod::Tiled(tile) if tile.cluster * tile.split.unwrap_or(1) == 6), "{best:?}");
    }

    /// Preferences balance the SMs by shape alone where nothing was measured.
    #[test]
    fn there_are_times_for_measured_architectures_only() {
        let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, 4096, 4, 4096);
        for architecture in Architecture::ALL {
            let costs =
                GemmMethod::all(problem, architecture).into_iter().map(|m| m.method().cost(problem, architecture));
            assert!(costs.clone().count() > 0);
            assert!(costs.into_iter().all(|cost| cost.is_some() == architecture.features().measured), "{architecture}");
        }
    }
}
