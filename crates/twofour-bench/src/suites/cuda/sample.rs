//! Reading a sample of a GEMM's results.

use std::{ops::Range, sync::Arc};

use anyhow::Result;
use cudarc::driver::{CudaSlice, CudaStream};
use half::{bf16, f16};
use twofour_cuda::DataType;

/// Returns the elements of a result in that range, as numbers.
pub(super) fn read(
    stream: &Arc<CudaStream>,
    out: &CudaSlice<u8>,
    elements: Range<usize>,
    output: DataType,
) -> Result<Vec<f64>> {
    let width = output.bytes();
    let bytes = stream.clone_dtoh(&out.slice(elements.start * width..elements.end * width))?;
    stream.synchronize()?;
    Ok(bytes.chunks_exact(width).map(|bytes| value(bytes, output)).collect())
}

fn value(bytes: &[u8], output: DataType) -> f64 {
    match output {
        DataType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        DataType::BF16 => bf16::from_le_bytes([bytes[0], bytes[1]]).to_f64(),
        DataType::I32 => f64::from(i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
        _ => f64::from(f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
    }
}
