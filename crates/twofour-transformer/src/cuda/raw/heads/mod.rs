//! The fused projection of tokens to heads, with rotary embedding, and back.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream, device::Kernel, raw::float_types::FloatSource, source::File,
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

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "heads",
    operation: "splitting into heads",
    contracts_fma: true,
    files: &[File::new("heads/kernel.cu", include_str!("kernel.cu"))],
};

impl Heads {
    /// Loads the kernels for tensors of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let kernels =
            |name: &str| -> Result<[Kernel; 2]> { Ok([kernel(name)?, kernel(&format!("{name}_one_by_one"))?]) };
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
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
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
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { kernels[usize::from(!aligned)].launch_over(stream, (parameters.count, 1), &parameters) }
    }
}
