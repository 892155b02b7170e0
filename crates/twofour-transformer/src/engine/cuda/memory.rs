//! Memory of a GPU.

use twofour::DataType;

use super::{CudaBuffer, CudaEngine};
use crate::{
    Result, cuda as kernels,
    engine::{Kind, Memory},
};

impl Memory for CudaEngine {
    type Buffer = CudaBuffer;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn compute_type(&self) -> DataType {
        self.compute
    }

    fn zeros(&self, kind: Kind, len: usize) -> Result<CudaBuffer> {
        CudaBuffer::zeros(&self.context, kind, self.dtype(kind), len)
    }

    fn clear(&self, buffer: &mut CudaBuffer) -> Result<()> {
        Ok(kernels::fill(&self.context, 0.0, buffer.slice_mut())?)
    }

    fn write(&self, buffer: &mut CudaBuffer, values: &[f32]) -> Result<()> {
        buffer.write(values)
    }

    fn write_ids(&self, buffer: &mut CudaBuffer, ids: &[u32]) -> Result<()> {
        buffer.write_ids(ids)
    }

    fn read(&self, buffer: &CudaBuffer) -> Result<Vec<f32>> {
        buffer.read()
    }

    fn round(&self, from: &CudaBuffer, to: &mut CudaBuffer) -> Result<()> {
        Ok(kernels::convert(&self.context, from.slice(), to.slice_mut())?)
    }
}
