//! The suites of a GPU's kernels.
//!
//! | file | holds |
//! |---|---|
//! | `suite` | what every suite has: the device, rounds, the table and the JSON |
//! | `libraries` | NVIDIA's libraries as baselines |
//! | `shapes` | weights and token counts as options |
//! | `sample` | reading a part of a GEMM's result |
//! | the others | a suite each |

mod attention;
mod decode;
mod gemm;
mod generate;
pub(super) mod grid;
mod layer;
mod libraries;
mod prune;
mod sample;
mod shapes;
mod step;
mod suite;
mod sweep;

use anyhow::Result;
use clap::Args;
use twofour_cli::{exit::Verdict, present::Screen};

use super::suites;
use suite::OnGpu;

/// Measure the kernels of a GPU
///
/// Device time between events, baselines interleaved in shuffled order, random data, and a cold L2; the result is the
/// median.
#[derive(Debug, Args)]
#[command(arg_required_else_help = true)]
pub(crate) struct Cuda {
    #[command(subcommand)]
    suite: CudaSuites,
}

suites! {
    /// What is measured.
    CudaSuites {
        Prune(OnGpu<prune::Prune>),
        Gemm(OnGpu<gemm::Gemms>),
        Decode(OnGpu<decode::Decode>),
        Layer(OnGpu<layer::Layer>),
        Attention(OnGpu<attention::Attention>),
        Step(OnGpu<step::Step>),
        Generate(OnGpu<generate::Generate>),
        Grid(grid::Grid),
        Sweep(sweep::Sweep),
    } hidden {}
}

impl Cuda {
    /// Runs the suite.
    pub(super) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        self.suite.run(screen)
    }
}
