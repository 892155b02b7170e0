//! Planned GEMMs: the kernel's parameters and its launch.

use super::{
    StreamKernel, StreamShape, StreamTile,
    kernel::{atom_bytes, k_step},
};
use crate::{
    DataType as Element, Device, Result, Stream,
    device::{Kernel, Launch},
    problem::GemmProblem,
    raw::gemm::{
        Epilogue, GemmOperands, RawOutput,
        tensor_map::{Swizzle, TensorMap},
    },
};

/// The problem, in the kernels' memory layout.
#[repr(C)]
pub(in crate::raw::gemm) struct RawProblem {
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    clusters: u32,
    x_rows: u32,
    split: u32,
    steps_each: Share,
    sixteens_each: Share,
}

/// An even division among the CTAs of a cluster: `each` for every one, and one more for the first `more`.
#[repr(C)]
struct Share {
    each: u32,
    more: u32,
}

impl Share {
    fn of(all: u32, blocks: u32) -> Self {
        Self { each: all / blocks, more: all % blocks }
    }
}

impl RawProblem {
    /// Returns the parameters of a problem.
    pub(in crate::raw::gemm) fn new(
        to: RawOutput,
        output: Element,
        (features, tokens): (usize, usize),
        steps: usize,
        shape: StreamShape,
    ) -> Self {
        let (output, split) = (output as u32, shape.split);
        Self {
            to,
            output,
            features: features as u32,
            tokens: tokens as u32,
            clusters: shape.tile.clusters(features),
            x_rows: shape.tile.x_rows(tokens),
            split,
            steps_each: Share::of(steps as u32, split),
            sixteens_each: Share::of(shape.tile.features / 16, split),
        }
    }
}

/// A planned GEMM: its kernel and its launch configuration.
#[derive(Debug, Clone)]
pub(in crate::raw::gemm) struct StreamPlan {
    problem: GemmProblem,
    variant: StreamKernel,
    shape: StreamShape,
    kernel: Kernel,
    launch: Launch,
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
struct StreamParameters {
    weight: TensorMap,
    x: TensorMap,
    meta: TensorMap,
    problem: RawProblem,
}

impl StreamPlan {
    /// Plans a validated problem with one of its shapes.
    pub(in crate::raw::gemm) fn new(
        device: &Device,
        problem: GemmProblem,
        shape: StreamShape,
        launch: Launch,
    ) -> Result<Self> {
        let variant = StreamKernel::of(problem, shape.tile);
        let kernel = device.kernel(&variant.source(), "stream")?;
        kernel.allow_shared()?;
        Ok(Self { problem, variant, shape, kernel, launch })
    }

    pub(in crate::raw::gemm) fn kernel(&self) -> String {
        self.variant.name_of(self.shape.name())
    }

    /// # Safety
    /// That of [`crate::raw::gemm::Gemm::run`].
    pub(in crate::raw::gemm) unsafe fn run(
        &self,
        stream: Stream,
        operands: GemmOperands,
        epilogue: Epilogue,
    ) -> Result<()> {
        let GemmProblem { element, output, features, tokens, .. } = self.problem;
        let (rows, columns) = self.problem.padded();
        let StreamTile { features: tile_features, .. } = self.shape.tile;
        let x_rows = self.shape.tile.x_rows(tokens);
        let (bytes, step) = (element.bytes(), k_step(element));
        let atom = atom_bytes(element);
        // Metadata is in half steps, each for all features. Its units are eight bytes, because a TMA box is 256 units wide at most.
        let meta_rows = columns.div_ceil(step as usize / 2);
        let meta_cols = rows / 64 * atom as usize / 8;
        let parameters = StreamParameters {
            weight: TensorMap::new(
                operands.weight.values,
                bytes,
                (rows, columns / 2),
                (tile_features, step / 2),
                Swizzle::Bytes128,
            )?,
            x: TensorMap::new(
                operands.x,
                bytes,
                (tokens, self.problem.x_row_by_tma()),
                (x_rows, step / 2),
                Swizzle::Bytes128,
            )?,
            meta: TensorMap::new(
                operands.weight.meta,
                8,
                (meta_rows, meta_cols),
                (2, tile_features / 16 * (atom / 32)),
                Swizzle::None,
            )?,
            problem: RawProblem::new(
                RawOutput::of(self.problem, operands.out, epilogue),
                output,
                (features, tokens),
                columns.div_ceil(step as usize),
                self.shape,
            ),
        };
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::gemm::stream::tile::MOST_BLOCKS;

    #[test]
    fn shares_of_a_cluster_are_even_and_leave_nothing_out() {
        for all in [1, 4, 6, 7, 16, 57] {
            for blocks in 1..=MOST_BLOCKS {
                let Share { each, more } = Share::of(all, blocks);
                assert!(each * blocks + more == all && more < blocks, "{all} {blocks}");
                // The CTA with the most rows has room for the accumulators that all others send.
                let most = each + u32::from(more > 0);
                let room = StreamTile { features: all * 16, tokens: 8 }.sums_bytes(blocks);
                assert_eq!(room, most * (blocks - 1) * 16 * 8 * 4, "{all} {blocks}");
            }
        }
    }
}
