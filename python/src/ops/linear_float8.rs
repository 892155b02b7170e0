//! `x · Wᵀ · scales + bias` of 8-bit floats, summed in f32.

use twofour::{
    F8E4M3, F8E5M2,
    kernel::{Epilogue, SparseWeightRef, packed_bytes},
};
use twofour_cuda::layer::borrowed::{self, Float8Epilogue, PackedSlice, packed_len};

use super::*;

/// `scales` has a number for each feature, `token_scales` for each token or none, `bias`, of the type of the result,
/// for each feature or none. `dtype` is torch's number of the type of the result.
pub(super) const OPERATORS: &[Operator] = &[Operator::new(
    "linear_float8(Tensor x, Tensor packed, Tensor scales, Tensor token_scales, Tensor bias, int out_features, int \
     dtype) -> Tensor",
    kernel!(cpu),
)
.cuda(kernel!(cuda))
.shapes(|arguments| {
    let results = arguments.with_last(5)?;
    let dtype = ScalarType::of(arguments.int(6)?);
    Ok(results.into_iter().map(|result| result.of(dtype)).collect())
})
.product()];

fn cpu(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    token_scales: Tensor,
    bias: Tensor,
    rows: usize,
    dtype: FloatType,
) -> Result<Tensor> {
    let (tokens, cols) = rows_and_last(&x, "the input")?;
    let dtype = result_type(dtype, &x)?;
    expect_float8(&x, &packed)?;
    expect_packed(&packed, packed_bytes::<f32>(rows, cols)?, packed.dtype()?, (rows, cols), &x)?;
    let memory = Memory::of(&packed)?;
    let weight = SparseWeightRef::<f32>::new(rows, cols, &memory)?;
    let values = match x.dtype()? {
        ScalarType::E4m3 => to_f32(&x.elements::<F8E4M3>("the input", ScalarType::E4m3)?),
        _ => to_f32(&x.elements::<F8E5M2>("the input", ScalarType::E5m2)?),
    };
    expect_scales(&scales, "the scales", rows)?;
    expect_scales(&token_scales, "the tokens' scales", tokens)?;
    let scales = scales.elements::<f32>("the scales", ScalarType::F32)?;
    let token_scales = token_scales.elements::<f32>("the tokens' scales", ScalarType::F32)?;
    let bias = if bias.numel() == 0 { None } else { Some(bias_of(&bias, dtype)?) };
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
    let mut y = with_last(&x, Device::HOST, rows, dtype)?;
    round_into(&mut y, &sums)?;
    Ok(y)
}

fn cuda(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    token_scales: Tensor,
    bias: Tensor,
    rows: usize,
    dtype: FloatType,
) -> Result<Tensor> {
    let context = context::of(&x)?;
    let (tokens, cols) = rows_and_last(&x, "the input")?;
    let dtype = result_type(dtype, &x)?;
    expect_float8(&x, &packed)?;
    expect_packed(&packed, packed_len(packable(packed.dtype()?)?, rows, cols)?, packed.dtype()?, (rows, cols), &x)?;
    expect_scales(&scales, "the scales", rows)?;
    expect_scales(&token_scales, "the tokens' scales", tokens)?;
    let (scales, token_scales) = (scales.contiguous("the scales")?, token_scales.contiguous("the tokens' scales")?);
    let optional = |tensor: &'_ Tensor| tensor.numel() != 0;
    let bias = optional(&bias).then_some(&bias);
    multiply(&context, (&x, &packed, bias), (rows, dtype), |p| {
        let scales = optional(&scales).then(|| slice(&context, &scales, "the scales")).transpose()?;
        let token_scales =
            optional(&token_scales).then(|| slice(&context, &token_scales, "the tokens' scales")).transpose()?;
        let epilogue = Float8Epilogue { scales, token_scales, bias: p.bias };
        let weight = PackedSlice::new(p.packed, rows, cols);
        Ok(borrowed::float8_linear(&context, weight, p.input, tokens, epilogue, p.output)?)
    })
}

fn result_type(dtype: FloatType, x: &Tensor) -> Result<ScalarType> {
    match dtype.or(x.dtype()?) {
        dtype @ (ScalarType::F32 | ScalarType::F16 | ScalarType::Bf16) => Ok(dtype),
        other => {
            let name = other.name();
            Err(Failure::not_implemented(format!(
                "a product of 8-bit floats is float32, float16 or bfloat16, not {name}: round it afterwards"
            )))
        }
    }
}

/// An error unless both operands are of 8-bit floats.
fn expect_float8(x: &Tensor, packed: &Tensor) -> Result<()> {
    for (tensor, what) in [(x, "the input"), (packed, "the packed weight")] {
        let found = tensor.dtype()?;
        if !matches!(found, ScalarType::E4m3 | ScalarType::E5m2) {
            let name = found.name();
            return Err(Failure::not_implemented(format!(
                "{what} has dtype {name}; float8_e4m3fn or float8_e5m2 is required"
            )));
        }
    }
    Ok(())
}

/// An error unless a tensor has `len` numbers of float32, or none.
fn expect_scales(scales: &Tensor, what: &str, len: usize) -> Result<()> {
    match (scales.dtype()?, scales.numel()) {
        (ScalarType::F32, found) if found == len || found == 0 => Ok(()),
        (ScalarType::F32, found) => Err(Failure::runtime(format!("{what} must be {len} numbers, not {found}"))),
        (found, _) => Err(Failure::not_implemented(format!("{what} have dtype {}; float32 is required", found.name()))),
    }
}
