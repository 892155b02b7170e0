//! The kernels of this module, loaded once for a device.

use crate::{
    DataType, Result,
    layer::{LayerContext, Plans},
    raw::{
        decode::{
            attention::CachedAttention,
            choice::Choices,
            dense::{DenseForm, DenseProducts},
            embed::Embeds,
            gate::QuantizedGates,
            norm::TokenNorms,
        },
        gemm::finish::Finish,
    },
};

/// Loaded kernels, by data type.
#[derive(Default)]
pub(crate) struct DecodeKernels {
    attention: Plans<(DataType, usize), CachedAttention>,
    choices: Plans<DataType, Choices>,
    dense: Plans<(DenseForm, DataType), DenseProducts>,
    embeds: Plans<DataType, Embeds>,
    gates: Plans<DataType, QuantizedGates>,
    norms: Plans<DataType, TokenNorms>,
    finish: Plans<(), Finish>,
}

impl LayerContext {
    /// Returns the kernels of attention over a cache.
    pub(super) fn cached_attention(&self, dtype: DataType, head_dim: usize) -> Result<CachedAttention> {
        let load = || self.load(|device| CachedAttention::new(device, dtype, head_dim));
        self.decode_kernels().attention.of((dtype, head_dim), load)
    }

    /// Returns the kernel that chooses tokens.
    pub(super) fn choices(&self, dtype: DataType) -> Result<Choices> {
        self.decode_kernels().choices.of(dtype, || self.load(|device| Choices::new(device, dtype)))
    }

    /// Returns the kernels of dense layers of integers.
    pub(super) fn dense_products(&self, form: DenseForm, dtype: DataType) -> Result<DenseProducts> {
        self.decode_kernels().dense.of((form, dtype), || self.load(|device| DenseProducts::new(device, form, dtype)))
    }

    /// Returns the kernel of embeddings.
    pub(super) fn token_embeds(&self, dtype: DataType) -> Result<Embeds> {
        self.decode_kernels().embeds.of(dtype, || self.load(|device| Embeds::new(device, dtype)))
    }

    /// Returns the kernels of gated activations to integers.
    pub(super) fn quantized_gates(&self, dtype: DataType) -> Result<QuantizedGates> {
        self.decode_kernels().gates.of(dtype, || self.load(|device| QuantizedGates::new(device, dtype)))
    }

    /// Returns the kernels of norms.
    pub(super) fn token_norms(&self, dtype: DataType) -> Result<TokenNorms> {
        self.decode_kernels().norms.of(dtype, || self.load(|device| TokenNorms::new(device, dtype)))
    }

    /// Returns the kernel of epilogues after a library's GEMM.
    pub(super) fn finish(&self) -> Result<Finish> {
        self.decode_kernels().finish.of((), || self.load(Finish::new))
    }
}
