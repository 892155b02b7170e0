//! The epilogue of a GEMM: scales, bias and activation.

use crate::{
    Activation, DataType, DevicePtr, Error, Result,
    arguments::expect_pointers,
    problem::{EpilogueKind, GemmProblem, Int4Problem, Order},
    source::File,
};

/// Epilogues and stores.
pub(super) const SOURCE: File = File::new("gemm/epilogue.cuh", include_str!("epilogue.cuh"));

/// The operations on accumulators before they are stored: scales, then biases, then an activation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epilogue {
    /// Scale of all results.
    pub alpha: f32,
    /// Scale of each feature, f32.
    pub feature_scales: Option<DevicePtr>,
    /// Scale of each token, f32.
    pub token_scales: Option<DevicePtr>,
    /// Bias of each feature, of the result's type; added after the scales.
    pub bias: Option<DevicePtr>,
    /// Bias of each token, of the result's type; added after the scales. It is the bias of a layer whose operands are
    /// exchanged.
    pub token_bias: Option<DevicePtr>,
    /// Activation; applied after the biases.
    pub activation: Activation,
}

impl Default for Epilogue {
    /// Returns the identity epilogue.
    fn default() -> Self {
        Self {
            alpha: 1.0,
            feature_scales: None,
            token_scales: None,
            bias: None,
            token_bias: None,
            activation: Activation::Identity,
        }
    }
}

impl Epilogue {
    /// Returns the kind of the epilogue, or `None` for the identity.
    pub fn kind(self) -> Option<EpilogueKind> {
        let scales = self.feature_scales.is_some() || self.token_scales.is_some();
        (self != Epilogue::default()).then(|| EpilogueKind::of(scales, self.activation))
    }
}

/// The epilogues that a kernel has fast code for. One with an epilogue computes any other, too, one result at a time. A
/// kernel has few, because code that a launch does not run slows it down (docs/explanation/kernels/cuda-gemm.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelEpilogue {
    /// For no epilogue.
    None,
    /// Scales, biases and ReLU.
    Linear,
    /// Scales, biases, and GELU or SiLU.
    Activated,
    /// All.
    Every,
}

impl KernelEpilogue {
    /// Every value.
    pub(super) const ALL: [Self; 4] = [Self::None, Self::Linear, Self::Activated, Self::Every];

    /// Returns that of a problem's epilogue, for kernels that distinguish activations.
    pub(super) fn of(epilogue: Option<EpilogueKind>) -> Self {
        match epilogue {
            None => Self::None,
            Some(kind) if kind.has_activation() => Self::Activated,
            Some(_) => Self::Linear,
        }
    }

    /// Returns that for kernels which do not distinguish epilogues.
    pub(super) fn merged(self) -> Self {
        if self == Self::None { Self::None } else { Self::Every }
    }

    /// Returns the name in the kernels, as `KernelEpilogue` in `gemm/epilogue.cuh`.
    pub(super) fn definition(self) -> &'static str {
        match self {
            Self::None => "WITHOUT",
            Self::Linear => "LINEAR",
            Self::Activated => "ACTIVATED",
            Self::Every => "EVERY",
        }
    }

    /// Returns the end of a kernel's name.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Linear => "-linear",
            Self::Activated => "-activated",
            Self::Every => "-epilogue",
        }
    }
}

/// Which stores a kernel can use, as `StoreKind` in `gemm/epilogue.cuh`. Those of vectors are used where type and order
/// of the results allow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum StoreKind {
    /// With any epilogue, one result at a time.
    FinishedEach = 0,
    /// Without one, eight features at once where they are contiguous.
    PlainVectorsOf8 = 1,
    /// As `PlainVectorsOf8`, after a bias of features has been added.
    BiasVectorsOf8 = 2,
    /// Without one, one result at a time.
    PlainEach = 3,
    /// As `PlainVectorsOf8`, after any other epilogue.
    FinishedVectorsOf8 = 4,
}

impl StoreKind {
    /// Returns that of a result that begins at a multiple of 16 bytes and whose tokens have a multiple of eight
    /// features each.
    fn of(epilogue: Epilogue) -> Self {
        let Epilogue { bias, .. } = epilogue;
        if epilogue == Epilogue::default() {
            StoreKind::PlainVectorsOf8
        } else if epilogue == (Epilogue { bias, ..Epilogue::default() }) {
            StoreKind::BiasVectorsOf8
        } else {
            StoreKind::FinishedVectorsOf8
        }
    }

    /// Returns that of any other result.
    fn one_by_one(self) -> Self {
        match self {
            StoreKind::PlainVectorsOf8 | StoreKind::PlainEach => StoreKind::PlainEach,
            StoreKind::BiasVectorsOf8 | StoreKind::FinishedVectorsOf8 | StoreKind::FinishedEach => {
                StoreKind::FinishedEach
            }
        }
    }
}

/// The output pointer and the epilogue, in the kernels' memory layout.
#[repr(C)]
pub(super) struct RawOutput {
    data: DevicePtr,
    bias: DevicePtr,
    feature_scales: DevicePtr,
    token_scales: DevicePtr,
    stride_feature: u64,
    stride_token: u64,
    alpha: f32,
    activation: u32,
    store_kind: StoreKind,
    token_bias: DevicePtr,
    accumulate: u32,
}

impl RawOutput {
    /// Returns the output of a problem.
    pub(super) fn of(problem: GemmProblem, data: DevicePtr, epilogue: Epilogue) -> Self {
        let GemmProblem { features, tokens, order, accumulate, .. } = problem;
        let mut output = Self::new((features, tokens), order, data, epilogue);
        output.accumulate = u32::from(accumulate);
        // A thread can store eight 16-bit results, or four 32-bit ones, at once where each token's results begin at a
        // multiple of 16 bytes.
        if accumulate || !features.is_multiple_of(8) || !data.is_multiple_of(16) {
            output.store_kind = output.store_kind.one_by_one();
        }
        output
    }

    /// Returns the output of a problem with an int4 weight: it begins at a multiple of 16 bytes, and its tokens have a
    /// multiple of eight features each.
    pub(super) fn of_int4(problem: Int4Problem, data: DevicePtr, epilogue: Epilogue) -> Self {
        Self::new((problem.features, problem.tokens), problem.order, data, epilogue)
    }

    /// Returns an output that begins at a multiple of 16 bytes, and whose tokens have a multiple of eight features
    /// each.
    fn new((features, tokens): (usize, usize), order: Order, data: DevicePtr, epilogue: Epilogue) -> Self {
        let (stride_feature, stride_token) = match order {
            Order::TokensFirst => (1, features as u64),
            Order::FeaturesFirst => (tokens as u64, 1),
        };
        Self {
            data,
            bias: epilogue.bias.unwrap_or(0),
            feature_scales: epilogue.feature_scales.unwrap_or(0),
            token_scales: epilogue.token_scales.unwrap_or(0),
            stride_feature,
            stride_token,
            alpha: epilogue.alpha,
            activation: match epilogue.activation {
                Activation::Identity => 0,
                Activation::Relu => 1,
                Activation::Gelu => 2,
                Activation::Silu => 3,
            },
            store_kind: StoreKind::of(epilogue),
            token_bias: epilogue.token_bias.unwrap_or(0),
            accumulate: 0,
        }
    }
}

/// Returns an error for an epilogue where none was planned, and for a pointer of an epilogue that is not aligned to its
/// elements.
pub(crate) fn expect_epilogue(epilogue: Epilogue, planned: Option<EpilogueKind>, output: DataType) -> Result<()> {
    if planned.is_none() && epilogue != Epilogue::default() {
        return Err(Error::Epilogue);
    }
    let optional = [
        ("scales of features", epilogue.feature_scales, 4),
        ("scales of tokens", epilogue.token_scales, 4),
        ("bias", epilogue.bias, output.bytes() as u64),
        ("bias of tokens", epilogue.token_bias, output.bytes() as u64),
    ];
    for (what, pointer, alignment) in optional {
        if let Some(pointer) = pointer {
            expect_pointers(&[(what, pointer, alignment)])?;
        }
    }
    Ok(())
}
