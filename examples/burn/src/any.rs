//! A layer that is dense first and 2:4 later.

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::Tensor;

use crate::{Result, SparseLinear};

/// A linear layer, dense or 2:4. A model holds it where it would hold `burn::nn::Linear`.
#[derive(Module, Debug)]
pub enum AnyLinear {
    /// burn's own.
    Dense(Linear),
    /// 2:4.
    Sparse(SparseLinear),
}

impl AnyLinear {
    /// The 2:4 layer: of a dense one that of [`SparseLinear::pruned`], which keeps the zeros of a weight that is 2:4
    /// already; a 2:4 layer as it is.
    ///
    /// # Errors
    /// Those of [`SparseLinear::pruned`].
    pub fn sparsify(self) -> Result<Self> {
        match self {
            AnyLinear::Dense(linear) => SparseLinear::pruned(&linear).map(AnyLinear::Sparse),
            sparse => Ok(sparse),
        }
    }

    /// The output `[.., d_output]` of an input `[.., d_input]`.
    ///
    /// # Errors
    /// Those of [`SparseLinear::forward`]. A dense layer panics for another number of inputs, as burn's does.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>> {
        match self {
            AnyLinear::Dense(linear) => Ok(linear.forward(input)),
            AnyLinear::Sparse(linear) => linear.forward(input),
        }
    }
}
