//! Where an encoder computes, and in what type.

use anyhow::{Result, bail};
use twofour::DataType;
use twofour_cli::{device::ComputeDevice, exit::Usage, measure};
use twofour_cuda::Device;

use super::measured::Measured;

/// A device and the type that it computes in.
pub(super) struct Place {
    /// The GPU; none for the CPU.
    pub(super) gpu: Option<Device>,
    /// f32, bf16 or f16 on a CPU, bf16 or f16 on a GPU.
    pub(super) dtype: DataType,
}

impl Place {
    /// Returns the place that the options name. Without `chosen` the type is that of the stored weights, on a GPU bf16
    /// in place of f32.
    ///
    /// # Errors
    /// [`Usage`] for several GPUs and for a type that the device does not compute in, and those of opening a GPU.
    pub(super) fn new(device: &ComputeDevice, chosen: Option<DataType>, stored: DataType) -> Result<Self> {
        let dtype = chosen.unwrap_or(stored);
        if !matches!(dtype, DataType::F32 | DataType::BF16 | DataType::F16) {
            bail!(Usage(format!("--dtype {dtype}: f32, bf16 and f16 are supported")));
        }
        let ComputeDevice::Cuda(numbers) = device else { return Ok(Place { gpu: None, dtype }) };
        let [number] = numbers[..] else {
            bail!(Usage("latency is measured on one device; name one GPU, as in --device cuda:0".to_owned()))
        };
        // 2:4 layers on a GPU are 16-bit.
        let dtype = if dtype == DataType::F32 && chosen.is_none() { DataType::BF16 } else { dtype };
        if dtype == DataType::F32 {
            bail!(Usage("--dtype f32: 2:4 layers on a GPU require bf16 or f16".to_owned()));
        }
        Ok(Place { gpu: Some(Device::open(number)?), dtype })
    }

    /// Returns what the place is, as the answer names it.
    pub(super) fn measured(&self) -> Result<Measured> {
        Ok(match &self.gpu {
            Some(device) => Measured::Gpu(measure::gpu(device)?),
            None => Measured::Cpu(measure::machine()?),
        })
    }
}
