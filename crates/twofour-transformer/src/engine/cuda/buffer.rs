//! Memory of the CUDA engine.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use half::{bf16, f16};
use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext};

use crate::{
    Error, Result,
    engine::{Buffer, Kind},
};

/// Device memory.
#[derive(Debug)]
pub struct CudaBuffer {
    kind: Kind,
    memory: DeviceBuffer,
}

impl CudaBuffer {
    pub(super) fn zeros(context: &LayerContext, kind: Kind, dtype: DataType, len: usize) -> Result<Self> {
        Ok(CudaBuffer { kind, memory: DeviceBuffer::zeros(context, dtype, len)? })
    }

    /// The elements, for calls of [`twofour_cuda`] that read them.
    pub fn slice(&self) -> DeviceSlice<'_> {
        self.memory.as_slice()
    }

    /// The elements, for calls that write them.
    pub fn slice_mut(&mut self) -> DeviceSliceMut<'_> {
        self.memory.as_slice_mut()
    }

    pub(super) fn write(&mut self, values: &[f32]) -> Result<()> {
        match self.memory.dtype() {
            DataType::F32 => Ok(self.memory.write(values)?),
            DataType::BF16 => Ok(self.memory.write(&values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>())?),
            DataType::F16 => Ok(self.memory.write(&values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>())?),
            _ => Err(self.no_floats()),
        }
    }

    pub(super) fn write_ids(&mut self, ids: &[u32]) -> Result<()> {
        Ok(self.memory.enqueue_ids(ids)?)
    }

    pub(super) fn read(&self) -> Result<Vec<f32>> {
        match self.memory.dtype() {
            DataType::F32 => Ok(self.memory.to_host::<f32>()?),
            DataType::BF16 => Ok(self.memory.to_host::<bf16>()?.into_iter().map(bf16::to_f32).collect()),
            DataType::F16 => Ok(self.memory.to_host::<f16>()?.into_iter().map(f16::to_f32).collect()),
            _ => Err(self.no_floats()),
        }
    }

    fn no_floats(&self) -> Error {
        Error::Kind { what: "a buffer of numbers", expected: Kind::Compute, found: self.kind }
    }
}

impl Buffer for CudaBuffer {
    fn len(&self) -> usize {
        self.memory.len()
    }

    fn kind(&self) -> Kind {
        self.kind
    }
}

/// Buffers that operations use from call to call.
#[derive(Debug, Default)]
pub(super) struct Pool(Mutex<HashMap<(DataType, usize), Vec<DeviceBuffer>>>);

impl Pool {
    /// A buffer of unspecified content; a new one is of zeros.
    pub(super) fn take(&self, context: &LayerContext, dtype: DataType, len: usize) -> Result<DeviceBuffer> {
        let free = self.0.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&(dtype, len)).and_then(Vec::pop);
        free.map_or_else(|| Ok(DeviceBuffer::zeros(context, dtype, len)?), Ok)
    }

    /// Takes a buffer back. Work that was launched on it before runs before work that is launched later: all is on one
    /// stream.
    pub(super) fn give(&self, buffer: DeviceBuffer) {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        free.entry((buffer.dtype(), buffer.len())).or_default().push(buffer);
    }
}
