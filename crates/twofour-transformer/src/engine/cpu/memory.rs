//! Memory of the CPU.

use twofour::DataType;

use super::{CpuBuffer, CpuEngine, buffer::expect_length};
use crate::{
    Result,
    engine::{Buffer as _, Kind, Memory},
};

impl Memory for CpuEngine {
    type Buffer = CpuBuffer;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn compute_type(&self) -> DataType {
        DataType::F32
    }

    fn zeros(&self, kind: Kind, len: usize) -> Result<CpuBuffer> {
        Ok(CpuBuffer::zeros(kind, len))
    }

    fn clear(&self, buffer: &mut CpuBuffer) -> Result<()> {
        buffer.floats_mut()?.fill(0.0);
        Ok(())
    }

    fn write(&self, buffer: &mut CpuBuffer, values: &[f32]) -> Result<()> {
        expect_length("values to write", buffer.len(), values.len())?;
        buffer.floats_mut()?.copy_from_slice(values);
        Ok(())
    }

    fn write_ids(&self, buffer: &mut CpuBuffer, ids: &[u32]) -> Result<()> {
        expect_length("tokens to write", buffer.len(), ids.len())?;
        buffer.ids_mut()?.copy_from_slice(ids);
        Ok(())
    }

    fn read(&self, buffer: &CpuBuffer) -> Result<Vec<f32>> {
        Ok(buffer.floats()?.to_vec())
    }

    fn round(&self, from: &CpuBuffer, to: &mut CpuBuffer) -> Result<()> {
        self.write(to, from.floats()?)
    }
}
