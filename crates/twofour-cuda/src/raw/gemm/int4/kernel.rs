//! The kernels and their sources.

use twofour::int4::Granularity;

use super::{Int4Method, method::DIRECT, rings, staged, stream};
use crate::{
    DataType,
    problem::{Int4Problem, XOrder},
    raw::{
        gemm::{
            epilogue::KernelEpilogue,
            mma,
            stream::StreamShape,
            wgmma::{self, Weights},
        },
        headers,
    },
    source::{File, Source, Support},
};

/// A kernel: a data type, the granularity of scales, and a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Int4Kernel {
    /// Data type of X.
    pub element: DataType,
    /// Granularity of the scales.
    pub granularity: Granularity,
    /// The method.
    pub method: Int4Method,
    /// The epilogues that the kernel is for: those of clusters distinguish them, all others have every one.
    pub epilogue: KernelEpilogue,
}

impl Int4Kernel {
    /// Returns every kernel that a problem can need.
    pub fn all() -> Vec<Int4Kernel> {
        let staged = staged::StagedShape::every().into_iter().map(Int4Method::Staged);
        let rings = rings::SHAPES.into_iter().map(Int4Method::Rings);
        let streams = stream::kernels().into_iter().map(Int4Method::Streamed);
        let direct = DIRECT.into_iter().map(Int4Method::Direct);
        let methods: Vec<Int4Method> = direct.chain(rings).chain(streams).chain(staged).collect();
        let of = |element, granularity| {
            let kernel = move |method, epilogue| Int4Kernel { element, granularity, method, epilogue };
            methods.iter().flat_map(move |&method| {
                let mut kernels = KernelEpilogue::ALL.map(|epilogue| kernel(method, epilogue)).to_vec();
                kernels
                    .retain(|kernel| Int4Kernel::distinguishes(method) != (kernel.epilogue == KernelEpilogue::Every));
                kernels
            })
        };
        [DataType::F16, DataType::BF16]
            .into_iter()
            .flat_map(|element| [Granularity::Row, Granularity::Group].map(|granularity| (element, granularity)))
            .flat_map(|(element, granularity)| of(element, granularity))
            .collect()
    }

    /// Returns the kernel of a method for a problem.
    pub(super) fn of(problem: Int4Problem, method: Int4Method) -> Int4Kernel {
        let Int4Problem { element, granularity, epilogue, .. } = problem;
        let epilogue = KernelEpilogue::of(epilogue);
        let epilogue = if Int4Kernel::distinguishes(method) { epilogue } else { KernelEpilogue::Every };
        Int4Kernel { element, granularity, method, epilogue }
    }

    /// Returns whether a method's kernels are compiled for an epilogue: those by clusters, whose code would otherwise be more than 64 KiB.
    fn distinguishes(method: Int4Method) -> bool {
        matches!(method, Int4Method::Streamed(_))
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> String {
        let scales = match self.granularity {
            Granularity::Row => "row",
            Granularity::Group => "g128",
            // `twofour::layout::lanes` packs no such weight, so none comes here.
            Granularity::Group64 => "g64",
        };
        let shape = match self.method {
            Int4Method::Direct(shape) => format!("direct-{}", shape.name()),
            Int4Method::Rings(shape) => format!("rings-{}", shape.name()),
            Int4Method::Streamed(shape) => format!("stream-{}{}", shape.name(), self.epilogue.suffix()),
            Int4Method::Staged(shape) => shape.name(),
        };
        format!("{}-{scales}-{shape}", self.element)
    }

    /// Returns the entry of [`Int4Kernel::all`] that is compiled for this kernel: the launch, not the kernel, sets the CTAs of a cluster.
    pub(super) fn compiled(self) -> Int4Kernel {
        match self.method {
            Int4Method::Streamed(shape) => {
                Int4Kernel { method: Int4Method::Streamed(StreamShape { split: 1, ..shape }), ..self }
            }
            _ => self,
        }
    }

    pub(in crate::raw::gemm) fn source(&self) -> Source {
        let support = match self.method {
            Int4Method::Rings(_) | Int4Method::Streamed(_) => Support::Only((9, 0)),
            Int4Method::Direct(_) | Int4Method::Staged(_) => Support::ALL,
        };
        let source = Source::new(format!("int4-{}", self.name()), support).define(self.definitions());
        let by_mma = [headers::COMMON, headers::EPILOGUE, headers::SPARSE_PRODUCT, headers::INT4];
        match self.method {
            Int4Method::Direct(_) => {
                let kernel = File::new("gemm/int4/direct/kernel.cu", include_str!("direct/kernel.cu"));
                source.with(by_mma).with([headers::DIRECT, kernel])
            }
            Int4Method::Rings(_) => {
                let kernel = File::new("gemm/int4/rings/kernel.cu", include_str!("rings/kernel.cu"));
                source.with(by_mma).with([headers::HOPPER, headers::RINGS, headers::MAPS_INT4, kernel])
            }
            Int4Method::Streamed(shape) => {
                let (tokens, x) = (shape.tile.tokens, XOrder::TokensFirst);
                let products = wgmma::products((self.element, self.element), tokens, x, Weights::Registers);
                let kernel = File::new("gemm/int4/stream/kernel.cu", include_str!("stream/kernel.cu"));
                source.with([headers::COMMON, headers::HOPPER, products, headers::EPILOGUE, headers::INT4]).with([
                    headers::STREAM,
                    headers::MAPS_INT4,
                    kernel,
                ])
            }
            Int4Method::Staged(_) => {
                let kernel = File::new("gemm/int4/staged/kernel.cu", include_str!("staged/kernel.cu"));
                source.with(by_mma).with([kernel])
            }
        }
    }

    /// Returns the source's preprocessor definitions.
    pub(crate) fn definitions(&self) -> String {
        let by_row = self.granularity == Granularity::Row;
        let shape = match self.method {
            Int4Method::Direct(shape) => shape.definitions(),
            Int4Method::Rings(shape) => shape.definitions(rings::step_bytes(shape, self.granularity)),
            Int4Method::Streamed(shape) => {
                let (element, epilogue) = (self.element.definition(), self.epilogue.definition());
                let tile = shape.tile.definitions(stream::step(shape.tile, self.granularity));
                return format!(
                    "#define BY_ROW {by_row}\n#define ELEMENT {element}\n#define OUTPUT ANY_OUTPUT\n#define COMPILED_FOR {epilogue}\n{tile}"
                );
            }
            Int4Method::Staged(shape) => shape.definitions(),
        };
        format!("{}#define BY_ROW {by_row}\n{shape}", mma::instruction(self.element, self.element))
    }
}
