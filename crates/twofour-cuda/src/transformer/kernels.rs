//! The kernels of this module, loaded once for a device.

use crate::{
    DataType, Result,
    layer::{LayerContext, Plans},
    raw::{
        adamw::AdamW,
        attention::FusedAttention,
        cross_entropy::CrossEntropy,
        embedding::Embeddings,
        gated::Gated,
        gradient_norm::GradientNorm,
        heads::Heads,
        image::{ImageGrid, ImageWindows},
        keep_of_four::KeepOfFour,
        masking::Masking,
        norm::Norms,
        pointwise::Pointwise,
        sgd::Sgd,
        softmax::Softmax,
    },
};

macro_rules! kernels {
    ($($name:ident: $kernels:ident;)*) => {
        /// Loaded kernels, by data type.
        #[derive(Default)]
        pub(crate) struct TransformerKernels {
            $($name: Plans<DataType, $kernels>,)*
            gradient_norm: Plans<(), GradientNorm>,
            gradient_descent: Plans<(), Sgd>,
            fused_attention: Plans<(DataType, usize), FusedAttention>,
        }

        impl LayerContext {
            $(
                /// Returns the kernels for a data type, which the first call loads.
                pub(super) fn $name(&self, dtype: DataType) -> Result<$kernels> {
                    self.transformer().$name.of(dtype, || self.load(|device| $kernels::new(device, dtype)))
                }
            )*
        }
    };
}

kernels! {
    norms: Norms;
    cross_entropies: CrossEntropy;
    embeddings: Embeddings;
    heads: Heads;
    image_windows: ImageWindows;
    image_grids: ImageGrid;
    gated: Gated;
    pointwise: Pointwise;
    softmax: Softmax;
    optimizers: AdamW;
    keeps_of_four: KeepOfFour;
    masks: Masking;
}

impl LayerContext {
    /// Returns the kernels of attention without scores in memory.
    pub(super) fn fused_attention(&self, dtype: DataType, head_dim: usize) -> Result<FusedAttention> {
        let load = || self.load(|device| FusedAttention::new(device, dtype, head_dim));
        self.transformer().fused_attention.of((dtype, head_dim), load)
    }

    /// Returns the kernel of gradient descent with momentum.
    pub(super) fn gradient_descent(&self) -> Result<Sgd> {
        self.transformer().gradient_descent.of((), || self.load(Sgd::new))
    }

    /// Returns the kernels of the gradient norm.
    pub(super) fn gradient_norm(&self) -> Result<GradientNorm> {
        self.transformer().gradient_norm.of((), || self.load(GradientNorm::new))
    }
}

/// Loads the kernels of this module for activations of a data type, which compiles those that are not in the cache.
///
/// # Errors
/// [`Error::DataType`](crate::Error::DataType) for other types than f32, f16 and bf16; those of compiling and loading;
/// [`Error::Capturing`](crate::Error::Capturing) while the stream is being captured.
pub fn prepare(context: &LayerContext, dtype: DataType) -> Result<()> {
    context.norms(dtype)?;
    context.cross_entropies(dtype)?;
    context.embeddings(dtype)?;
    context.heads(dtype)?;
    context.gated(dtype)?;
    context.pointwise(dtype)?;
    context.pointwise(DataType::F32)?;
    context.softmax(dtype)?;
    context.optimizers(DataType::F32)?;
    context.gradient_norm()?;
    context.column_sums(dtype)?;
    context.elementwise(dtype)?;
    Ok(())
}
