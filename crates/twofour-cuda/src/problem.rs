//! GEMM problems: shapes, data types and memory orders, without pointers.
//!
//! The kernels of [`crate::raw`] are planned for a problem, and so are the libraries' GEMMs; [`crate::compare`]
//! measures which of them is the fastest.

use serde::{Deserialize, Serialize};
use twofour::int4::Granularity;

use crate::{Activation, DataType};

/// The shape, data types and memory orders of a GEMM. For the tensor-core instructions `m` is `features`, `n` is
/// `tokens` and `k` is `reduction`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GemmProblem {
    /// Data type of W.
    pub element: DataType,
    /// Data type of X: `element`, or the other one of the two 8-bit floats.
    pub x_element: DataType,
    /// Data type of the result and the biases.
    pub output: DataType,
    /// Rows of W: `out_features` of a layer.
    pub features: usize,
    /// Rows of X. For a contiguous batch `[batch, tokens, reduction]` this is `batch * tokens`.
    pub tokens: usize,
    /// Columns of W and X: `in_features` of a layer.
    pub reduction: usize,
    /// Which of X's axes is contiguous.
    pub x: XOrder,
    /// Which of the result's axes is contiguous.
    pub order: Order,
    /// The epilogue, or `None` for a kernel without one. Methods are chosen, measured and compiled for this one. A call
    /// may have another kind, which may be computed one result at a time.
    pub epilogue: Option<EpilogueKind>,
    /// Whether the result is added to the output, `out += result`. The result is rounded to the output's type, and then
    /// the sum is. Every element is added exactly once, so the same operands give the same bits.
    #[serde(default)]
    pub accumulate: bool,
}

/// What an [`Epilogue`](crate::raw::gemm::Epilogue) does, as far as its time depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EpilogueKind {
    /// A bias, alone or with ReLU: of the contiguous axis of the result where it is measured.
    Bias,
    /// A bias, and then GELU or SiLU.
    Activation,
    /// Scales of features and of tokens and a bias, alone or with ReLU: layers of 8-bit types.
    Scales,
    /// Scales and a bias, and then GELU or SiLU.
    ScaledActivation,
}

impl EpilogueKind {
    /// Every kind.
    pub const ALL: [EpilogueKind; 4] =
        [EpilogueKind::Bias, EpilogueKind::Activation, EpilogueKind::Scales, EpilogueKind::ScaledActivation];

    /// Returns the kind with or without scales, and with an activation.
    pub fn of(scales: bool, activation: Activation) -> Self {
        match (scales, matches!(activation, Activation::Gelu | Activation::Silu)) {
            (false, false) => EpilogueKind::Bias,
            (false, true) => EpilogueKind::Activation,
            (true, false) => EpilogueKind::Scales,
            (true, true) => EpilogueKind::ScaledActivation,
        }
    }

    /// Returns whether there are scales of features and of tokens.
    pub(crate) fn has_scales(self) -> bool {
        matches!(self, EpilogueKind::Scales | EpilogueKind::ScaledActivation)
    }

    /// Returns whether the activation is GELU or SiLU.
    pub(crate) fn has_activation(self) -> bool {
        matches!(self, EpilogueKind::Activation | EpilogueKind::ScaledActivation)
    }
}

/// Which of the result's axes is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Order {
    /// `[tokens, features]`, the order of a layer's output.
    TokensFirst,
    /// `[features, tokens]`.
    FeaturesFirst,
}

/// Which of X's axes is contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum XOrder {
    /// `[tokens, reduction]`, the order of a layer's input.
    TokensFirst,
    /// `[reduction, tokens]`: for a weight gradient, whose reduction runs over a layer's tokens. Kernels read f16 and
    /// bf16 in this order on Hopper, without an epilogue. Otherwise X is first transposed into the workspace.
    ReductionFirst,
}

impl GemmProblem {
    /// Returns a problem with X `[tokens, reduction]` and the result `[tokens, features]`, without an epilogue.
    pub fn plain(element: DataType, output: DataType, features: usize, tokens: usize, reduction: usize) -> Self {
        let (x, order) = (XOrder::TokensFirst, Order::TokensFirst);
        Self {
            element,
            x_element: element,
            output,
            features,
            tokens,
            reduction,
            x,
            order,
            epilogue: None,
            accumulate: false,
        }
    }

    /// Returns whether W and X have different data types.
    pub(crate) fn is_mixed(self) -> bool {
        self.x_element != self.element
    }
}

/// The shape, data types and memory orders of a GEMM with an int4 weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Int4Problem {
    /// Data type of X: f16 or bf16.
    pub element: DataType,
    /// Data type of the result and the bias: X's type or f32.
    pub output: DataType,
    /// Whether W has a scale for each row or for each group of a row.
    pub granularity: Granularity,
    /// Rows of W: `out_features` of a layer, a multiple of 16.
    pub features: usize,
    /// Rows of X, 1 to [`MAX_TOKENS`](crate::raw::gemm::int4::MAX_TOKENS).
    pub tokens: usize,
    /// Columns of W and X: `in_features` of a layer, a multiple of 128.
    pub reduction: usize,
    /// Which of the result's axes is contiguous.
    pub order: Order,
    /// The epilogue, or `None` for a kernel without one, as [`GemmProblem::epilogue`]. The weight's own scales are no
    /// part of it.
    #[serde(default)]
    pub epilogue: Option<EpilogueKind>,
}

impl Int4Problem {
    /// Returns the bytes of the weight: four bits and two of metadata for each kept value, and 16 bits for each scale.
    pub fn weight_bytes(self) -> usize {
        let kept = self.features * self.reduction / 2;
        kept * 6 / 8 + self.features * self.granularity.scales_per_row(self.reduction) * 2
    }
}
