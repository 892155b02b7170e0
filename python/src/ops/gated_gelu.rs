//! The gated GELU: `x ⊙ gelu(g)` of the halves of the last dimension; and the gradient of its input. GPUs have torch's
//! own.

use twofour::layer;

use super::*;

pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("gated_gelu(Tensor input) -> Tensor", kernel!(cpu))
        .shapes(|arguments| {
            let mut input = arguments.tensor(0)?;
            let half = input.sizes.pop().map(|last| last.div_floor(2)).transpose()?;
            Ok(vec![Shape::new(input.sizes.into_iter().chain(half))])
        })
        .by_rows(),
    Operator::new("gated_gelu_gradient(Tensor input, Tensor dy) -> Tensor", kernel!(gradient_cpu))
        .shapes(|arguments| arguments.like_first())
        .by_rows(),
];

const WHAT: &str = "the input of the gated GELU";

fn cpu(input: Tensor) -> Result<Tensor> {
    let dtype = input.dtype()?;
    for_floats!(dtype, WHAT, on_cpu::<T>(&input))
}

fn on_cpu<T: Float>(input: &Tensor) -> Result<Tensor> {
    let features = features(input)?;
    let halves = input.elements::<T>(WHAT, T::SCALAR)?;
    let mut y = with_last(input, Device::HOST, features, T::SCALAR)?;
    let out = y.elements_mut::<T>()?;
    on_torch_threads(|| layer::gated_gelu(&halves, features, out))?;
    Ok(y)
}

fn gradient_cpu(input: Tensor, dy: Tensor) -> Result<Tensor> {
    let dtype = input.dtype()?;
    for_floats!(dtype, WHAT, gradient_on_cpu::<T>(&input, &dy))
}

fn gradient_on_cpu<T: Float>(input: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let features = features(input)?;
    let halves = input.elements::<T>(WHAT, T::SCALAR)?;
    let dy = dy.elements::<T>("the output gradient", T::SCALAR)?;
    let mut gradient = Tensor::empty(input.sizes(), T::SCALAR)?;
    let out = gradient.elements_mut::<T>()?;
    on_torch_threads(|| layer::gated_gelu_gradient(&halves, &dy, features, out))?;
    Ok(gradient)
}

/// Half of the last dimension.
fn features(input: &Tensor) -> Result<usize> {
    match rows_and_last(input, WHAT)?.1 {
        odd if !odd.is_multiple_of(2) => {
            Err(Failure::runtime(format!("{WHAT} has {odd} columns; an even number is required")))
        }
        even => Ok(even / 2),
    }
}
