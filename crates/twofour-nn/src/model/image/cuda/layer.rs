//! One layer of an image encoder on a GPU.

use twofour_cuda::layer::DeviceBuffer;

use crate::model::inference::cuda::{CudaLinear, CudaNorm};

/// Attention and feed-forward block.
#[derive(Debug)]
pub(super) struct CudaImageLayer {
    /// The side of the windows of attention.
    pub(super) window: Option<usize>,
    pub(super) attention_norm: CudaNorm,
    pub(super) qkv: CudaLinear,
    /// The bias of queries, keys and values, which padded positions of windows have.
    pub(super) qkv_bias: Option<DeviceBuffer>,
    /// The vectors of the distances of rows and of columns, f32.
    pub(super) relative: Option<[DeviceBuffer; 2]>,
    pub(super) out: CudaLinear,
    pub(super) attention_scale: Option<DeviceBuffer>,
    pub(super) feed_forward_norm: CudaNorm,
    pub(super) up: CudaLinear,
    /// Whether the GEMM of `up` applies the hidden layer's function.
    pub(super) up_activates: bool,
    pub(super) down: CudaLinear,
    pub(super) feed_forward_scale: Option<DeviceBuffer>,
}

impl CudaImageLayer {
    /// Bytes of the linear layers' weights.
    pub(super) fn bytes(&self) -> usize {
        self.qkv.bytes() + self.out.bytes() + self.up.bytes() + self.down.bytes()
    }
}
