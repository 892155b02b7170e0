//! The fused projection of tokens to heads, with rotary embedding, and back.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        float_types::{FLOAT_TYPES, expect_float_type, row_source},
        grid::{BLOCK, blocks_of_elements},
    },
    source::{File, Source},
};

/// The kernels for tensors of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct Heads {
    dtype: DataType,
    /// In vectors, and one by one.
    split: [Kernel; 2],
    merge: [Kernel; 2],
    rotate_forth: [Kernel; 2],
    rotate_back: [Kernel; 2],
}

/// What is done to heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeadsTask {
    /// `fused` to `q`, `k` and `v`, with a rotation where there are tables.
    Split,
    /// The way back, to `to_fused`.
    Merge,
    /// The queries and keys in `to_fused` are rotated.
    RotateForth,
    /// They are rotated back.
    RotateBack,
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[derive(Default)]
#[repr(C)]
pub(crate) struct HeadsParameters {
    pub(crate) fused: DevicePtr,
    pub(crate) to_fused: DevicePtr,
    pub(crate) q: DevicePtr,
    pub(crate) k: DevicePtr,
    pub(crate) v: DevicePtr,
    pub(crate) cos: DevicePtr,
    pub(crate) sin: DevicePtr,
    pub(crate) count: u64,
    pub(crate) positions: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) dim: u32,
}

fn source(dtype: DataType) -> Source {
    row_source("heads", dtype, [File::new("heads/kernel.cu", include_str!("kernel.cu"))])
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    FLOAT_TYPES.into_iter().map(source).collect()
}

impl Heads {
    /// Loads the kernels for tensors of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        expect_float_type("splitting into heads", dtype)?;
        let source = source(dtype);
        let kernels = |name: &str| -> Result<[Kernel; 2]> {
            Ok([device.kernel(&source, name)?, device.kernel(&source, &format!("{name}_one_by_one"))?])
        };
        Ok(Self {
            dtype,
            split: kernels("split")?,
            merge: kernels("merge")?,
            rotate_forth: kernels("rotate_forth")?,
            rotate_back: kernels("rotate_back")?,
        })
    }

    /// Launches a task. `count` is the number of pairs that it moves, at least one.
    ///
    /// # Safety
    /// The pointers are valid, with the lengths of the parameters' documentation, until the stream has passed this
    /// call; the stream is of this device.
    pub(crate) unsafe fn run(&self, stream: Stream, task: HeadsTask, mut parameters: HeadsParameters) -> Result<()> {
        let HeadsParameters { fused, to_fused, q, k, v, dim, count, .. } = parameters;
        let width = 16 / self.dtype.bytes() as u32;
        let aligned = (dim / 2).is_multiple_of(width) && (fused | to_fused | q | k | v).is_multiple_of(16);
        if aligned {
            parameters.count = count / u64::from(width);
        }
        let kernels = match task {
            HeadsTask::Split => &self.split,
            HeadsTask::Merge => &self.merge,
            HeadsTask::RotateForth => &self.rotate_forth,
            HeadsTask::RotateBack => &self.rotate_back,
        };
        let launch = Launch::simple((blocks_of_elements(parameters.count, 1)?, 1), BLOCK);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { kernels[usize::from(!aligned)].launch(stream, launch, &parameters) }
    }
}
