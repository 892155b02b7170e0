//! The optimizer against candle's, and what it refuses.

use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use candle_nn::Optimizer;

use super::{AdamW, AdamWConfig};
use crate::Error;

fn var(len: usize, seed: f32, dtype: DType) -> Var {
    let data: Vec<f32> = (0..len).map(|i| (i as f32 * 0.37 + seed).sin()).collect();
    Var::from_tensor(&Tensor::from_vec(data, len, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()).unwrap()
}

/// Gradients of a loss in which each element has a different slope.
fn gradients(vars: &[Var], step: usize) -> GradStore {
    let losses: Vec<Tensor> = vars
        .iter()
        .map(|v| {
            let slope = var(v.elem_count(), step as f32, v.dtype());
            (v.sqr().unwrap() * slope.as_tensor()).unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap()
        })
        .collect();
    losses.into_iter().reduce(|a, b| (a + b).unwrap()).unwrap().backward().unwrap()
}

fn named(vars: &[Var]) -> Vec<(String, Var)> {
    vars.iter().enumerate().map(|(i, v)| (format!("p{i}"), v.clone())).collect()
}

fn distance(a: &Var, b: &Var) -> f32 {
    let (a, b) = (a.to_vec1::<f32>().unwrap(), b.to_vec1::<f32>().unwrap());
    a.iter().zip(b).fold(0.0, |m, (a, b)| m.max((a - b).abs()))
}

#[test]
fn agrees_with_candles_over_many_steps() {
    let ours = [var(40_000, 0.0, DType::F32), var(7, 1.0, DType::F32)];
    let theirs = [var(40_000, 0.0, DType::F32), var(7, 1.0, DType::F32)];
    let config = AdamWConfig { learning_rate: 1e-2, weight_decay: 0.1, ..Default::default() };
    let mut a = AdamW::new(named(&ours), config).unwrap();
    let params = candle_nn::ParamsAdamW { lr: 1e-2, weight_decay: 0.1, ..Default::default() };
    let mut b = candle_nn::AdamW::new(theirs.to_vec(), params).unwrap();
    for step in 0..30 {
        // The same gradients for both, so that differences do not feed on themselves.
        let grads = gradients(&theirs, step);
        let mut same = gradients(&ours, step);
        for (o, t) in ours.iter().zip(&theirs) {
            same.insert(o, grads.get(t).unwrap().clone());
        }
        a.step(&same).unwrap();
        b.step(&grads).unwrap();
        for (o, t) in ours.iter().zip(&theirs) {
            assert!(distance(o, t) < 1e-6, "step {step}: {}", distance(o, t));
        }
    }
    assert!(distance(&ours[1], &var(7, 1.0, DType::F32)) > 0.05);
}

#[test]
fn half_precision_parameters_keep_f32_moments() {
    let half = [var(500, 0.5, DType::BF16)];
    let full = [Var::from_tensor(&half[0].to_dtype(DType::F32).unwrap()).unwrap()];
    let config = AdamWConfig { learning_rate: 0.05, ..Default::default() };
    let (mut a, mut b) = (AdamW::new(named(&half), config).unwrap(), AdamW::new(named(&full), config).unwrap());
    for step in 0..5 {
        a.step(&gradients(&half, step)).unwrap();
        b.step(&gradients(&full, step)).unwrap();
    }
    let widened = Var::from_tensor(&half[0].to_dtype(DType::F32).unwrap()).unwrap();
    assert!(distance(&widened, &full[0]) < 0.02);
    assert_eq!(a.state().unwrap()["p0.first_moment"].dtype(), DType::F32);
}

#[test]
fn it_is_an_optimizer_of_candle() {
    fn train<O: Optimizer<Config = AdamWConfig>>(vars: &[Var]) -> O {
        let mut optimizer = O::new(vars.to_vec(), AdamWConfig::default()).unwrap();
        optimizer.set_learning_rate(0.02);
        (0..3).for_each(|step| optimizer.step(&gradients(vars, step)).unwrap());
        optimizer
    }
    let (generic, own) = ([var(60, 0.0, DType::F32)], [var(60, 0.0, DType::F32)]);
    let config = AdamWConfig { learning_rate: 0.02, ..Default::default() };
    let mut optimizer = AdamW::new(named(&own), config).unwrap();
    (0..3).for_each(|step| optimizer.step(&gradients(&own, step)).unwrap());
    let found: AdamW = train(&generic);
    assert_eq!((Optimizer::learning_rate(&found), found.steps()), (0.02, 3));
    assert_eq!(distance(&generic[0], &own[0]), 0.0);
}

#[test]
fn clipping_scales_by_the_global_norm() {
    let vars = [var(100, 0.0, DType::F32), var(30, 2.0, DType::F32)];
    let grads = gradients(&vars, 1);
    let all: Vec<f32> = vars.iter().flat_map(|v| grads.get(v).unwrap().to_vec1::<f32>().unwrap()).collect();
    let expected = all.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    // No epsilon-free quantity shows the scale but the moments.
    let mut optimizer = AdamW::new(named(&vars), AdamWConfig::default()).unwrap();
    let norm = optimizer.step_clipped(&grads, expected / 4.0).unwrap();
    assert!((norm - expected).abs() < 1e-9 * expected);
    let first: Vec<f32> = ["p0", "p1"]
        .iter()
        .flat_map(|p| optimizer.state().unwrap()[&format!("{p}.first_moment")].to_vec1::<f32>().unwrap())
        .collect();
    assert!(first.iter().zip(&all).all(|(m, g)| (m - 0.1 * g / 4.0).abs() < 1e-6));
    // Below the limit nothing is scaled.
    let mut optimizer = AdamW::new(named(&vars), AdamWConfig::default()).unwrap();
    optimizer.step_clipped(&grads, f64::INFINITY).unwrap();
    let first = optimizer.state().unwrap()["p1.first_moment"].to_vec1::<f32>().unwrap();
    assert!(first.iter().zip(&all[100..]).all(|(m, g)| (m - 0.1 * g).abs() < 1e-6));
    assert!(optimizer.step_clipped(&grads, f64::NAN).is_err() && optimizer.step_clipped(&grads, 0.0).is_err());
}

#[test]
fn bad_gradients_update_nothing() {
    let vars = [var(10, 0.0, DType::F32), var(4, 1.0, DType::F32)];
    let before = var(10, 0.0, DType::F32);
    let mut optimizer = AdamW::new(named(&vars), AdamWConfig::default()).unwrap();
    let mut grads = gradients(&vars, 0);
    grads.insert(&vars[1], Tensor::new(&[1f32, f32::NAN, 0.0, 0.0], &Device::Cpu).unwrap());
    let error = optimizer.step_clipped(&grads, 1.0).unwrap_err();
    assert!(matches!(&error, Error::NonFiniteGradient { parameter } if parameter == "p1"), "{error}");
    grads.insert(&vars[1], Tensor::zeros(5, DType::F32, &Device::Cpu).unwrap());
    assert!(matches!(optimizer.step(&grads), Err(Error::InLayer { .. })));
    grads.insert(&vars[1], Tensor::zeros(4, DType::F64, &Device::Cpu).unwrap());
    assert!(matches!(optimizer.step(&grads), Err(Error::InLayer { .. })));
    grads.remove(&vars[1]);
    let error = optimizer.step(&grads).unwrap_err().to_string();
    assert!(error.contains("no gradient arrived for p1"), "{error}");
    assert_eq!((distance(&vars[0], &before), optimizer.steps()), (0.0, 0));
    assert!(optimizer.add([("again".to_owned(), vars[0].clone())], 0.0).is_err());
    assert!(AdamW::new(named(&[]), AdamWConfig { beta2: 1.0, ..Default::default() }).is_err());
    assert!(AdamW::new(named(&[]), AdamWConfig { epsilon: f64::NAN, ..Default::default() }).is_err());
}

#[test]
fn resuming_is_exact() {
    let vars = [var(50, 0.0, DType::F32)];
    let mut through = AdamW::new(named(&vars), AdamWConfig::default()).unwrap();
    (0..3).for_each(|s| through.step(&gradients(&vars, s)).unwrap());
    let (state, saved) = (through.state().unwrap(), [Var::from_tensor(&vars[0].copy().unwrap()).unwrap()]);
    (3..6).for_each(|s| through.step(&gradients(&vars, s)).unwrap());
    let mut resumed = AdamW::new(named(&saved), AdamWConfig::default()).unwrap();
    resumed.load_state(&state).unwrap();
    (3..6).for_each(|s| resumed.step(&gradients(&saved, s)).unwrap());
    assert_eq!((distance(&vars[0], &saved[0]), resumed.steps()), (0.0, 6));
    let mut other = AdamW::new(named(&[var(51, 0.0, DType::F32)]), AdamWConfig::default()).unwrap();
    assert!(other.load_state(&state).unwrap_err().to_string().contains("`p0.first_moment` is F32 [50], not F32 [51]"));
}
