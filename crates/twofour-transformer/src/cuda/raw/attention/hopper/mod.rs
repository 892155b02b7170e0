//! Attention on sm_90a: TMA copies tiles, and products overlap with softmax.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        gemm::tensor_map::{Swizzle, TensorMap},
        headers,
    },
    source::{File, Source, Support},
};

use super::{
    ALIGNMENT, FusedAttentionParameters, HeadStrides, TYPES, launch, products,
    tiles::{SOFTMAX, TILES},
};

/// Elements of a head that the kernels are made for. Heads of 32 are as fast without TMA.
pub(super) const DIMS: [u32; 2] = [64, 128];

/// Rows of a warpgroup, and positions of a TMA copy.
pub(super) const GROUP_ROWS: u32 = 64;

/// Keys of a tile of the forward pass, and of the last tile's product where it has no more.
const FORWARD_KEYS: [u32; 2] = [128, 32];

/// Stages of keys, and of values, in the forward pass.
const FORWARD_STAGES: u32 = 3;

/// Columns of a tile of the backward pass, and of the last tile's products where it has no more.
const COLUMNS: [u32; 2] = [64, 16];

/// Stages of the backward pass, and bytes of a stage for log-sum-exps and deltas.
const BACKWARD_STAGES: u32 = 4;
const SUMS_BYTES: u32 = 1024;

/// Bytes of L2 that the streamed tensors of concurrent CTAs may fill: well below half of it, because both halves of the
/// L2 can have a copy.
const L2_BYTES: u64 = 8 << 20;

/// Warpgroups of a CTA of each kernel: as many as have registers for their tiles.
#[derive(Debug, Clone, Copy)]
struct Groups {
    forward: u32,
    queries: u32,
    keys: u32,
}

impl Groups {
    fn of(dim: u32) -> Self {
        match dim {
            128 => Self { forward: 2, queries: 2, keys: 2 },
            _ => Self { forward: 3, queries: 3, keys: 2 },
        }
    }
}

/// The kernels for one data type and size of heads, on one device.
#[derive(Debug, Clone)]
pub(super) struct HopperAttention {
    dim: u32,
    groups: Groups,
    forward: Kernel,
    backward_queries: Kernel,
    backward_keys: Kernel,
}

/// The kernels' parameters, in their memory layout; `pipeline.cuh` says what each is.
#[repr(C)]
struct Parameters {
    q: TensorMap,
    k: TensorMap,
    v: TensorMap,
    dout: TensorMap,
    out: DevicePtr,
    lse: DevicePtr,
    to_out: DevicePtr,
    dq: DevicePtr,
    dk: DevicePtr,
    dv: DevicePtr,
    to_lse: DevicePtr,
    padded_lse: DevicePtr,
    padded_delta: DevicePtr,
    queries: HeadStrides,
    keys: HeadStrides,
    results: HeadStrides,
    batch: u32,
    positions: u32,
    heads: u32,
    kv_heads: u32,
    padded: u32,
    together: u32,
    causal: u32,
    scale: f32,
}

fn source(dtype: DataType, dim: u32) -> Source {
    let file = File::new;
    let Groups { forward, queries, keys } = Groups::of(dim);
    let definitions = format!(
        "#define ELEMENT {}\n#define DIM {dim}\n#define FORWARD_GROUPS {forward}\n#define QUERIES_GROUPS \
         {queries}\n#define KEYS_GROUPS {keys}\n",
        dtype.definition(),
    );
    Source::new(format!("attention-hopper-{dtype}-{dim}"), Support::WGMMA)
        .define(definitions)
        .with([headers::COMMON, headers::DENSE_PRODUCT, headers::HOPPER])
        .with([products::products(dtype, &[FORWARD_KEYS[0], FORWARD_KEYS[1], COLUMNS[0], COLUMNS[1], dim]), TILES])
        .with([
            SOFTMAX,
            file("attention/hopper/pipeline.cuh", include_str!("pipeline.cuh")),
            file("attention/hopper/products.cuh", include_str!("products.cuh")),
            file("attention/hopper/forward.cuh", include_str!("forward.cuh")),
            file("attention/hopper/backward.cuh", include_str!("backward.cuh")),
            file("attention/hopper/kernel.cu", include_str!("kernel.cu")),
        ])
        .with_fma()
}

/// Returns every source.
pub(super) fn sources() -> impl Iterator<Item = Source> {
    TYPES.into_iter().flat_map(|dtype| DIMS.into_iter().map(move |dim| source(dtype, dim)))
}

impl HopperAttention {
    /// Loads the kernels.
    pub(super) fn new(device: &Device, dtype: DataType, dim: u32) -> Result<Self> {
        let source = source(dtype, dim);
        let kernels = Self {
            dim,
            groups: Groups::of(dim),
            forward: device.kernel(&source, "forward")?,
            backward_queries: device.kernel(&source, "backward_queries")?,
            backward_keys: device.kernel(&source, "backward_keys")?,
        };
        kernels.forward.allow_shared()?;
        kernels.backward_queries.allow_shared()?;
        kernels.backward_keys.allow_shared()?;
        Ok(kernels)
    }

    /// Bytes of shared memory: queries, and stages of keys and of values.
    fn forward_bytes(&self) -> u32 {
        ALIGNMENT + (self.groups.forward * GROUP_ROWS + 2 * FORWARD_STAGES * FORWARD_KEYS[0]) * self.dim * 2
    }

    /// Bytes of shared memory: two tiles of rows, and stages of two tiles of columns and of `sums` bytes.
    fn backward_bytes(&self, groups: u32, sums: u32) -> u32 {
        ALIGNMENT + 2 * groups * GROUP_ROWS * self.dim * 2 + BACKWARD_STAGES * (2 * COLUMNS[0] * self.dim * 2 + sums)
    }

    fn launch(&self, call: &FusedAttentionParameters, heads: u32, groups: u32, shared: u32) -> Result<Launch> {
        launch(call, heads, (groups * GROUP_ROWS, groups * 128), shared)
    }

    fn parameters(&self, call: &FusedAttentionParameters) -> Result<Parameters> {
        let FusedAttentionParameters { batch, positions, heads, kv_heads, .. } = *call;
        let map = |data: DevicePtr, heads: u32, strides: HeadStrides| {
            if data == 0 {
                return Ok(TensorMap::NONE);
            }
            let sizes = [self.dim, positions, heads, batch].map(u64::from);
            let steps = [u64::from(strides.row), strides.head, strides.sequence].map(|elements| 2 * elements);
            TensorMap::of_heads(data, sizes, steps, [64, GROUP_ROWS, 1, 1], Swizzle::Bytes128)
        };
        let padded = positions.next_multiple_of(GROUP_ROWS);
        let of_head = 4 * u64::from(positions) * u64::from(self.dim);
        Ok(Parameters {
            q: map(call.q, heads, call.queries)?,
            k: map(call.k, kv_heads, call.keys)?,
            v: map(call.v, kv_heads, call.keys)?,
            dout: map(call.dout, heads, call.results)?,
            out: call.out,
            lse: call.lse,
            to_out: call.to_out,
            dq: call.dq,
            dk: call.dk,
            dv: call.dv,
            to_lse: call.to_lse,
            padded_lse: call.to_delta,
            padded_delta: call.to_delta + 4 * u64::from(batch) * u64::from(heads) * u64::from(padded),
            queries: call.queries,
            keys: call.keys,
            results: call.results,
            batch,
            positions,
            heads,
            kv_heads,
            padded,
            together: (L2_BYTES / of_head).clamp(1, u64::from(u32::MAX)) as u32,
            causal: call.causal,
            scale: call.scale,
        })
    }

    /// Launches attention.
    ///
    /// # Safety
    /// That of [`FusedAttention::forward`](super::FusedAttention::forward).
    pub(super) unsafe fn forward(&self, stream: Stream, call: &FusedAttentionParameters) -> Result<()> {
        let launch = self.launch(call, call.heads, self.groups.forward, self.forward_bytes())?;
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.forward.launch(stream, launch, &self.parameters(call)?) }
    }

    /// Launches the gradients. The gradients of queries come first, because that kernel writes what the other reads.
    ///
    /// # Safety
    /// That of [`FusedAttention::forward`](super::FusedAttention::forward).
    pub(super) unsafe fn backward(&self, stream: Stream, call: &FusedAttentionParameters) -> Result<()> {
        let Groups { queries, keys, .. } = self.groups;
        let by_queries = self.launch(call, call.heads, queries, self.backward_bytes(queries, 0))?;
        let by_keys = self.launch(call, call.kv_heads, keys, self.backward_bytes(keys, SUMS_BYTES))?;
        let parameters = self.parameters(call)?;
        // SAFETY: the structure has the kernels' layout, and its pointers are valid, as this function requires.
        unsafe {
            self.backward_queries.launch(stream, by_queries, &parameters)?;
            self.backward_keys.launch(stream, by_keys, &parameters)
        }
    }
}
