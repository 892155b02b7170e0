//! The kernels of this module, loaded once for a device, and the list of their sources.

use twofour_cuda::{DataType, Result, layer::LayerContext, raw::adamw::AdamW, source::Source};

use super::raw::{
    self,
    attention::FusedAttention,
    cross_entropy::CrossEntropy,
    decode::{
        attention::CachedAttention,
        choice::Choices,
        dense::{DenseForm, DenseProducts},
        embed::Embeds,
        gate::QuantizedGates,
        norm::TokenNorms,
    },
    embedding::Embeddings,
    gated::Gated,
    gradient_norm::GradientNorm,
    grid::Grid,
    heads::Heads,
    image::{ImageGrid, ImageWindows},
    keep_of_four::KeepOfFour,
    masking::Masking,
    norm::Norms,
    pointwise::Pointwise,
    sgd::Sgd,
    softmax::Softmax,
    squared_error::SquaredError,
    weighted_rows::WeightedRows,
};

macro_rules! loaded {
    ($($kernels:ident($($key:ident: $type:ty),*);)*) => {$(
        impl $kernels {
            /// Returns the kernels of a context, which the first call loads.
            pub(crate) fn of(context: &LayerContext, $($key: $type),*) -> Result<Self> {
                context.kernels(($($key,)*), |device| Self::new(device, $($key),*))
            }
        }
    )*};
}

loaded! {
    Norms(dtype: DataType);
    CrossEntropy(dtype: DataType);
    SquaredError(dtype: DataType);
    Embeddings(dtype: DataType);
    Heads(dtype: DataType);
    ImageWindows(dtype: DataType);
    ImageGrid(dtype: DataType);
    Gated(dtype: DataType);
    Pointwise(dtype: DataType);
    Softmax(dtype: DataType);
    KeepOfFour(dtype: DataType);
    Masking(dtype: DataType);
    Grid(dtype: DataType);
    FusedAttention(dtype: DataType, head_dim: usize, options: bool);
    Sgd();
    GradientNorm();
    CachedAttention(dtype: DataType, head_dim: usize);
    Choices(dtype: DataType);
    DenseProducts(form: DenseForm, dtype: DataType);
    Embeds(dtype: DataType);
    QuantizedGates(dtype: DataType);
    TokenNorms(dtype: DataType);
    WeightedRows(dtype: DataType);
}

/// Returns the kernels of AdamW for gradients of a data type.
pub(super) fn adamw_kernels(context: &LayerContext, gradient: DataType) -> Result<AdamW> {
    context.kernels(gradient, |device| AdamW::new(device, gradient))
}

/// Returns the source of every kernel of this crate, for compiling them ahead of time.
pub fn sources() -> Vec<Source> {
    raw::sources()
}

/// Loads the kernels that training needs for activations of a data type, which compiles those that are not in the
/// cache.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for other types than f32, f16 and bf16; those of compiling and
/// loading; [`Error::Capturing`](twofour_cuda::Error::Capturing) while the stream is being captured.
pub fn prepare(context: &LayerContext, dtype: DataType) -> Result<()> {
    Norms::of(context, dtype)?;
    CrossEntropy::of(context, dtype)?;
    Embeddings::of(context, dtype)?;
    Heads::of(context, dtype)?;
    Gated::of(context, dtype)?;
    Pointwise::of(context, dtype)?;
    Pointwise::of(context, DataType::F32)?;
    Softmax::of(context, dtype)?;
    adamw_kernels(context, DataType::F32)?;
    GradientNorm::of(context)?;
    context.column_sums(dtype)?;
    context.elementwise(dtype)?;
    Ok(())
}
