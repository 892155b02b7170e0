//! The block operators against their plain references and against finite differences.

use candle_core::{DType, Device, Result, Tensor, Var};
use twofour::kernel::Activation;

use super::{AttentionBlock, FeedForwardBlock, Gradients, LayerNorm};
use crate::{
    linear::AnyLinear,
    ops::gradient_check::{distance, random},
};

/// A dense layer with weights of variance about `1 / inputs`, and its variables.
fn dense(out: usize, inputs: usize, seed: u64, vars: &mut Vec<Var>) -> Result<AnyLinear> {
    let weight = Var::from_tensor(&(random(&[out, inputs], seed)? * (1.7 / (inputs as f64).sqrt()))?)?;
    let bias = Var::from_tensor(&(random(&[out], seed + 1)? * 0.3)?)?;
    vars.extend([weight.clone(), bias.clone()]);
    Ok(AnyLinear::Dense(candle_nn::Linear::new(weight.into_inner(), Some(bias.into_inner()))))
}

fn norm(width: usize, vars: &mut Vec<Var>) -> Result<LayerNorm> {
    let norm = LayerNorm::new(width, &Device::Cpu)?;
    norm.gain().set(&(random(&[width], 90)? * 0.5)?.affine(1.0, 1.0)?)?;
    norm.bias().set(&random(&[width], 91)?)?;
    vars.extend([norm.gain().clone(), norm.bias().clone()]);
    Ok(norm)
}

fn attention(width: usize, heads: usize, context: usize, vars: &mut Vec<Var>) -> Result<AttentionBlock> {
    let qkv = dense(3 * width, width, 1, vars)?;
    let out = dense(width, width, 3, vars)?;
    AttentionBlock::new(norm(width, vars)?, qkv, out, heads, context)
}

fn feed_forward(width: usize, hidden: usize, activation: Activation, vars: &mut Vec<Var>) -> Result<FeedForwardBlock> {
    let up = dense(hidden, width, 5, vars)?;
    let down = dense(width, hidden, 7, vars)?;
    Ok(FeedForwardBlock { norm: norm(width, vars)?, up, down, activation })
}

/// Weighs the output with fixed random numbers, so that no part of the gradient cancels.
fn loss(y: &Tensor) -> Result<Tensor> {
    (y * random(y.dims(), 77)?)?.sum_all()
}

fn flat(t: &Tensor) -> Result<Vec<f32>> {
    t.flatten_all()?.to_vec1()
}

/// Asserts that operator and reference agree in value and in the gradient of the input and of every variable.
fn check(
    x: &Tensor,
    vars: &[Var],
    operator: impl Fn(&Tensor, &Gradients) -> Result<Tensor>,
    reference: impl Fn(&Tensor) -> Result<Tensor>,
) -> Result<()> {
    let x = Var::from_tensor(x)?;
    let expected = reference(&x)?;
    let expected_grads = loss(&expected)?.backward()?;
    let gradients = Gradients::new();
    // Twice: the second pass works in recycled buffers.
    for pass in 0..2 {
        let y = operator(&x, &gradients)?;
        let d = distance(&flat(&y)?, &flat(&expected)?);
        assert!(d < 1e-5, "pass {pass}: values differ by {d}");
        let grads = gradients.backward(&loss(&y)?)?;
        for (i, var) in vars.iter().chain([&x]).enumerate() {
            let (Some(found), Some(expected)) = (grads.get(var), expected_grads.get(var)) else {
                panic!("pass {pass}: variable {i} of shape {:?} has no gradient", var.dims());
            };
            let d = distance(&flat(found)?, &flat(expected)?);
            assert!(d < 2e-5, "pass {pass}: gradient {i} of shape {:?} differs by {d}", var.dims());
        }
    }
    Ok(())
}

#[test]
fn attention_agrees_with_its_reference() -> Result<()> {
    // One position, one head, and lengths around and beyond the block of 64 queries.
    for (batch, positions, width, heads) in
        [(2, 5, 16, 2), (1, 1, 8, 1), (3, 64, 24, 3), (1, 65, 16, 2), (2, 150, 32, 4)]
    {
        let mut vars = vec![];
        let block = attention(width, heads, 160, &mut vars)?;
        let x = random(&[batch, positions, width], 10)?;
        check(&x, &vars, |x, g| block.forward(x, g), |x| block.reference(x))?;
    }
    Ok(())
}

#[test]
fn feed_forward_agrees_with_its_reference() -> Result<()> {
    for activation in [Activation::Gelu, Activation::Relu, Activation::Silu, Activation::Identity] {
        let mut vars = vec![];
        let block = feed_forward(24, 80, activation, &mut vars)?;
        let x = random(&[2, 37, 24], 11)?;
        check(&x, &vars, |x, g| block.forward(x, g), |x| block.reference(x))?;
    }
    Ok(())
}

#[test]
fn two_blocks_in_a_row_agree_with_finite_differences() -> Result<()> {
    let mut vars = vec![];
    let first = attention(8, 2, 8, &mut vars)?;
    let second = feed_forward(8, 12, Activation::Gelu, &mut vars)?;
    let gradients = Gradients::new();
    let x = random(&[1, 4, 8], 12)?;
    let forward = || loss(&second.forward(&first.forward(&x, &gradients)?, &gradients)?);
    // The input is no variable: the parameters get their gradients all the same.
    let grads = gradients.backward(&forward()?)?;
    for var in &vars {
        let Some(found) = grads.get(var) else { panic!("no gradient for shape {:?}", var.dims()) };
        let values = flat(var)?;
        let shift = |k: usize, by: f32| -> Result<f32> {
            let mut shifted = values.clone();
            shifted[k] += by;
            var.set(&Tensor::from_vec(shifted, var.shape(), &Device::Cpu)?)?;
            forward()?.to_scalar()
        };
        let numeric =
            (0..values.len()).map(|k| Ok((shift(k, 1e-2)? - shift(k, -1e-2)?) / 2e-2)).collect::<Result<Vec<_>>>()?;
        var.set(&Tensor::from_vec(values.clone(), var.shape(), &Device::Cpu)?)?;
        let d = distance(&flat(found)?, &numeric);
        assert!(d < 1e-2, "shape {:?}: {d}", var.dims());
    }
    Ok(())
}

#[test]
fn a_second_backward_pass_and_bad_shapes_are_errors() -> Result<()> {
    let mut vars = vec![];
    let block = feed_forward(8, 12, Activation::Gelu, &mut vars)?;
    let gradients = Gradients::new();
    let y = loss(&block.forward(&random(&[2, 3, 8], 13)?, &gradients)?)?;
    gradients.backward(&y)?;
    assert!(gradients.backward(&y).is_err());
    assert!(block.forward(&random(&[2, 3, 9], 13)?, &gradients).is_err());
    assert!(block.forward(&Tensor::zeros((), DType::F32, &Device::Cpu)?, &gradients).is_err());

    let block = attention(8, 2, 4, &mut vars)?;
    let error = block.forward(&random(&[1, 5, 8], 13)?, &gradients).unwrap_err().to_string();
    assert!(error.contains("5 positions, but the context is 4"), "{error}");
    assert!(attention(9, 2, 4, &mut vars).is_err() && attention(10, 0, 4, &mut vars).is_err());
    assert!(attention(6, 2, 4, &mut vars).is_err(), "heads of 3 elements cannot be rotated in pairs");
    Ok(())
}
