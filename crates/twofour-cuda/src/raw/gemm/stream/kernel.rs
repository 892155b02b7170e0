//! The kernels and their sources.

use super::{Step, StreamTile};
use crate::{
    DataType as Element,
    problem::XOrder,
    raw::{
        gemm::{
            TYPES,
            wgmma::{self, Weights},
        },
        headers,
    },
    source::{File, Source, Support},
};

/// Returns the rows of W that kernels have. 224 rows of 8-bit elements are missing because their metadata is wider than a TMA box.
pub(super) fn features(element: Element) -> &'static [u32] {
    if element.bytes() == 1 { &[64, 128] } else { &[64, 96, 128, 224, 256] }
}

/// The rows of X that kernels have.
pub(super) const TOKENS: [u32; 6] = [8, 16, 32, 64, 96, 128];

/// Bytes of W's rows in a step.
const ROW: u32 = 128;

/// Returns the `k` extent of a step, in elements.
pub(super) fn k_step(element: Element) -> u32 {
    2 * ROW / element.bytes() as u32
}

/// A kernel: a data type, and rows of W and of X.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamKernel {
    /// Data type of W and X.
    pub element: Element,
    /// Rows of W and of X.
    pub tile: StreamTile,
}

impl StreamKernel {
    /// Returns every kernel that a problem can need.
    pub fn all() -> Vec<StreamKernel> {
        let of =
            |element, features| TOKENS.map(|tokens| StreamKernel { element, tile: StreamTile { features, tokens } });
        let of = |element| features(element).iter().flat_map(move |features| of(element, *features));
        TYPES.iter().flat_map(|(element, _)| of(*element)).collect()
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> String {
        format!("{}-{}", self.element, self.tile.name())
    }

    /// Returns the bytes of an atom of metadata.
    pub(super) fn atom_bytes(&self) -> u32 {
        64 * (k_step(self.element) / 2) / 8
    }

    pub(super) fn step(&self) -> Step {
        let StreamTile { features, tokens } = self.tile;
        let meta = features / 16 * 2 * (self.atom_bytes() / 4);
        Step { bytes: features * ROW + 2 * tokens * ROW + meta, most_ahead: 8, height: 1 }
    }

    /// Returns the source's preprocessor definitions.
    pub(crate) fn definitions(&self) -> String {
        format!("#define ELEMENT {}\n{}", self.element.definition(), self.tile.definitions(self.step()))
    }

    pub(in crate::raw::gemm) fn source(&self) -> Source {
        let elements = (self.element, self.element);
        let products = wgmma::products(elements, self.tile.tokens, XOrder::TokensFirst, Weights::Shared);
        let kernel = File::new("gemm/stream/kernel.cu", include_str!("kernel.cu"));
        Source::new(format!("stream-sm90-{}", self.name()), Support::Only((9, 0))).define(self.definitions()).with([
            headers::COMMON,
            headers::HOPPER,
            products,
            headers::EPILOGUE,
            headers::STREAM,
            kernel,
        ])
    }
}
