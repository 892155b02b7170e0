//! The kernels' sources, which this crate carries.

mod wgmma;

use sha2::{Digest, Sha256};
use wgmma::Weights;

use crate::{
    Architecture, Element, adamw,
    gemm::{XOrder, direct, int4, mma, rings, sm90, stream},
    prune,
};

/// A CUDA C++ source and what it is defined for: the unit of compiling, loading and caching.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// Pruning and compressing ([`crate::prune`]) weights of one type to values of another.
    Prune {
        /// What the weights are made of.
        input: Element,
        /// What the values are made of.
        output: Element,
    },
    /// Compressing in one direction ([`crate::compress`]) tensors of one type to values of another.
    Compress {
        /// What the tensors are made of.
        input: Element,
        /// What the values are made of.
        output: Element,
    },
    /// A step of AdamW ([`crate::adamw`]).
    AdamW {
        /// What gradients are made of.
        gradient: Element,
    },
    /// Reading memory ([`crate::read`]).
    Read,
    /// A product on the tensor cores of sm_90a ([`crate::gemm`]).
    GemmSm90(sm90::Variant),
    /// The same for few tokens.
    StreamSm90(stream::Variant),
    /// The same for fewer.
    RingsSm90(rings::Variant),
    /// A product on the tensor cores of sm_80 and everything after.
    GemmMma(mma::Variant),
    /// The same for a few tokens.
    Direct(direct::Variant),
    /// A product of few tokens with a four-bit weight ([`crate::gemm::int4`]).
    Int4(int4::Variant),
}

const COMMON: &str = include_str!("../kernels/common.cuh");
const CODES: &str = include_str!("../kernels/codes.cuh");
const PAIRS: &str = include_str!("../kernels/pairs.cuh");
const EPILOGUE: &str = include_str!("../kernels/epilogue.cuh");
const HOPPER: &str = include_str!("../kernels/hopper.cuh");

impl Source {
    /// Every source that a program may come to need.
    pub fn all() -> Vec<Source> {
        let prune = prune::TYPES.into_iter().map(|(input, output)| Source::Prune { input, output });
        let compress = prune::TYPES.into_iter().map(|(input, output)| Source::Compress { input, output });
        let adamw = adamw::GRADIENTS.into_iter().map(|gradient| Source::AdamW { gradient });
        let prune = prune.chain(compress).chain(adamw);
        let tiled = sm90::Variant::all().into_iter().map(Source::GemmSm90);
        let streamed = stream::Variant::all().into_iter().map(Source::StreamSm90);
        let rings = rings::Variant::all().into_iter().map(Source::RingsSm90);
        let mma = mma::Variant::all().into_iter().map(Source::GemmMma);
        let direct = direct::Variant::all().into_iter().map(Source::Direct);
        let int4 = int4::Variant::all().into_iter().map(Source::Int4);
        let hopper = tiled.chain(streamed).chain(rings);
        prune.chain([Source::Read]).chain(hopper).chain(mma).chain(direct).chain(int4).collect()
    }

    /// Its name, of its file and what it is defined for.
    pub fn name(&self) -> String {
        match self {
            Source::Prune { input, output } if input == output => format!("prune-{input}"),
            Source::Prune { input, output } => format!("prune-{input}-{output}"),
            Source::Compress { input, output } => format!("compress-{input}-{output}"),
            Source::AdamW { gradient } => format!("adamw-{gradient}"),
            Source::Read => "read".into(),
            Source::GemmSm90(variant) => format!("gemm-sm90-{}", variant.name()),
            Source::StreamSm90(variant) => format!("stream-sm90-{}", variant.name()),
            Source::RingsSm90(variant) => format!("rings-sm90-{}", variant.name()),
            Source::GemmMma(variant) => format!("gemm-mma-{}", variant.name()),
            Source::Direct(variant) => format!("direct-{}", variant.name()),
            Source::Int4(variant) => format!("int4-{}", variant.name()),
        }
    }

    /// Whether it is for that architecture.
    pub fn is_for(&self, architecture: Architecture) -> bool {
        match self {
            Source::AdamW { .. } | Source::Read | Source::Direct(_) => true,
            Source::Int4(variant) => variant.is_for(architecture),
            // Earlier ones know no 8-bit floats.
            Source::Prune { output, .. } | Source::Compress { output, .. } => {
                output.bytes() > 1 || architecture >= Architecture::SM_89
            }
            Source::GemmMma(variant) => variant.is_for(architecture),
            Source::GemmSm90(_) | Source::StreamSm90(_) | Source::RingsSm90(_) => architecture.capability() == (9, 0),
        }
    }

    /// The whole text.
    pub fn text(&self) -> String {
        let file = |name: &str, text: &str| format!("#line 1 \"{name}\"\n{text}\n");
        let common = file("common.cuh", COMMON);
        let codes = file("codes.cuh", CODES) + &file("pairs.cuh", PAIRS);
        let product = file("sparse_product.cuh", include_str!("../kernels/sparse_product.cuh"));
        let direct = file("direct.cuh", include_str!("../kernels/direct.cuh"));
        let rings = file("hopper.cuh", HOPPER) + &file("rings.cuh", include_str!("../kernels/rings.cuh"));
        let between = |input: &Element, output: &Element| {
            format!("#define IN {}\n#define OUT {}\n", input.definition(), output.definition())
        };
        let epilogue = file("epilogue.cuh", EPILOGUE);
        let four_bits = file("int4.cuh", include_str!("../kernels/int4.cuh"));
        let hopper = |products: String, kernel: String| {
            common.clone() + &file("hopper.cuh", HOPPER) + &file("products", &products) + &epilogue + &kernel
        };
        let stream = file("stream.cuh", include_str!("../kernels/stream.cuh"));
        let panels = file("panels.cuh", include_str!("../kernels/panels.cuh"));
        let maps = file("maps_int4.cuh", include_str!("../kernels/maps_int4.cuh"));
        match self {
            Source::Prune { input, output } => {
                between(input, output) + &common + &codes + &file("prune.cu", include_str!("../kernels/prune.cu"))
            }
            Source::Compress { input, output } => {
                let estimate = file("estimate.cuh", include_str!("../kernels/estimate.cuh"));
                let kernels = file("compress.cu", include_str!("../kernels/compress.cu"));
                let block = file("meta_block.cuh", include_str!("../kernels/meta_block.cuh"));
                between(input, output) + &common + &codes + &block + &estimate + &kernels
            }
            Source::AdamW { gradient } => {
                let definitions = format!("#define GRADIENT {}\n", gradient.definition());
                definitions + &common + &file("adamw.cu", include_str!("../kernels/adamw.cu"))
            }
            Source::Read => common + &file("read.cu", include_str!("../kernels/read.cu")),
            Source::GemmSm90(variant) => {
                let kernel = panels + &file("gemm_sm90.cu", include_str!("../kernels/gemm_sm90.cu"));
                let products = wgmma::products(variant.element, variant.tile.tokens, variant.x, Weights::Shared);
                variant.definitions() + &hopper(products, kernel)
            }
            Source::StreamSm90(variant) => {
                let kernel = stream + &file("stream_sm90.cu", include_str!("../kernels/stream_sm90.cu"));
                let products =
                    wgmma::products(variant.element, variant.tile.tokens, XOrder::TokensFirst, Weights::Shared);
                variant.definitions() + &hopper(products, kernel)
            }
            Source::RingsSm90(variant) => {
                let kernel = rings + &file("rings_sm90.cu", include_str!("../kernels/rings_sm90.cu"));
                variant.definitions() + &common + &product + &epilogue + &kernel
            }
            Source::GemmMma(variant) => {
                let kernel = panels + &file("gemm_mma.cu", include_str!("../kernels/gemm_mma.cu"));
                common + &variant.definitions() + &product + &epilogue + &kernel
            }
            Source::Direct(variant) => {
                let kernel = product + &direct + &file("direct.cu", include_str!("../kernels/direct.cu"));
                variant.definitions() + &common + &epilogue + &kernel
            }
            Source::Int4(variant) => {
                let by_mma = |kernel: String| common.clone() + &epilogue + &product + &four_bits + &kernel;
                let text = match variant.method {
                    int4::Method::Direct(_) => {
                        by_mma(direct + &file("direct_int4.cu", include_str!("../kernels/direct_int4.cu")))
                    }
                    int4::Method::Rings(_) => {
                        by_mma(rings + &maps + &file("rings_int4.cu", include_str!("../kernels/rings_int4.cu")))
                    }
                    int4::Method::Streamed(shape) => {
                        let kernel = file("stream_int4.cu", include_str!("../kernels/stream_int4.cu"));
                        let products = wgmma::products(
                            variant.element,
                            shape.tile.tokens,
                            XOrder::TokensFirst,
                            Weights::Registers,
                        );
                        hopper(products, four_bits.clone() + &stream + &maps + &kernel)
                    }
                    int4::Method::Staged(_) => by_mma(file("int4.cu", include_str!("../kernels/int4.cu"))),
                };
                variant.definitions() + &text
            }
        }
    }

    /// The text's SHA-256.
    pub(crate) fn digest(&self) -> [u8; 32] {
        Sha256::digest(self.text()).into()
    }
}
