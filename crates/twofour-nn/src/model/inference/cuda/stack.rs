//! The layers of a model on a GPU.

use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, LayerContext};

use super::{CudaLinear, feed_forward::FeedForward, norm::CudaNorm};
use crate::model::config::{NormPlace, TransformerConfig};

/// The layers of a decoder, an encoder or a model of images in the memory of a GPU, and the type that they compute in.
#[derive(Debug)]
pub(in crate::model) struct CudaStack {
    pub(in crate::model) context: LayerContext,
    pub(in crate::model) config: TransformerConfig,
    pub(in crate::model) dtype: DataType,
    pub(in crate::model) layers: Vec<CudaLayer>,
}

/// Attention and feed-forward block.
#[derive(Debug)]
pub(in crate::model) struct CudaLayer {
    pub(super) around_attention: Around,
    pub(super) qkv: CudaLinear,
    /// The bias of queries, keys and values, which padded positions of an image's windows have.
    pub(super) qkv_bias: Option<DeviceBuffer>,
    /// Gains of queries and of keys.
    pub(super) head_norms: Option<[DeviceBuffer; 2]>,
    /// The vectors of the distances of rows and of columns, f32.
    pub(super) relative: Option<[DeviceBuffer; 2]>,
    /// The score of each head's sink, f32.
    pub(super) sinks: Option<DeviceBuffer>,
    pub(super) out: CudaLinear,
    pub(super) around_feed_forward: Around,
    pub(super) feed_forward: FeedForward,
}

/// What is before and behind a block.
#[derive(Debug)]
pub(super) struct Around {
    /// The norm of what the block reads. Where a model has norms behind its blocks it is that of the block before, or
    /// of the embeddings.
    pub(super) norm: CudaNorm,
    /// The norm of the block's output, where it has one.
    pub(super) post_norm: Option<CudaNorm>,
    /// The factors of the block's output, where it has some.
    pub(super) factors: Option<DeviceBuffer>,
}

impl CudaStack {
    /// Bytes of the layers' linear weights.
    pub(in crate::model) fn weight_bytes(&self) -> usize {
        let layer = |l: &CudaLayer| l.qkv.bytes() + l.out.bytes() + l.feed_forward.bytes();
        self.layers.iter().map(layer).sum()
    }

    /// Whether normalized values become the residual stream.
    pub(super) fn replaces(&self) -> bool {
        self.config.norm.place == NormPlace::After
    }

    /// Whether attention or the feed-forward block of some layer reads integers.
    pub(super) fn quantizes(&self) -> bool {
        self.layers.iter().any(|layer| layer.qkv.takes_integers() || layer.feed_forward.takes_integers())
    }

    /// Whether the host chooses what some layer launches.
    pub(super) fn is_routed(&self) -> bool {
        self.layers.iter().any(|layer| matches!(layer.feed_forward, FeedForward::Experts(_)))
    }
}

/// What a model tells of its layers.
macro_rules! of_stack {
    ($Model:ident) => {
        impl $Model {
            /// The model's description.
            pub fn config(&self) -> &$crate::model::TransformerConfig {
                &self.stack.config
            }

            /// The type that it computes in.
            pub fn dtype(&self) -> twofour::DataType {
                self.stack.dtype
            }

            /// The context that work is launched on.
            pub fn context(&self) -> &twofour_cuda::layer::LayerContext {
                &self.stack.context
            }
        }
    };
}
pub(in crate::model) use of_stack;
