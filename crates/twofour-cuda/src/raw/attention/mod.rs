//! Attention and its gradients in f16 and bf16 without scores in memory, by `wgmma` on Hopper and by `mma.sync` from Ampere on.

mod hopper;
mod products;
mod tiles;

use hopper::HopperAttention;
use tiles::{Instruction, TileAttention};

use crate::{DataType, Device, DevicePtr, Error, Result, Stream, device::Launch, source::Source};

/// Data types of the kernels.
const TYPES: [DataType; 2] = [DataType::F16, DataType::BF16];

/// Elements of a head that there are kernels for.
const DIMS: [u32; 3] = [32, 64, 128];

/// Shared memory that is lost to alignment.
const ALIGNMENT: u32 = 1024;

/// Whether Hopper's own kernels are selected. On an H200 their gradients of two shapes were wrong (docs/kernels/cuda-attention.md), so that they are not.
const SELECTS_HOPPER: bool = false;

/// The kernels of a pass.
#[derive(Debug, Clone)]
enum Kernels {
    /// Threads copy tiles.
    Tiles(TileAttention),
    /// TMA copies tiles, and products overlap with softmax.
    Hopper(HopperAttention),
}

impl Kernels {
    /// Loads the fastest kernels of an architecture.
    fn new(device: &Device, dtype: DataType, dim: u32) -> Result<Self> {
        match device.architecture().capability() {
            (9, 0) if SELECTS_HOPPER => HopperAttention::new(device, dtype, dim).map(Kernels::Hopper),
            (9, 0) => TileAttention::new(device, Instruction::Warpgroup, dtype, dim).map(Kernels::Tiles),
            _ => TileAttention::new(device, Instruction::Warp, dtype, dim).map(Kernels::Tiles),
        }
    }
}

/// The kernels for one data type and size of heads, on one device.
#[derive(Debug, Clone)]
pub(crate) struct FusedAttention(Kernels);

/// The elements between two heads, two sequences and two positions of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct HeadStrides {
    pub(crate) head: u64,
    pub(crate) sequence: u64,
    pub(crate) row: u32,
}

/// A call's operands, in the memory layout of the parameters of `kernel.cu`, which says what each is.
#[derive(Default)]
#[repr(C)]
pub(crate) struct FusedAttentionParameters {
    pub(crate) q: DevicePtr,
    pub(crate) k: DevicePtr,
    pub(crate) v: DevicePtr,
    pub(crate) out: DevicePtr,
    pub(crate) dout: DevicePtr,
    pub(crate) lse: DevicePtr,
    pub(crate) delta: DevicePtr,
    pub(crate) to_out: DevicePtr,
    pub(crate) dq: DevicePtr,
    pub(crate) dk: DevicePtr,
    pub(crate) dv: DevicePtr,
    pub(crate) to_lse: DevicePtr,
    /// Workspace of the backward pass: [`backward_workspace`] bytes.
    pub(crate) to_delta: DevicePtr,
    pub(crate) queries: HeadStrides,
    pub(crate) keys: HeadStrides,
    pub(crate) results: HeadStrides,
    pub(crate) batch: u32,
    pub(crate) positions: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) causal: u32,
    pub(crate) scale: f32,
}

/// Returns the bytes of workspace of the backward pass for so many heads of queries, counted in all sequences. `None` where they are too many.
pub(crate) fn backward_workspace(heads: usize, positions: usize) -> Option<usize> {
    // Two numbers for each query of the last warpgroup too.
    positions.checked_next_multiple_of(hopper::GROUP_ROWS as usize)?.checked_mul(heads)?.checked_mul(8)
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    tiles::sources().chain(hopper::sources()).collect()
}

/// CTAs of (rows, threads) for all positions of all heads.
fn launch(
    parameters: &FusedAttentionParameters,
    heads: u32,
    (rows, threads): (u32, u32),
    shared: u32,
) -> Result<Launch> {
    let FusedAttentionParameters { batch, positions, .. } = *parameters;
    let (all, tiles) = (u64::from(batch) * u64::from(heads), u64::from(positions.div_ceil(rows)));
    let blocks = all.checked_mul(tiles).filter(|blocks| *blocks <= i32::MAX as u64);
    let blocks = blocks.ok_or(Error::TooLarge { rows: all as usize, cols: positions as usize })?;
    Ok(Launch { grid: (blocks as u32, 1), block: threads, shared, cluster: 1 })
}

impl FusedAttention {
    /// Returns whether there are kernels for heads of this type and size.
    pub(crate) fn computes(dtype: DataType, dim: usize) -> bool {
        TYPES.contains(&dtype) && DIMS.iter().any(|size| *size as usize == dim)
    }

    /// Loads the kernels.
    pub(crate) fn new(device: &Device, dtype: DataType, dim: usize) -> Result<Self> {
        if !Self::computes(dtype, dim) {
            let (operation, supported) = ("attention in one kernel", "f16 and bf16, with a head_dim of 32, 64 or 128");
            return Err(Error::DataType { operation, dtype, supported });
        }
        Kernels::new(device, dtype, dim as u32).map(Self)
    }

    /// Launches attention, for at least one query.
    ///
    /// # Safety
    /// The pointers are valid, with the lengths and strides of the parameters' documentation, until the stream has passed this call, and aligned to 16 bytes; strides
    /// are multiples of 16 bytes; the stream is of this device.
    pub(crate) unsafe fn forward(&self, stream: Stream, parameters: &FusedAttentionParameters) -> Result<()> {
        // SAFETY: the pointers are valid, as this function requires.
        unsafe {
            match &self.0 {
                Kernels::Tiles(kernels) => kernels.forward(stream, parameters),
                Kernels::Hopper(kernels) => kernels.forward(stream, parameters),
            }
        }
    }

    /// Launches the gradients, for at least one query.
    ///
    /// # Safety
    /// That of [`FusedAttention::forward`].
    pub(crate) unsafe fn backward(&self, stream: Stream, parameters: &FusedAttentionParameters) -> Result<()> {
        // SAFETY: the pointers are valid, as this function requires.
        unsafe {
            match &self.0 {
                Kernels::Tiles(kernels) => kernels.backward(stream, parameters),
                Kernels::Hopper(kernels) => kernels.backward(stream, parameters),
            }
        }
    }
}
