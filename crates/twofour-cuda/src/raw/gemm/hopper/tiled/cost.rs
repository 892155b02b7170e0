//! The cost of a tile.

use super::HopperTile;
use crate::{
    problem::GemmProblem,
    raw::gemm::cost::{CtaWork, EpilogueTimes, FamilyTimes, kernel, time},
};

impl HopperTile {
    /// Returns whether all epilogues pass through shared memory: those of the largest tile with split-K, which leaves
    /// no registers for them (`kernel.cu`).
    pub(in crate::raw::gemm) fn ends_through_memory(self) -> bool {
        self.split.is_some() && self.features / 128 * self.tokens > 320
    }

    /// Returns the work of a CTA. The CTAs that divide the reduction of a tile divide its results, too.
    pub(super) fn work(self, problem: GemmProblem) -> CtaWork {
        let HopperTile { features, tokens, atoms, cluster: sharing, split, .. } = self;
        let (times, key) = match split {
            Some(_) if self.ends_through_memory() => (&SPLIT_THROUGH_MEMORY, [features, tokens, 0, 0]),
            Some(_) => (&SPLIT, [features, tokens, 0, 0]),
            None => (&PERSISTENT, [features, tokens, sharing, 0]),
        };
        let work = CtaWork::new(times, key, (features, tokens), problem);
        CtaWork {
            x_rows: if sharing == 1 { work.x_rows } else { tokens },
            sharing,
            split: self.parts(),
            storing: self.parts(),
            together: atoms,
            ..work
        }
    }
}

/// The coefficients of all tiles.
pub(super) const TIMES: [&FamilyTimes; 3] = [&SPLIT, &SPLIT_THROUGH_MEMORY, &PERSISTENT];

/// Those of tiles whose epilogues pass through shared memory.
const SPLIT_THROUGH_MEMORY: FamilyTimes = FamilyTimes {
    epilogues: EpilogueTimes { bias: time(0.57, 0.172), activation: time(0.5, 0.237), scales: time(1.04, 0.225) },
    ..SPLIT
};

/// Keys: rows and tokens of the tiles with split-K.
const SPLIT: FamilyTimes = FamilyTimes {
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

/// Keys: rows, tokens and CTAs of a cluster of the other tiles.
const PERSISTENT: FamilyTimes = FamilyTimes {
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
