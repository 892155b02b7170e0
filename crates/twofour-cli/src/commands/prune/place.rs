//! Where a calibrated method runs the model and solves.

use anyhow::Result;
use clap::Args;
use twofour_cuda::{Device, solve::GpuBackend};

use crate::{device::ComputeDevice, exit::Usage, memory};

/// The device of calibration.
#[derive(Debug, Clone, Args)]
pub(super) struct PlaceOptions {
    /// Where the model runs on the calibration's text and weights are pruned and tuned: cpu, cuda, or cuda:NUMBER
    ///
    /// On a GPU the model computes in f32, block by block, and so do --method alps, --compensate, --refit and tuning.
    /// Other methods, --swaps and --quantize choose on the CPU, by what the GPU gathered. Sums are rounded otherwise
    /// than on the CPU, so masks may differ where elements are nearly equal. What --calibration self writes and what
    /// --eval measures is computed on the CPU.
    #[arg(long, value_name = "DEVICE", requires = "calibration", default_value = "cpu")]
    device: ComputeDevice,
}

/// A device that was opened.
#[derive(Debug)]
pub(super) enum Place {
    Cpu,
    Gpu(Device, Box<GpuBackend>),
}

impl PlaceOptions {
    /// Opens the device.
    ///
    /// # Errors
    /// [`Usage`] for several GPUs; a device that cannot be used.
    pub(super) fn open(&self) -> Result<Place> {
        match &self.device {
            ComputeDevice::Cpu => Ok(Place::Cpu),
            ComputeDevice::Cuda(numbers) => match numbers.as_slice() {
                [number] => {
                    let device = Device::open(*number)?;
                    let backend = GpuBackend::new(&device)?;
                    Ok(Place::Gpu(device, Box::new(backend)))
                }
                _ => Err(Usage(format!("prune computes on one GPU, not on {}", self.device)).into()),
            },
        }
    }

    /// Its name.
    pub(super) fn name(&self) -> String {
        self.device.to_string()
    }
}

impl Place {
    /// Bytes that inputs may take which would otherwise be computed once more: a quarter of the memory.
    pub(super) fn room(&self) -> Result<u64> {
        match self {
            Place::Cpu => Ok(memory::limit().unwrap_or(0) / 4),
            Place::Gpu(device, _) => Ok(device.free_memory()? as u64 / 4),
        }
    }
}
