//! The dense weight, in float32, of a packed one of 4-bit integers: integers times scales.

use twofour::{
    int4::{Granularity, Int4},
    kernel::{SparseWeightInt4Ref, packed_bytes_int4},
};
use twofour_cuda::layer::borrowed::int4;

use super::*;

pub(super) const OPERATORS: &[Operator] =
    &[Operator::new("dequantize_int4(Tensor packed, int rows, int cols, int group_size) -> Tensor", kernel!(cpu))
        .cuda(kernel!(cuda))
        .shapes(|arguments| Ok(vec![Shape::new([arguments.size(1)?, arguments.size(2)?]).of(ScalarType::F32)]))];

fn cpu(packed: Tensor, rows: usize, cols: usize, granularity: Granularity) -> Result<Tensor> {
    expect_packed_int4(&packed, packed_bytes_int4(rows, cols, granularity)?, (rows, cols), &packed)?;
    let memory = Memory::of(&packed)?;
    dense(&SparseWeightInt4Ref::with_granularity((rows, cols), granularity, &memory)?.to_int4()?)
}

/// Converts in the host's memory.
fn cuda(packed: Tensor, rows: usize, cols: usize, granularity: Granularity) -> Result<Tensor> {
    expect_packed_int4(&packed, int4::packed_len(rows, cols, granularity)?, (rows, cols), &packed)?;
    let host = packed.copied_to(Device::HOST, "the packed weight")?;
    let weight = int4::decode(host.bytes("the packed weight")?, rows, cols, granularity)?;
    dense(&weight)?.copied_to(packed.device(), "the dense weight")
}

fn dense(weight: &Int4) -> Result<Tensor> {
    let (rows, cols) = (weight.weight().rows(), weight.weight().cols());
    let mut out = Tensor::empty(&[rows as i64, cols as i64], ScalarType::F32)?;
    let dequantized = on_pool(|| weight.dequantize().to_dense())?;
    out.elements_mut::<f32>()?.copy_from_slice(&dequantized);
    Ok(out)
}
