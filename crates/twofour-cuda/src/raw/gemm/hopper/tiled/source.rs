//! The kernels' sources: preprocessor definitions and files.

use super::{HopperKernel, HopperStore, HopperTile, WARPGROUPS};
use crate::{
    problem::XOrder,
    raw::{
        gemm::{
            epilogue, rasterization,
            wgmma::{self, Weights},
        },
        headers,
    },
    source::{File, Source, Support},
};

impl HopperKernel {
    pub(super) fn source(&self) -> Source {
        let products = wgmma::products((self.element, self.x_element), self.tile.tokens, self.x, Weights::Shared);
        let kernel = File::new("gemm/hopper/tiled/kernel.cu", include_str!("kernel.cu"));
        Source::new(format!("gemm-sm90-{}", self.name()), Support::WGMMA).define(self.definitions()).with([
            headers::COMMON,
            headers::HOPPER,
            products,
            epilogue::SOURCE,
            rasterization::SOURCE,
            kernel,
        ])
    }

    fn definitions(&self) -> String {
        let HopperTile { features, tokens, stages, atoms, cluster, .. } = self.tile;
        let split_k = u32::from(self.tile.split.is_some());
        let blocks = features / 64 / WARPGROUPS;
        // Registers of the producer warpgroup, and of the consumers. The producer needs at least this many; consumers
        // need more of them where a warpgroup has two 64-row accumulators.
        let (left, taken) = if blocks == 2 { (24, 240) } else { (40, 232) };
        let store = match self.store {
            HopperStore::Tiles => 0,
            HopperStore::OneByOne => 1,
            HopperStore::MnMajor => 2,
        };
        format!(
            "#define ELEMENT {}\n#define OUTPUT {}\n#define BLOCKS {blocks}\n#define TOKENS {tokens}\n#define STAGES \
             {stages}\n\
             #define ATOMS {atoms}\n#define SPLIT_K {split_k}\n#define CLUSTER {cluster}\n#define CHUNK {}\n#define \
             STORE_TILES 0\n#define STORE_ONE_BY_ONE 1\n\
             #define STORE_MN_MAJOR 2\n#define STORE {store}\n#define X_MN_MAJOR {}\n#define KERNEL_EPILOGUE {}\n\
             #define ACCUMULATE {}\n\
             #define REGISTERS_LEFT {left}\n#define REGISTERS_TAKEN {taken}\n#define SHARED_BYTES_ASKED {}\n",
            self.element.definition(),
            self.output.definition(),
            self.chunk(),
            u32::from(self.x == XOrder::ReductionFirst),
            self.epilogue.definition(),
            u32::from(self.accumulate),
            self.shared_bytes(self.chunk()),
        )
    }
}
