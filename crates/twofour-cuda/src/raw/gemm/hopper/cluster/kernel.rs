//! The kernels and their sources.

use super::{CLUSTER, ClusterTile, Step};
use crate::{
    DataType as Element,
    problem::{GemmProblem, XOrder},
    raw::{
        gemm::{
            epilogue::{self, KernelEpilogue},
            supported::TYPES,
            wgmma::{self, Weights},
        },
        headers,
    },
    source::{File, Source, Support},
};

/// The rows of W that kernels of 16-bit elements have for each number of rows of X: those that win somewhere
/// (bench/results/h200/methods.json).
const TILES: [(u32, &[u32]); 6] = [
    (8, &[64, 128]),
    (16, &[64, 128, 224]),
    (32, &[64, 128, 224]),
    (64, &[64, 128, 224]),
    (96, &[64, 128, 256]),
    (128, &[64, 96, 128, 224]),
];

/// The rows of W that kernels of 8-bit elements have, whose metadata for 224 rows is wider than a TMA box.
const EIGHT_BIT: [u32; 2] = [64, 128];

/// Returns the rows of W that kernels have for `tokens` rows of X.
pub(super) fn features(element: Element, tokens: u32) -> &'static [u32] {
    let wide = TILES.iter().find(|(width, _)| *width == tokens).map_or(&[][..], |(_, features)| features);
    if element.bytes() == 1 { &EIGHT_BIT } else { wide }
}

/// The rows of X that kernels have.
pub(super) const TOKENS: [u32; 6] = [8, 16, 32, 64, 96, 128];

/// Bytes of W's rows in a step.
const ROW: u32 = 128;

/// Returns the `k` extent of a step, in elements.
pub(super) fn k_step(element: Element) -> u32 {
    2 * ROW / element.bytes() as u32
}

/// Returns the bytes of an atom of metadata.
pub(super) fn atom_bytes(element: Element) -> u32 {
    64 * (k_step(element) / 2) / 8
}

/// Returns a step of a tile's kernels.
pub(super) fn step(element: Element, tile: ClusterTile) -> Step {
    let ClusterTile { features, tokens } = tile;
    let meta = features / 16 * 2 * (atom_bytes(element) / 4);
    Step { bytes: features * ROW + 2 * tokens * ROW + meta, most_ahead: 8, height: 1 }
}

/// A kernel: data types, rows of W and of X, and an epilogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClusterKernel {
    /// Data type of W and X.
    pub element: Element,
    /// Rows of W and of X.
    pub tile: ClusterTile,
    /// Data type of the result.
    pub output: Element,
    /// The epilogues that the kernel is for.
    pub epilogue: KernelEpilogue,
}

impl ClusterKernel {
    /// Returns every kernel that a problem can need.
    pub fn all() -> Vec<ClusterKernel> {
        let mut all = Vec::new();
        for (element, outputs) in TYPES {
            let tiles =
                |tokens| features(*element, tokens).iter().map(move |&features| ClusterTile { features, tokens });
            for tile in TOKENS.into_iter().flat_map(tiles) {
                for (&output, epilogue) in outputs.iter().flat_map(|output| KernelEpilogue::ALL.map(|e| (output, e))) {
                    let kernel = ClusterKernel { element: *element, tile, output, epilogue };
                    all.extend(kernel.is_needed().then_some(kernel));
                }
            }
        }
        all
    }

    /// Returns whether a problem can need the kernel: results of 32 bits have no fast code for an epilogue, and
    /// integers no epilogue.
    fn is_needed(&self) -> bool {
        match self.epilogue {
            KernelEpilogue::None => true,
            KernelEpilogue::Every => self.output == Element::F32,
            KernelEpilogue::Linear | KernelEpilogue::Activated => self.output.bytes() == 2,
        }
    }

    /// Returns the kernel of a tile for a problem.
    pub(super) fn of(problem: GemmProblem, tile: ClusterTile) -> ClusterKernel {
        let GemmProblem { element, output, .. } = problem;
        let epilogue = KernelEpilogue::of(problem.epilogue);
        let epilogue = if output.bytes() == 2 { epilogue } else { epilogue.merged() };
        ClusterKernel { element, tile, output, epilogue }
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> String {
        self.name_of(self.tile.name())
    }

    /// Returns the name of the kernel, or of its launch, with a name of its tile.
    pub(super) fn name_of(&self, tile: String) -> String {
        format!("{}-{}-{tile}{}", self.element, self.output, self.epilogue.suffix())
    }

    fn definitions(&self) -> String {
        let (element, output) = (self.element.definition(), self.output.definition());
        let (epilogue, tile) = (self.epilogue.definition(), self.tile.definitions(step(self.element, self.tile)));
        format!("#define ELEMENT {element}\n#define OUTPUT {output}\n#define KERNEL_EPILOGUE {epilogue}\n{tile}")
    }

    pub(super) fn source(&self) -> Source {
        let elements = (self.element, self.element);
        let products = wgmma::products(elements, self.tile.tokens, XOrder::TokensFirst, Weights::Shared);
        let kernel = File::new("gemm/hopper/cluster/kernel.cu", include_str!("kernel.cu"));
        Source::new(format!("stream-sm90-{}", self.name()), Support::WGMMA).define(self.definitions()).with([
            headers::COMMON,
            headers::HOPPER,
            products,
            epilogue::SOURCE,
            CLUSTER,
            kernel,
        ])
    }
}
