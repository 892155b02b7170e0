//! The table of kernel families.

use serde::{Deserialize, Serialize};

use super::{
    choice::Methods,
    family::{Family, KernelFamily, Method},
    generic, hopper,
};
use crate::{
    Architecture,
    problem::{GemmProblem, Int4Problem},
};

macro_rules! families {
    ($($(#[$doc:meta])* $Method:ident of $Problem:ident { $($(#[$family_doc:meta])* $Name:ident: $Family:ty;)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
            pub enum $Method {
                $($(#[$family_doc])* $Name($Family),)*
            }

            impl Methods for $Method {
                type Problem = $Problem;

                fn all(problem: $Problem, architecture: Architecture) -> Vec<Self> {
                    let mut all = Vec::new();
                    $(all.extend(<$Family>::methods(problem, architecture).into_iter().map(Self::$Name));)*
                    all
                }

                fn preferred(problem: $Problem, architecture: Architecture, sms: u32) -> Option<Self> {
                    $(if let Some(method) = <$Family>::preferred(problem, architecture, sms) {
                        return Some(Self::$Name(method));
                    })*
                    None
                }

                fn method(&self) -> &dyn Method<$Problem> {
                    match self {
                        $(Self::$Name(method) => method,)*
                    }
                }
            }
        )*

        /// Every family, for each format of weights that it has.
        pub(super) const FAMILIES: &[Family] = &[$($(Family::of::<$Problem, $Family>(),)*)*];
    };
}

// A family is a line here. Where times are not modelled, the first family that prefers a method computes a problem.
families! {
    /// The kernel family that computes a GEMM, with its tile or shape.
    GemmMethod of GemmProblem {
        /// `mma.sp`, the weight goes straight into registers; for at most eight tokens.
        Direct: generic::direct::DirectShape;
        /// `mma.sp` without clusters, every CTA computes all tokens of its rows of W; for small batches.
        WarpPipelines: hopper::warp_pipelines::WarpPipelinesShape;
        /// `wgmma.sp`, every CTA computes all tokens of its rows of W; for small batches.
        Cluster: hopper::cluster::ClusterShape;
        /// `wgmma.sp`, a grid of tiles; for many tokens.
        Tiled: hopper::tiled::HopperTile;
        /// `mma.sp`, a grid of tiles. It runs on Hopper, too, below `wgmma.sp`'s throughput.
        Mma: generic::tiled::MmaTile;
    }

    /// The kernel family that computes a GEMM with an int4 weight, with its shape.
    Int4Method of Int4Problem {
        /// W goes from memory straight into registers; for at most eight tokens.
        Direct: generic::direct::DirectShape;
        /// Clusters with split-K; on Hopper, for more than eight tokens.
        Cluster: hopper::cluster::ClusterShape;
        /// A circular buffer of stages for each warp, filled by TMA; on Hopper.
        WarpPipelines: hopper::warp_pipelines::WarpPipelinesShape;
        /// `cp.async` pipelines through shared memory, on all architectures.
        Staged: generic::staged::StagedShape;
    }
}
