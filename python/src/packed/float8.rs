//! Weights of 8-bit floats. CPUs have no arithmetic of them: values are widened to f32 when a weight is packed, and the
//! packed tensor holds those bytes.

use twofour::{
    Arithmetic, Compressed, F8E4M3, F8E5M2,
    kernel::{SparseWeightMut, SparseWeightRef, packed_bytes},
};

use super::Stored;
use crate::{
    cpu::{Memory, on_pool, to_f32},
    torch::{Result, ScalarType, Tensor},
};

impl Stored for F8E4M3 {
    const STORED: ScalarType = ScalarType::E4m3;

    fn pack(weight: &Compressed<Self>) -> Result<Tensor> {
        packed_of(weight, Self::STORED)
    }

    fn unpack(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<Self>> {
        unpacked(packed, rows, cols)
    }
}

impl Stored for F8E5M2 {
    const STORED: ScalarType = ScalarType::E5m2;

    fn pack(weight: &Compressed<Self>) -> Result<Tensor> {
        packed_of(weight, Self::STORED)
    }

    fn unpack(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<Self>> {
        unpacked(packed, rows, cols)
    }
}

fn packed_of<T: Arithmetic>(weight: &Compressed<T>, dtype: ScalarType) -> Result<Tensor> {
    let (rows, cols) = (weight.rows(), weight.cols());
    let widened = Compressed::from_parts(rows, cols, to_f32(weight.values()), weight.meta().to_vec())?;
    let mut packed = Tensor::empty(&[packed_bytes::<f32>(rows, cols)? as i64], dtype)?;
    let memory = packed.bytes_mut()?;
    on_pool(|| SparseWeightMut::<f32>::new(rows, cols, memory)?.pack(&widened))??;
    Ok(packed)
}

fn unpacked<T: Arithmetic>(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<T>> {
    let memory = Memory::of(packed)?;
    let widened = SparseWeightRef::<f32>::new(rows, cols, &memory)?.to_compressed();
    let values = widened.values().iter().map(|v| T::from_f32(*v)).collect();
    Ok(Compressed::from_parts(rows, cols, values, widened.meta().to_vec())?)
}
