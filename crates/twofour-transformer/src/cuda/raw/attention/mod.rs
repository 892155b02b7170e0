//! Attention and its gradients in f16 and bf16 without scores in memory, by `wgmma` on Hopper and by `mma.sync` from
//! Ampere on.

mod hopper;
mod products;
mod tiles;

use hopper::HopperAttention;
use tiles::{Instruction, TileAttention};
use twofour_cuda::{DataType, Device, DevicePtr, Error, Result, Stream, device::Launch, source::Source};

/// Data types of the kernels.
const TYPES: [DataType; 2] = [DataType::F16, DataType::BF16];

/// Elements of a head that there are kernels for.
const DIMS: [u32; 3] = [32, 64, 128];

/// Shared memory that is lost to alignment.
const ALIGNMENT: u32 = 1024;

/// The kernels for one data type and size of heads, on one device.
#[derive(Debug, Clone)]
pub(crate) struct FusedAttention {
    /// Threads copy tiles.
    tiles: TileAttention,
    /// TMA copies tiles, and products overlap with softmax. Where there are such kernels: none with options.
    hopper: Option<HopperAttention>,
    dim: u32,
}

/// Returns whether a call takes Hopper's own kernels, where there are some: whether they were measured to be faster
/// (docs/explanation/kernels/cuda-attention.md). Both passes take the same family.
fn is_faster_by_tma(dim: u32, positions: u32, is_causal: bool) -> bool {
    let least = match (dim, is_causal) {
        (..=64, true) => 257,
        (..=64, false) => 97,
        _ => 0,
    };
    positions >= least
}

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
    pub(crate) window: u32,
    pub(crate) soft_cap: f32,
}

/// Returns the bytes of workspace of the backward pass for so many heads of queries, counted in all sequences. `None`
/// where they are too many.
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

    /// Loads the kernels, those with windows and soft caps or those without.
    pub(crate) fn new(device: &Device, dtype: DataType, dim: usize, options: bool) -> Result<Self> {
        if !Self::computes(dtype, dim) {
            let (operation, supported) = ("attention in one kernel", "f16 and bf16, with a head_dim of 32, 64 or 128");
            return Err(Error::DataType { operation, dtype, supported });
        }
        let dim = dim as u32;
        let is_hopper = device.architecture().features().wgmma;
        let instruction = if is_hopper { Instruction::Warpgroup } else { Instruction::Warp };
        let tiles = TileAttention::new(device, instruction, dtype, (dim, options))?;
        let has_hopper = is_hopper && !options && hopper::DIMS.contains(&dim);
        let hopper = has_hopper.then(|| HopperAttention::new(device, dtype, dim)).transpose()?;
        Ok(Self { tiles, hopper, dim })
    }

    /// Returns Hopper's own kernels, if the call takes them.
    fn hopper(&self, call: &FusedAttentionParameters) -> Option<&HopperAttention> {
        self.hopper.as_ref().filter(|_| is_faster_by_tma(self.dim, call.positions, call.causal != 0))
    }

    /// Launches attention, for at least one query.
    ///
    /// # Safety
    /// The pointers are valid, with the lengths and strides of the parameters' documentation, until the stream has
    /// passed this call, and aligned to 16 bytes; strides are multiples of 16 bytes; the stream is of this device.
    pub(crate) unsafe fn forward(&self, stream: Stream, parameters: &FusedAttentionParameters) -> Result<()> {
        // SAFETY: the pointers are valid, as this function requires.
        unsafe {
            match self.hopper(parameters) {
                Some(kernels) => kernels.forward(stream, parameters),
                None => self.tiles.forward(stream, parameters),
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
            match self.hopper(parameters) {
                Some(kernels) => kernels.backward(stream, parameters),
                None => self.tiles.backward(stream, parameters),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_faster_by_tma;

    #[test]
    fn calls_take_the_kernels_that_were_measured_to_be_faster() {
        // dim, positions, causal; whether Hopper's own kernels took less for both passes. Heads of 128 were not
        // measured below 256 positions.
        let cases = [
            (64, 64, false, false),
            (64, 128, false, true),
            (64, 257, false, true),
            (64, 577, false, true),
            (64, 1626, false, true),
            (64, 128, true, false),
            (64, 256, true, false),
            (64, 384, true, true),
            (64, 512, true, true),
            (64, 1024, true, true),
            (128, 17, false, true),
            (128, 256, true, true),
            (128, 512, true, true),
            (128, 4096, true, true),
        ];
        for (dim, positions, is_causal, expected) in cases {
            assert_eq!(is_faster_by_tma(dim, positions, is_causal), expected, "{dim}, {positions}, {is_causal}");
        }
    }
}
