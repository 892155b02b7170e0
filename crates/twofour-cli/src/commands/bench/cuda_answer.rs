//! The answer of `twofour bench cuda`.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::cuda_tables;
use crate::{
    measure::cuda::{AttentionRow, GemmRow, GenerationRow, Gpu, OverheadRow, PruneRow, StepRow, TrainRow},
    present::Screen,
};

/// The answer; `bench/readme_tables.py` reads its JSON.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    pub(super) machine: Gpu,
    /// Versions of the libraries that were measured too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) libraries: Option<Versions>,
    pub(super) command: String,
    pub(super) rows: Rows,
}

/// Versions of NVIDIA's libraries.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Versions {
    pub(super) cublaslt: String,
    pub(super) cusparselt: String,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Rows {
    Prune(Vec<PruneRow>),
    Gemm(Vec<GemmRow>),
    Train(Vec<TrainRow>),
    Attention(Vec<AttentionRow>),
    Overhead(Vec<OverheadRow>),
    Generation(Vec<GenerationRow>),
    Step(Vec<StepRow>),
}

impl Answer {
    /// Writes the tables.
    pub(super) fn tell(&self, screen: &mut Screen) -> Result<()> {
        let Gpu { gpu, architecture, .. } = &self.machine;
        screen.line(format!("{gpu}, {architecture}\n"))?;
        match &self.rows {
            Rows::Prune(rows) => {
                screen.line(cuda_tables::prune(rows))?;
                screen.line("\nMedians. TB/s: of the bytes that must be read and written, whatever the kernel does.")
            }
            Rows::Train(rows) => {
                screen.line(cuda_tables::train(rows))?;
                screen.line("\nMedians.")
            }
            Rows::Attention(rows) => {
                screen.line(cuda_tables::attention(rows))?;
                screen
                    .line("\nMedians. TFLOP/s: of the products over all scores, half of them where the mask is causal.")
            }
            Rows::Step(rows) => {
                screen.line(cuda_tables::step(rows))?;
                screen.line("\nMedians. Phases: device time of steps that were measured apart.")
            }
            Rows::Generation(rows) => {
                screen.line(cuda_tables::generation(rows))?;
                screen.line("\nMedians of rounds of 16 steps. GB/s: of the weights, keys and values that a step reads.")
            }
            Rows::Overhead(rows) => {
                screen.line(cuda_tables::overhead(rows))?;
                screen.line("\nMedians of launches that nobody waits for.")
            }
            Rows::Gemm(rows) => {
                screen.line(cuda_tables::gemm(rows))?;
                screen.line(
                    "\nMedians. TFLOP/s: of the dense product's operations. Sustained: after a second without a pause.",
                )
            }
        }
    }
}
