//! Values and gradients of every form, against candle's own layer holding the pruned weight and against differences.

use candle_core::{D, Device, Result, Tensor, Var, backprop::GradStore};
use candle_nn::Optimizer;
use half::bf16;
use proptest::prelude::*;
use twofour::kernel::Activation;

use super::*;

const CPU: &Device = &Device::Cpu;

/// Reproducible values in -1..1 that hardly ever tie.
fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn tensor(shape: &[usize], seed: u64) -> Tensor {
    Tensor::from_vec(values(shape.iter().product(), seed), shape, CPU).unwrap()
}

fn var(shape: &[usize], seed: u64, dtype: DType) -> Var {
    Var::from_tensor(&tensor(shape, seed).to_dtype(dtype).unwrap()).unwrap()
}

/// The largest difference, relative to the largest element of `expected`.
fn distance(found: &Tensor, expected: &Tensor) -> f32 {
    assert_eq!(found.dims(), expected.dims());
    let flat = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let (found, expected) = (flat(found), flat(expected));
    let scale = expected.iter().fold(1e-6f32, |m, v| m.max(v.abs()));
    assert!(found.iter().all(|v| v.is_finite()));
    found.iter().zip(&expected).fold(0f32, |m, (f, e)| m.max((f - e).abs())) / scale
}

/// A loss whose gradient for `y` has no two equal elements.
fn loss(y: &Tensor) -> Result<Tensor> {
    let weights = tensor(y.dims(), 99).to_dtype(y.dtype())?;
    (y * weights)?.to_dtype(DType::F32)?.sum_all()
}

struct Case {
    x: Var,
    weight: Var,
    bias: Option<Var>,
}

impl Case {
    fn new(x: &[usize], outputs: usize, with_bias: Option<()>, dtype: DType) -> Self {
        Case {
            x: var(x, 1, dtype),
            weight: var(&[outputs, x[x.len() - 1]], 2, dtype),
            bias: with_bias.map(|()| var(&[outputs], 3, dtype)),
        }
    }

    fn dense(&self) -> AnyLinear {
        Linear::new(self.weight.as_tensor().clone(), self.bias.as_ref().map(|b| b.as_tensor().clone())).into()
    }

    fn sparse(&self, settings: SparseSettings) -> SparseLinear {
        let bias = self.bias.as_ref().map(|b| b.as_tensor().clone());
        SparseLinear::new(self.weight.as_tensor().clone(), bias, settings).unwrap()
    }

    /// Output and gradients of candle's own layer with a weight of its own (the same values, or pruned ones).
    fn reference(&self, weight: &Tensor) -> Result<(Tensor, Vec<Tensor>)> {
        let weight = Var::from_tensor(&weight.copy()?)?;
        let y = Linear::new(weight.as_tensor().clone(), self.bias.as_ref().map(|b| b.as_tensor().clone()))
            .forward(&self.x)?;
        let grads = loss(&y)?.backward()?;
        let all = [Some(&self.x), Some(&weight), self.bias.as_ref()];
        Ok((y, all.into_iter().flatten().map(|v| grads.get(v).unwrap().clone()).collect()))
    }

    fn gradients(&self, grads: &GradStore) -> Vec<Tensor> {
        let all = [Some(&self.x), Some(&self.weight), self.bias.as_ref()];
        all.into_iter().flatten().map(|v| grads.get(v).unwrap().clone()).collect()
    }

    fn compare(&self, y: &Tensor, reference: &(Tensor, Vec<Tensor>), tolerance: f32) -> Result<()> {
        assert_eq!(y.dtype(), self.x.dtype());
        assert!(distance(y, &reference.0) < tolerance, "output: {}", distance(y, &reference.0));
        let grads = self.gradients(&loss(y)?.backward()?);
        assert_eq!(grads.len(), reference.1.len());
        for (i, (found, expected)) in grads.iter().zip(&reference.1).enumerate() {
            assert!(distance(found, expected) < tolerance, "gradient {i}: {}", distance(found, expected));
        }
        Ok(())
    }
}

/// The linear shapes of torch's semi-structured tests, and odd ones.
const SHAPES: [&[usize]; 7] = [&[1, 128], &[64, 128], &[128, 128], &[64, 128, 128], &[2, 3, 4, 20], &[7], &[3, 0, 12]];

#[test]
fn dense_and_sparse_layers_agree_with_candles_on_every_shape() -> Result<()> {
    for shape in SHAPES {
        for bias in [None, Some(())] {
            let case = Case::new(shape, 96, bias, DType::F32);
            if shape.contains(&0) || shape.len() < 2 {
                // candle's own layer refuses these.
                let y = case.sparse(SparseSettings::default()).operand()?;
                let y = operator::apply(y, &case.x)?;
                assert_eq!(y.dims()[..shape.len() - 1], shape[..shape.len() - 1]);
                assert_eq!(y.dim(D::Minus1)?, 96);
                continue;
            }
            case.compare(&case.dense().forward(&case.x)?, &case.reference(&case.weight)?, 1e-5)?;
            let sparse = case.sparse(SparseSettings::default());
            let pruned = sparse.effective_weight()?;
            case.compare(&AnyLinear::from(sparse).forward(&case.x)?, &case.reference(&pruned)?, 1e-5)?;
        }
    }
    Ok(())
}

#[test]
fn transposable_masks_are_sparse_both_ways() -> Result<()> {
    for rule in twofour::select::Transposable::ALL {
        for input_gradient in [InputGradient::Automatic, InputGradient::PackedTranspose] {
            let case = Case::new(&[9, 52], 36, Some(()), DType::F32);
            let settings = SparseSettings { rule: MaskRule::Transposable(rule), input_gradient, ..Default::default() };
            let sparse = case.sparse(settings);
            sparse.mask().unwrap().verify(twofour::Pattern::TWO_FOUR, twofour::Axis::Column).unwrap();
            let layer = AnyLinear::from(sparse.clone());
            // The second pass packs anew, in place.
            for seed in [2, 50] {
                case.weight.set(&tensor(&[36, 52], seed))?;
                sparse.refresh_mask()?;
                let pruned = sparse.effective_weight()?;
                case.compare(&layer.forward(&case.x)?, &case.reference(&pruned)?, 1e-5)?;
            }
            let row_only = case.sparse(SparseSettings::default()).mask()?;
            let back = sparse.restore(row_only, 0);
            assert_eq!(back.is_err(), input_gradient == InputGradient::PackedTranspose);
        }
    }
    let settings = SparseSettings { input_gradient: InputGradient::PackedTranspose, ..Default::default() };
    let error = SparseLinear::new(tensor(&[4, 8], 1), None, settings).unwrap_err().to_string();
    assert!(error.contains("transposable"), "{error}");
    Ok(())
}

#[test]
fn half_precision_agrees_within_its_rounding() -> Result<()> {
    for dtype in [DType::BF16, DType::F16] {
        let case = Case::new(&[33, 128], 64, Some(()), dtype);
        let sparse = case.sparse(SparseSettings::default());
        let pruned = sparse.effective_weight()?;
        case.compare(&AnyLinear::from(sparse).forward(&case.x)?, &case.reference(&pruned)?, 1e-2)?;
        // Dense layers of these dtypes are candle's own.
        case.compare(&case.dense().forward(&case.x)?, &case.reference(&case.weight)?, 1e-6)?;
    }
    Ok(())
}

#[test]
fn gradients_agree_with_finite_differences() -> Result<()> {
    let case = Case::new(&[5, 24], 16, Some(()), DType::F32);
    let settings = SparseSettings { refresh: Refresh::OnRequest, ..Default::default() };
    let sparse = AnyLinear::from(case.sparse(settings));
    let of = |v: f64| -> Result<f64> { Ok(v) };
    let total = || -> Result<f64> { of(f64::from(loss(&sparse.forward(&case.x)?)?.to_scalar::<f32>()?)) };
    let grads = loss(&sparse.forward(&case.x)?)?.backward()?;
    let AnyLinear::Sparse(layer) = &sparse else { unreachable!() };
    let mask = layer.mask()?;
    for (which, var) in [&case.x, &case.weight, case.bias.as_ref().unwrap()].into_iter().enumerate() {
        let gradient = grads.get(var).unwrap().flatten_all()?.to_vec1::<f32>()?;
        let before = var.flatten_all()?.to_vec1::<f32>()?;
        for at in (0..before.len()).step_by(7) {
            let moved = |by: f32| -> Result<f64> {
                let mut data = before.clone();
                data[at] += by;
                var.set(&Tensor::from_vec(data, var.shape(), CPU)?)?;
                total()
            };
            let numeric = (moved(1e-2)? - moved(-1e-2)?) / 2e-2;
            if which == 1 && !mask.is_kept(at / 24, at % 24) {
                // A pruned element does not move the loss; it has a gradient all the same, to grow back by.
                assert_eq!(numeric, 0.0);
                assert!(gradient[at] != 0.0);
            } else {
                let error = (numeric - f64::from(gradient[at])).abs();
                assert!(error < 1e-3 * (1.0 + numeric.abs()), "{which}, {at}: {numeric} against {}", gradient[at]);
            }
        }
        var.set(&Tensor::from_vec(before, var.shape(), CPU)?)?;
    }
    Ok(())
}

#[test]
fn a_masked_gradient_is_zero_where_nothing_is_kept() -> Result<()> {
    let case = Case::new(&[9, 70], 5, None, DType::F32);
    let settings = SparseSettings { weight_gradient: WeightGradient::Masked, ..Default::default() };
    let layer = case.sparse(settings);
    let mask = layer.mask()?;
    let grads = loss(&AnyLinear::from(layer).forward(&case.x)?)?.backward()?;
    let gradient = grads.get(&case.weight).unwrap().to_vec2::<f32>()?;
    for (row, values) in gradient.iter().enumerate() {
        for (col, value) in values.iter().enumerate() {
            assert_eq!(*value != 0.0, mask.is_kept(row, col), "{row}, {col}");
        }
    }
    Ok(())
}

#[test]
fn the_operand_does_what_the_layer_does() -> Result<()> {
    let case = Case::new(&[6, 40], 24, Some(()), DType::F32);
    for layer in [case.dense(), case.sparse(SparseSettings::default()).into()] {
        let y = layer.forward(&case.x)?;
        let grads = case.gradients(&loss(&y)?.backward()?);
        let operand = layer.operand()?;
        assert_eq!(operand.weight().map(Tensor::id), Some(case.weight.id()));
        assert_eq!(operand.bias().map(Tensor::id), case.bias.as_ref().map(|b| b.id()));
        let (x, dy) = (case.x.flatten_all()?.to_vec1::<f32>()?, values(6 * 24, 99));
        let (mut out, mut dx, mut dw, mut db) =
            (vec![0.0; 6 * 24], vec![0.0; 6 * 40], vec![0.0; 24 * 40], vec![0.0; 24]);
        operand.forward(&x, 6, Activation::Identity, &mut out)?;
        operand.input_gradient(&dy, 6, &mut dx)?;
        operand.weight_gradient(&dy, &x, 6, &mut dw)?;
        operand.bias_gradient(&dy, 6, &mut db)?;
        for (found, expected) in [(&out, &y), (&dx, &grads[0]), (&dw, &grads[1]), (&db, &grads[2])] {
            let found = Tensor::from_slice(found, expected.shape(), CPU)?;
            assert!(distance(&found, expected) < 1e-6);
        }
        for activation in [Activation::Relu, Activation::Gelu, Activation::Silu] {
            operand.forward(&x, 6, activation, &mut out)?;
            let expected = y.flatten_all()?.to_vec1::<f32>()?.into_iter().map(|v| activation.apply(v)).collect();
            let expected = Tensor::from_vec::<_, f32>(expected, 6 * 24, CPU)?;
            assert!(distance(&Tensor::from_slice(&out, 6 * 24, CPU)?, &expected) < 1e-5);
        }
        let short = operand.forward(&x[1..], 6, Activation::Identity, &mut out).unwrap_err().to_string();
        assert!(short.contains("the input: expected 240 elements, found 239"), "{short}");
        assert!(
            operand.bias_gradient(&dy, 5, &mut db).is_err() && operand.bias_gradient(&dy, 6, &mut db[1..]).is_err()
        );
    }
    Ok(())
}

#[test]
fn pruned_elements_grow_back_when_the_master_changes() -> Result<()> {
    let case = Case::new(&[2, 8], 1, None, DType::F32);
    case.weight.set(&Tensor::new(&[[1f32, 2.0, 3.0, 4.0, 4.0, 3.0, 2.0, 1.0]], CPU)?)?;
    let every_second = Refresh::Every(2.try_into().unwrap());
    let layer = case.sparse(SparseSettings { refresh: every_second, ..Default::default() });
    let any = AnyLinear::from(layer.clone());
    any.forward(&case.x)?;
    assert_eq!((layer.mask()?.row_words(0)[0], layer.flip_rate()?), (0b0011_1100, Some(0.0)));
    case.weight.set(&Tensor::new(&[[9f32, 2.0, 3.0, 4.0, 5.0, 3.0, 2.0, 1.0]], CPU)?)?;
    any.forward(&case.x)?;
    // The second pass keeps the mask and takes the new values.
    assert_eq!(layer.mask()?.row_words(0)[0], 0b0011_1100);
    assert_eq!(layer.effective_weight()?.to_vec2::<f32>()?[0], [0.0, 0.0, 3.0, 4.0, 5.0, 3.0, 0.0, 0.0]);
    layer.set_mode(Mode::Evaluate);
    any.forward(&case.x)?;
    assert_eq!((layer.mask()?.row_words(0)[0], layer.forwards()), (0b0011_1100, 2));
    layer.set_mode(Mode::Train);
    let y = any.forward(&case.x)?;
    assert_eq!((layer.mask()?.row_words(0)[0], layer.forwards()), (0b0011_1001, 3));
    assert_eq!(layer.flip_rate()?, Some(0.25));
    assert!(distance(&y, &case.reference(&layer.effective_weight()?)?.0) < 1e-6);
    case.weight.set(&Tensor::new(&[[0f32, 0.0, 1.0, 1.0, 5.0, 3.0, 2.0, 1.0]], CPU)?)?;
    assert_eq!(layer.refresh_mask()?, 0.25);
    Ok(())
}

#[test]
fn a_forward_pass_that_waits_for_its_backward_keeps_its_weights() -> Result<()> {
    let case = Case::new(&[4, 32], 16, None, DType::F32);
    let layer = AnyLinear::from(case.sparse(SparseSettings::default()));
    let expected = case.reference(&layer.effective_weight()?)?;
    let y = layer.forward(&case.x)?;
    case.weight.set(&tensor(&[16, 32], 77))?;
    layer.forward(&case.x)?;
    case.compare(&y, &expected, 1e-5)
}

#[test]
fn compressed_layers_agree_with_the_sparse_one() -> Result<()> {
    let case = Case::new(&[3, 5, 72], 48, Some(()), DType::F32);
    let sparse = AnyLinear::from(case.sparse(SparseSettings::default()));
    let expected = sparse.forward(&case.x)?;
    let reference = case.reference(&sparse.effective_weight()?)?;
    for (dtype, tolerance) in [(DataType::F32, 1e-6), (DataType::BF16, 1e-2), (DataType::F16, 2e-3)] {
        let compressed = sparse.compressed(dtype)?;
        let y = compressed.forward(&case.x)?;
        assert!(distance(&y, &expected) < tolerance, "{dtype}: {}", distance(&y, &expected));
        // The input's gradient passes through; parameters have none.
        let grads = loss(&y)?.backward()?;
        assert!(distance(grads.get(&case.x).unwrap(), &reference.1[0]) < tolerance);
        assert!(grads.get(&case.weight).is_none() && grads.get(case.bias.as_ref().unwrap()).is_none());
        // Half-precision inputs keep their dtype.
        let half = compressed.forward(&case.x.to_dtype(DType::BF16)?)?;
        assert_eq!(half.dtype(), DType::BF16);
        assert!(distance(&half, &expected) < 2e-2);
        // A copy: the master's later changes do not reach it.
        case.weight.set(&(case.weight.as_tensor() * 2.0)?)?;
        assert_eq!(distance(&compressed.forward(&case.x)?, &y), 0.0);
        case.weight.set(&(case.weight.as_tensor() * 0.5)?)?;
        assert!(compressed.dense().is_err() && compressed.sparse(SparseSettings::default()).is_err());
        assert_eq!(compressed.dims()?, (48, 72));
    }
    let quantized = sparse.compressed(DataType::I8)?;
    let y = quantized.forward(&case.x)?;
    assert!(distance(&y, &expected) < 2e-2, "{}", distance(&y, &expected));
    assert!(loss(&y)?.backward().unwrap_err().to_string().contains("the layer is compressed to i8"));
    let AnyLinear::Compressed(bf) = sparse.compressed(DataType::BF16)? else { unreachable!() };
    assert!(bf.to_compressed::<f32>().is_none());
    let dense = bf.to_compressed::<bf16>().unwrap().to_dense();
    let expected = sparse.effective_weight()?.to_dtype(DType::BF16)?.flatten_all()?.to_vec1::<bf16>()?;
    assert_eq!(dense, expected);
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused_and_views_are_read_rightly() -> Result<()> {
    let case = Case::new(&[6, 16], 8, Some(()), DType::F32);
    let sparse = AnyLinear::from(case.sparse(SparseSettings::default()));
    let say = |x: &Tensor| sparse.forward(x).unwrap_err().to_string();
    assert!(say(&case.x.to_dtype(DType::BF16)?).contains("dtype BF16 where F32 is needed"));
    assert!(say(&case.x.to_dtype(DType::U32)?).contains("dtype U32 where F32, BF16 or F16 is needed"));
    assert!(say(&tensor(&[6, 12], 1)).contains("shape [6, 12] where [.., 16] is needed"));
    assert!(say(&Tensor::new(1f32, CPU)?).contains("shape [] where"));
    let view = tensor(&[16, 6], 5).t()?;
    assert_eq!(distance(&sparse.forward(&view)?, &sparse.forward(&view.contiguous()?)?), 0.0);
    let slice = tensor(&[6, 20], 5).narrow(1, 3, 16)?;
    assert_eq!(distance(&sparse.forward(&slice)?, &sparse.forward(&slice.copy()?)?), 0.0);
    // A weight that is a view of a variable: the gradient reaches the variable.
    let stored = var(&[16, 8], 6, DType::F32);
    let tied = AnyLinear::from(Linear::new(stored.t()?, None));
    let grads = loss(&tied.forward(&case.x)?)?.backward()?;
    assert_eq!(grads.get(&stored).unwrap().dims(), [16, 8]);
    let refuse =
        |w: Tensor, b: Option<Tensor>| SparseLinear::new(w, b, SparseSettings::default()).unwrap_err().to_string();
    assert!(refuse(tensor(&[4], 1), None).contains("shape [4] where [out, in] is needed"));
    assert!(refuse(tensor(&[4, 8], 1), Some(tensor(&[8], 1))).contains("the bias: shape [8] where [4] is needed"));
    assert!(refuse(tensor(&[4, 8], 1).to_dtype(DType::F64)?, None).contains("F64"));
    assert!(refuse(Tensor::new(&[[1f32, f32::NAN, 0.0, 0.0]], CPU)?, None).contains("row 0, column 1: NaN"));
    let half = AnyLinear::from(Case::new(&[2, 8], 4, None, DType::BF16).sparse(SparseSettings::default()));
    assert!(half.operand().unwrap_err().to_string().contains("inside another operator"));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn any_shape_agrees_with_the_pruned_dense_layer(tokens in 1usize..20, outputs in 1usize..40, inputs in 1usize..90) {
        let case = Case::new(&[tokens, inputs], outputs, Some(()), DType::F32);
        let sparse = case.sparse(SparseSettings::default());
        let pruned = sparse.effective_weight().unwrap();
        case.compare(&AnyLinear::from(sparse).forward(&case.x).unwrap(), &case.reference(&pruned).unwrap(), 1e-5).unwrap();
    }
}

/// The toy model of torchao's training tests.
struct Mlp {
    fc1: AnyLinear,
    fc2: AnyLinear,
    deep: Vec<Option<AnyLinear>>,
}
crate::has_linears!(Mlp { fc1, fc2, deep });

impl Mlp {
    fn new() -> (Self, Vec<Var>) {
        let vars = vec![
            var(&[256, 128], 11, DType::F32),
            var(&[256], 12, DType::F32),
            var(&[128, 256], 13, DType::F32),
            var(&[128], 14, DType::F32),
        ];
        let linear = |w: &Var, b: &Var| Linear::new(w.as_tensor().clone(), Some(b.as_tensor().clone()));
        let fc1 = linear(&vars[0], &vars[1]).into();
        let fc2 = linear(&vars[2], &vars[3]).into();
        (Mlp { fc1, fc2, deep: vec![None, Some(Linear::new(tensor(&[4, 4], 1), None).into())] }, vars)
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.fc2.forward(&self.fc1.forward(x)?.relu()?)
    }
}

#[test]
fn a_train_step_through_swapped_layers_is_the_dense_one_with_pruned_weights() -> Result<()> {
    let x = tensor(&[128, 128], 20);
    let (mut model, vars) = Mlp::new();
    let ids = |m: &Mlp| [&m.fc1, &m.fc2].map(|l| (l.weight().unwrap().id(), l.bias().unwrap().id()));
    let before = ids(&model);
    let config = ["fc1", "fc2"].map(|n| (n.to_owned(), SparseSettings::default())).into();
    assert_eq!(swap_linear_with_semi_sparse_linear(&mut model, &config)?, ["fc1", "fc2"]);
    assert_eq!(ids(&model), before);

    let (reference, reference_vars) = Mlp::new();
    for (i, layer) in [(0, &model.fc1), (2, &model.fc2)] {
        reference_vars[i].set(&layer.effective_weight()?)?;
    }
    let (y, expected) = (model.forward(&x)?, reference.forward(&x)?);
    assert!(distance(&y, &expected) < 1e-5);
    let (grads, expected) = (loss(&y)?.backward()?, loss(&expected)?.backward()?);
    for (var, reference) in vars.iter().zip(&reference_vars) {
        assert!(distance(grads.get(var).unwrap(), expected.get(reference).unwrap()) < 1e-5);
    }

    // The optimizer made from the variables steps the swapped model; unswapped, it computes what the swapped one does.
    let untouched = model.forward(&x)?;
    candle_nn::SGD::new(vars.clone(), 0.1)?.step(&grads)?;
    assert!(distance(&model.forward(&x)?, &untouched) > 1e-3);
    set_mode(&mut model, Mode::Evaluate)?;
    let (y, kept) = (model.forward(&x)?, model.fc1.effective_weight()?);
    assert_eq!(swap_semi_sparse_linear_with_linear(&mut model)?, ["fc1", "fc2"]);
    assert_eq!((ids(&model), model.fc1.form()), (before, "dense"));
    assert_eq!((distance(&vars[0], &kept), distance(model.fc1.weight().unwrap(), &kept)), (0.0, 0.0));
    assert!(distance(&model.forward(&x)?, &y) < 1e-5);
    Ok(())
}

#[test]
fn swapping_back_keeps_masks_of_every_rule_and_refuses_weights_that_are_also_others() -> Result<()> {
    let x = tensor(&[3, 128], 4);
    for rule in MaskRule::CHOOSING {
        let (mut model, vars) = Mlp::new();
        sparsify(
            &mut model,
            &SparsifyConfig { settings: SparseSettings { rule, ..Default::default() }, ..Default::default() },
        )?;
        let single = model.fc1.clone();
        let (y, master) = (single.forward(&x)?, vars[0].copy()?);
        // A layer alone leaves its master as it is.
        assert!(distance(&single.dense()?.forward(&x)?, &y) < 1e-5, "{rule:?}");
        assert_eq!(distance(&vars[0], &master), 0.0);
        model.deep[1] = Some(single.clone());
        swap_semi_sparse_linear_with_linear(&mut model)?;
        assert!(distance(&model.fc1.forward(&x)?, &y) < 1e-5, "{rule:?}");
        // What was trained is 2:4, so that it can be compressed as it is.
        assert_eq!(compress_linears(&mut model, DataType::F32)?, ["fc1", "fc2", "deep.1"], "{rule:?}");
        assert!(distance(&model.fc1.forward(&x)?, &y) < 1e-5, "{rule:?}");
    }
    let (mut model, vars) = Mlp::new();
    model.deep[1] = Some(model.fc1.clone());
    swap_linear_with_semi_sparse_linear(&mut model, &[("fc1".to_owned(), SparseSettings::default())].into())?;
    let master = vars[0].copy()?;
    let error = swap_semi_sparse_linear_with_linear(&mut model).unwrap_err().to_string();
    assert!(error.contains("layer `fc1`: the layer is sparse, and its weight is also another layer's"), "{error}");
    assert_eq!((model.fc1.form(), distance(&vars[0], &master)), ("sparse", 0.0));
    Ok(())
}

#[test]
fn names_are_checked_before_anything_changes() -> Result<()> {
    let (mut model, _) = Mlp::new();
    assert_eq!(linear_names(&mut model)?, ["fc1", "fc2", "deep.1"]);
    let config = ["fc1", "fc3", "model.fc2"].map(|n| (n.to_owned(), SparseSettings::default())).into();
    let error = swap_linear_with_semi_sparse_linear(&mut model, &config).unwrap_err().to_string();
    assert!(
        error.contains("`fc3` (did you mean `fc1`, `fc2`?)") && error.contains("`model.fc2` (did you mean `fc2`"),
        "{error}"
    );
    assert_eq!(model.fc1.form(), "dense");
    let with = |include: &[&str], exclude: &[&str]| SparsifyConfig {
        include: include.iter().map(ToString::to_string).collect(),
        exclude: exclude.iter().map(ToString::to_string).collect(),
        settings: SparseSettings::default(),
    };
    assert!(sparsify(&mut model, &with(&["*"], &["head"])).is_err());
    assert!(sparsify(&mut model, &with(&["fc[", "*"], &[])).unwrap_err().to_string().contains("glob `fc[`"));
    assert_eq!(model.fc1.form(), "dense");
    assert_eq!(sparsify(&mut model, &with(&["fc*", "deep.*"], &["*.1"]))?, ["fc1", "fc2"]);
    assert_eq!(sparsify(&mut model, &SparsifyConfig::default())?, ["deep.1"]);
    // A layer that cannot be compressed leaves the others alone.
    swap_semi_sparse_linear_with_linear(&mut model)?;
    sparsify(&mut model, &with(&["fc2"], &[]))?;
    model.deep[1] = Some(Linear::new(tensor(&[4, 4], 1).to_dtype(DType::U32)?, None).into());
    let error = compress_linears(&mut model, DataType::BF16).unwrap_err().to_string();
    assert!(error.starts_with("layer `fc1`") || error.starts_with("layer `deep.1`"), "{error}");
    assert_eq!(model.fc2.form(), "sparse");
    model.deep.clear();
    // Swapped back, `fc1` is 2:4 still.
    assert_eq!(compress_linears(&mut model, DataType::BF16)?, ["fc1", "fc2"]);
    Ok(())
}

#[test]
fn masks_come_back_from_a_checkpoint() -> Result<()> {
    let settings = SparseSettings { refresh: Refresh::OnRequest, ..Default::default() };
    let config: std::collections::BTreeMap<_, _> = [("fc1".to_owned(), settings)].into();
    let (mut model, vars) = Mlp::new();
    swap_linear_with_semi_sparse_linear(&mut model, &config)?;
    model.fc1.forward(&tensor(&[1, 128], 3))?;
    let (saved, weight) = (masks(&mut model)?, model.fc1.effective_weight()?);
    vars[0].set(&tensor(&[256, 128], 70))?;
    let (mut other, other_vars) = Mlp::new();
    other_vars[0].set(&vars[0])?;
    swap_linear_with_semi_sparse_linear(&mut other, &config)?;
    load_masks(&mut other, &saved)?;
    assert_eq!(distance(&other.fc1.effective_weight()?, &model.fc1.effective_weight()?), 0.0);
    assert!(distance(&weight, &model.fc1.effective_weight()?) > 0.1);
    let AnyLinear::Sparse(layer) = &other.fc1 else { unreachable!() };
    assert_eq!(layer.forwards(), 1);
    // A dense mask and a missing one are refused.
    let mut bad = saved.clone();
    bad.insert("fc1.mask".into(), Tensor::full(u32::MAX, (256, 4), CPU)?);
    assert!(
        load_masks(&mut other, &bad).unwrap_err().to_string().starts_with("layer `fc1`: row 0, group 0: 4 non-zeros")
    );
    bad.insert("fc1.mask".into(), Tensor::full(0u32, (256, 2), CPU)?);
    assert!(load_masks(&mut other, &bad).unwrap_err().to_string().contains("`fc1.mask` is U32 [256, 2]"));
    bad.remove("fc1.mask");
    assert!(load_masks(&mut other, &bad).unwrap_err().to_string().contains("there is no `fc1.mask`"));
    Ok(())
}

#[test]
fn weights_are_pruned_while_they_load() -> Result<()> {
    let parameters =
        [("a.weight", tensor(&[8, 16], 1)), ("b.weight", tensor(&[8, 16], 2)), ("a.bias", tensor(&[8], 3))];
    let source: std::collections::HashMap<_, _> = parameters.into_iter().map(|(n, t)| (n.to_owned(), t)).collect();
    let (include, exclude) = (["*.weight".to_owned()], ["b.*".to_owned()]);
    let vb = prune_on_load(source, twofour::Pattern::TWO_FOUR, &include, &exclude, DType::F32, Device::Cpu)?;
    let a = candle_nn::linear(16, 8, vb.pp("a"))?;
    let expected = SparseLinear::new(tensor(&[8, 16], 1), None, SparseSettings::default())?.effective_weight()?;
    assert_eq!(distance(a.weight(), &expected), 0.0);
    assert_eq!(distance(a.bias().unwrap(), &tensor(&[8], 3)), 0.0);
    assert_eq!(distance(&vb.get((8, 16), "b.weight")?, &tensor(&[8, 16], 2)), 0.0);
    // What is 2:4 already can be compressed as it is.
    assert!(AnyLinear::from(a).compressed(DataType::F32).is_ok());
    Ok(())
}
