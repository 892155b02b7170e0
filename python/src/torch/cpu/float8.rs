//! Weights of 8-bit floats. CPUs have no arithmetic of them: values are widened to f32 when a weight is packed, and the packed tensor holds those bytes.

use twofour::{
    Arithmetic, Compressed, F8E4M3, F8E5M2,
    kernel::{Epilogue, SparseWeightMut, SparseWeightRef, packed_bytes},
};

use super::{
    Failure, Result, ScalarType, Stored, Tensor,
    linear::{Memory, widened},
    on_pool, on_torch_threads,
};
use crate::torch::{
    numbers,
    shape::{dimension, expect_float8, expect_packed, rows_and_last, with_last},
    tensor::Device,
};
use half::{bf16, f16};

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
    let values = weight.values().iter().map(|v| v.to_f32()).collect();
    let wide = Compressed::from_parts(rows, cols, values, weight.meta().to_vec())?;
    let mut packed = Tensor::empty(&[packed_bytes::<f32>(rows, cols)? as i64], dtype)?;
    let memory = packed.bytes_mut()?;
    on_pool(|| SparseWeightMut::<f32>::new(rows, cols, memory)?.pack(&wide))??;
    Ok(packed)
}

fn unpacked<T: Arithmetic>(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<T>> {
    let memory = Memory::of(packed.bytes("the packed weight")?);
    let wide = SparseWeightRef::<f32>::new(rows, cols, &memory)?.to_compressed();
    let values = wide.values().iter().map(|v| T::from_f32(*v)).collect();
    Ok(Compressed::from_parts(rows, cols, values, wide.meta().to_vec())?)
}

/// `y = x · Wᵀ · scales + bias` for 8-bit floats, summed in f32; `y` is of torch's type number `dtype`. `scales` has a number for each feature,
/// `token_scales` for each token or none, `bias` for each feature or none.
#[allow(clippy::too_many_arguments)]
pub(super) fn linear_float8(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    token_scales: Tensor,
    bias: Tensor,
    out_features: i64,
    dtype: i64,
) -> Result<Tensor> {
    let rows = dimension("out_features", out_features)?;
    let (tokens, cols) = rows_and_last(&x, "the input")?;
    let dtype = numbers::packed_type(dtype, x.dtype()?)?;
    expect_float8(&x, &packed)?;
    expect_packed(&packed, packed_bytes::<f32>(rows, cols)?, packed.dtype()?, (rows, cols), &x)?;
    let memory = Memory::of(packed.bytes("the packed weight")?);
    let weight = SparseWeightRef::<f32>::new(rows, cols, &memory)?;
    let values = match x.dtype()? {
        ScalarType::E4m3 => wide(&x.elements::<F8E4M3>("the input", ScalarType::E4m3)?),
        _ => wide(&x.elements::<F8E5M2>("the input", ScalarType::E5m2)?),
    };
    let scales = numbers::scales(&scales, "the scales", rows)?;
    let token_scales = numbers::scales(&token_scales, "the tokens' scales", tokens)?;
    let bias = if bias.numel() == 0 { None } else { Some(widened(&bias, dtype)?) };
    if bias.as_ref().is_some_and(|bias| bias.len() != rows) {
        return Err(Failure::runtime(format!("the bias must have {rows} elements, one for each feature")));
    }
    let mut sums = vec![0f32; tokens * rows];
    on_torch_threads(|| weight.linear(&values, tokens, Epilogue::default(), &mut sums).map_err(Failure::from))?;
    for (token, sums) in sums.chunks_exact_mut(rows.max(1)).enumerate() {
        let of_token = token_scales.get(token).copied().unwrap_or(1.0);
        for (row, sum) in sums.iter_mut().enumerate() {
            *sum = *sum * scales.get(row).copied().unwrap_or(1.0) * of_token + bias.as_ref().map_or(0.0, |b| b[row]);
        }
    }
    let mut y = with_last(&x, Device::HOST, out_features, dtype)?;
    match dtype {
        ScalarType::F32 => y.elements_mut::<f32>()?.copy_from_slice(&sums),
        ScalarType::F16 => narrow(&sums, y.elements_mut::<f16>()?),
        ScalarType::Bf16 => narrow(&sums, y.elements_mut::<bf16>()?),
        other => return Err(numbers::no_result(other)),
    }
    Ok(y)
}

fn wide<T: Arithmetic>(values: &[T]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}

fn narrow<T: Arithmetic>(from: &[f32], to: &mut [T]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to = T::from_f32(*from));
}
