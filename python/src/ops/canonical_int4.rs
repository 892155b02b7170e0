//! The canonical form of weights of 4-bit integers: made of a dense weight, packed, and of a packed one. The packed
//! form is a run of bytes.

use twofour::{
    Compressed, MatrixRef,
    int4::{Granularity, Int4},
    kernel::{SparseWeightInt4Ref, pack_int4, packed_bytes_int4},
};
use twofour_cuda::layer::borrowed::int4;

use super::*;
use crate::packed::int4::{from_tensors, to_tensors};

/// `quantize_int4` takes a matrix that is 2:4 along its rows, in the host's memory.
pub(super) const OPERATORS: &[Operator] = &[
    Operator::new(
        "quantize_int4(Tensor weight, int group_size) -> (Tensor values, Tensor meta, Tensor scales)",
        kernel!(quantize),
    )
    .shapes(|arguments| {
        let weight = arguments.tensor(0)?;
        let [rows, cols] = weight.matrix()?;
        int4_parts_shapes(arguments.granularity(1)?, rows, cols)
    }),
    Operator::new(
        "pack_int4(Tensor values, Tensor meta, Tensor scales, int cols, int group_size) -> Tensor",
        kernel!(pack_cpu),
    )
    .cuda(kernel!(pack_cuda))
    .shapes(|arguments| {
        let values = arguments.tensor(0)?;
        let [rows, _] = values.matrix()?;
        Ok(vec![int4_shape(arguments.granularity(4)?, values.on_gpu, rows, &arguments.size(3)?)?])
    }),
    Operator::new(
        "canonical_int4(Tensor packed, int rows, int cols, int group_size) -> (Tensor values, Tensor meta, Tensor \
         scales)",
        kernel!(canonical_cpu),
    )
    .cuda(kernel!(canonical_cuda))
    .shapes(|arguments| int4_parts_shapes(arguments.granularity(3)?, &arguments.size(1)?, &arguments.size(2)?)),
];

fn quantize(weight: Tensor, granularity: Granularity) -> Result<(Tensor, Tensor, Tensor)> {
    let dtype = weight.dtype()?;
    for_floats!(dtype, "the weight", quantized::<T>(&weight, granularity))
}

fn quantized<T: Float>(weight: &Tensor, granularity: Granularity) -> Result<(Tensor, Tensor, Tensor)> {
    let (rows, cols) = weight.matrix("the weight")?;
    let values = weight.elements::<T>("the weight", T::SCALAR)?;
    let matrix = MatrixRef::new(rows, cols, &values)?;
    let weight = on_pool(|| Int4::quantize(&Compressed::from_dense(matrix)?, granularity))?;
    to_tensors(&weight?)
}

fn pack_cpu(values: Tensor, meta: Tensor, scales: Tensor, cols: usize, granularity: Granularity) -> Result<Tensor> {
    let weight = from_tensors((&values, &meta, &scales), cols, granularity)?;
    let len = packed_bytes_int4(weight.weight().rows(), weight.weight().cols(), weight.granularity())?;
    let mut packed = Tensor::empty(&[len as i64], ScalarType::I8)?;
    let bytes = packed.bytes_mut()?;
    on_pool(|| pack_int4(&weight, bytes))??;
    Ok(packed)
}

/// Converts in the host's memory.
fn pack_cuda(values: Tensor, meta: Tensor, scales: Tensor, cols: usize, granularity: Granularity) -> Result<Tensor> {
    let packed = int4::encode(&from_tensors((&values, &meta, &scales), cols, granularity)?)?;
    let mut host = Tensor::empty(&[packed.len() as i64], ScalarType::I8)?;
    host.bytes_mut()?.copy_from_slice(&packed);
    host.copied_to(values.device(), "the packed weight")
}

fn canonical_cpu(
    packed: Tensor,
    rows: usize,
    cols: usize,
    granularity: Granularity,
) -> Result<(Tensor, Tensor, Tensor)> {
    expect_packed_int4(&packed, packed_bytes_int4(rows, cols, granularity)?, (rows, cols), &packed)?;
    let memory = Memory::of(&packed)?;
    to_tensors(&SparseWeightInt4Ref::with_granularity((rows, cols), granularity, &memory)?.to_int4()?)
}

/// Converts in the host's memory.
fn canonical_cuda(
    packed: Tensor,
    rows: usize,
    cols: usize,
    granularity: Granularity,
) -> Result<(Tensor, Tensor, Tensor)> {
    expect_packed_int4(&packed, int4::packed_len(rows, cols, granularity)?, (rows, cols), &packed)?;
    let (device, host) = (packed.device(), packed.copied_to(Device::HOST, "the packed weight")?);
    let weight = int4::decode(host.bytes("the packed weight")?, rows, cols, granularity)?;
    let (values, meta, scales) = to_tensors(&weight)?;
    Ok((
        values.copied_to(device, "the values")?,
        meta.copied_to(device, "the metadata")?,
        scales.copied_to(device, "the scales")?,
    ))
}
