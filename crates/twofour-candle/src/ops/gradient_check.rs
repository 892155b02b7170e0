//! Test support: values and gradients against a reference and against finite differences.

use candle_core::{Device, Result, Tensor, Var};

/// Numbers in [-1, 1) that depend on nothing but the seed (splitmix64).
pub(crate) fn random(shape: &[usize], seed: u64) -> Result<Tensor> {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n as u64)
        .map(|i| {
            let mut z = (seed << 32).wrapping_add(i).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// The inputs of a function under test.
pub(crate) struct Case {
    inputs: Vec<Tensor>,
}

impl Case {
    pub(crate) fn new(shapes: &[Vec<usize>], seed: u64) -> Result<Self> {
        let inputs = shapes.iter().enumerate().map(|(i, s)| random(s, seed * 100 + i as u64)).collect::<Result<_>>()?;
        Ok(Case { inputs })
    }

    pub(crate) fn zeros(shapes: &[Vec<usize>]) -> Result<Self> {
        let zeros = |s: &Vec<usize>| Tensor::zeros(s.as_slice(), candle_core::DType::F32, &Device::Cpu);
        Ok(Case { inputs: shapes.iter().map(zeros).collect::<Result<_>>()? })
    }

    fn vars(&self) -> Result<Vec<Tensor>> {
        self.inputs.iter().map(|t| Ok(Var::from_tensor(t)?.into_inner())).collect()
    }
}

type Function<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// Weighs the output with fixed random numbers, so that no part of the gradient cancels.
fn loss(y: &Tensor) -> Result<Tensor> {
    (y * random(y.dims(), 77)?)?.sum_all()
}

fn values_and_gradients(f: Function<'_>, vars: &[Tensor]) -> Result<(Vec<f32>, Vec<Vec<f32>>)> {
    let y = f(vars)?;
    let grads = loss(&y)?.backward()?;
    let grads = vars
        .iter()
        .enumerate()
        .map(|(i, v)| match grads.get(v) {
            Some(g) => g.flatten_all()?.to_vec1(),
            None => candle_core::bail!("input {i} has no gradient"),
        })
        .collect::<Result<_>>()?;
    Ok((y.flatten_all()?.to_vec1()?, grads))
}

/// Largest difference relative to the largest magnitude of the expected values (at least 1).
pub(crate) fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let scale = expected.iter().fold(1f32, |m, v| m.max(v.abs()));
    found.iter().zip(expected).fold(0f32, |m, (a, b)| {
        let d = (a - b).abs() / scale;
        if d.is_nan() { f32::INFINITY } else { m.max(d) }
    })
}

/// Asserts that `f` and `reference` give the same values and the same gradients for every input.
pub(crate) fn against_reference(
    case: &Case,
    f: impl Fn(&[Tensor]) -> Result<Tensor>,
    reference: impl Fn(&[Tensor]) -> Result<Tensor>,
    tolerance: f32,
) -> Result<()> {
    let vars = case.vars()?;
    let (y, grads) = values_and_gradients(&f, &vars)?;
    let (y_expected, grads_expected) = values_and_gradients(&reference, &vars)?;
    let d = distance(&y, &y_expected);
    assert!(d <= tolerance, "values differ by {d} at shape {:?}", vars[0].dims());
    for (i, (g, e)) in grads.iter().zip(&grads_expected).enumerate() {
        let d = distance(g, e);
        assert!(d <= tolerance, "gradient of input {i} differs by {d} at shape {:?}", vars[0].dims());
    }
    Ok(())
}

/// Asserts that the gradients of `f` agree with central differences to 1 % of the largest gradient.
pub(crate) fn finite_differences(case: &Case, f: impl Fn(&[Tensor]) -> Result<Tensor>) -> Result<()> {
    const STEP: f32 = 1e-2;
    let (_, grads) = values_and_gradients(&f, &case.vars()?)?;
    for (i, gradient) in grads.iter().enumerate() {
        let at = |k: usize, delta: f32| -> Result<f64> {
            let mut inputs = case.inputs.clone();
            let mut values = inputs[i].flatten_all()?.to_vec1::<f32>()?;
            values[k] += delta;
            inputs[i] = Tensor::from_vec(values, inputs[i].shape(), &Device::Cpu)?;
            let y = f(&inputs)?;
            let weights = random(y.dims(), 77)?.flatten_all()?.to_vec1::<f32>()?;
            // Summed in f64: the differences are small against the values.
            Ok(y.flatten_all()?
                .to_vec1::<f32>()?
                .iter()
                .zip(&weights)
                .map(|(&a, &b)| f64::from(a) * f64::from(b))
                .sum())
        };
        let numeric = (0..gradient.len())
            .map(|k| Ok(((at(k, STEP)? - at(k, -STEP)?) / f64::from(2.0 * STEP)) as f32))
            .collect::<Result<Vec<_>>>()?;
        let d = distance(gradient, &numeric);
        assert!(d < 1e-2, "gradient of input {i} differs from finite differences by {d}");
    }
    Ok(())
}
