//! Cross-entropy, alone or with a teacher's divergence, and its gradient in place of the logits.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{float_types::FloatSource, grid::threads_of_row},
    source::File,
};

/// The kernels for logits of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct CrossEntropy {
    dtype: DataType,
    rows: Kernel,
    student: Kernel,
    sum_losses: Kernel,
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[repr(C)]
pub(crate) struct CrossEntropyParameters {
    pub(crate) logits: DevicePtr,
    pub(crate) teacher: DevicePtr,
    pub(crate) targets: DevicePtr,
    pub(crate) device_factor: DevicePtr,
    pub(crate) losses: DevicePtr,
    pub(crate) loss: DevicePtr,
    pub(crate) status: DevicePtr,
    pub(crate) rows: u32,
    pub(crate) classes: u32,
    pub(crate) factor: f32,
    pub(crate) divergence: f32,
    pub(crate) cross_entropy: f32,
    pub(crate) writes_gradient: u32,
    pub(crate) adds_loss: u32,
}

/// The sum of the losses of rows, by one CTA of 1024 threads.
pub(crate) const SUM: File = File::new("cross_entropy/sum.cuh", include_str!("sum.cuh"));

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "cross-entropy",
    operation: "cross-entropy",
    contracts_fma: true,
    files: &[SUM, File::new("cross_entropy/kernel.cu", include_str!("kernel.cu"))],
};

impl CrossEntropy {
    /// Loads the kernels for logits of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        Ok(Self { dtype, rows: kernel("rows")?, student: kernel("student")?, sum_losses: kernel("sum_losses")? })
    }

    /// Launches the rows' losses and gradients, those of a student where there is a teacher, and the sum of the losses.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn run(&self, stream: Stream, parameters: &CrossEntropyParameters) -> Result<()> {
        if parameters.rows > 0 {
            let rows = if parameters.teacher == 0 { &self.rows } else { &self.student };
            let threads = threads_of_row(parameters.classes as usize * self.dtype.bytes(), 1024);
            let launch = Launch::simple((parameters.rows, 1), threads);
            // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
            unsafe { rows.launch(stream, launch, parameters) }?;
        }
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.sum_losses.launch(stream, Launch::simple((1, 1), 1024), parameters) }
    }
}
