//! What a training step's parts cost: AdamW against candle's, a sparse layer's step against the dense one's.
//!
//! `cargo bench -p twofour-candle --bench training`

use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use candle_nn::{Linear, Module, Optimizer};
use twofour::select::Transposable;
use twofour_candle::linear::{AnyLinear, InputGradient, MaskRule, SparseSettings};
use twofour_candle::optim::{AdamW, AdamWConfig};

fn main() {
    divan::main();
}

fn random(shape: (usize, usize)) -> Var {
    Var::from_tensor(&Tensor::randn(0f32, 1.0, shape, &Device::Cpu).unwrap()).unwrap()
}

/// Twelve matrices, 7 million elements: the weights of a few blocks of a small GPT.
fn parameters() -> (Vec<Var>, GradStore) {
    let vars: Vec<Var> = (0..12).map(|_| random((768, 768))).collect();
    let sum = vars.iter().map(|v| v.sum_all().unwrap()).reduce(|a, b| (a + b).unwrap()).unwrap();
    let mut grads = sum.backward().unwrap();
    for var in &vars {
        grads.insert(var, Tensor::randn(0f32, 1.0, (768, 768), &Device::Cpu).unwrap());
    }
    (vars, grads)
}

#[divan::bench]
fn adamw(bencher: divan::Bencher) {
    let (vars, grads) = parameters();
    let named = vars.iter().enumerate().map(|(i, v)| (i.to_string(), v.clone()));
    let mut optimizer = AdamW::new(named, AdamWConfig::default()).unwrap();
    bencher.bench_local(|| optimizer.step(&grads).unwrap());
}

#[divan::bench]
fn adamw_of_candle(bencher: divan::Bencher) {
    let (vars, grads) = parameters();
    let mut optimizer = candle_nn::AdamW::new_lr(vars, 1e-3).unwrap();
    bencher.bench_local(|| optimizer.step(&grads).unwrap());
}

#[derive(Debug, Clone, Copy)]
enum Form {
    CandleDense,
    Dense,
    Sparse,
    Transposable,
    PackedTranspose,
}

/// Forward and backward of a [768, 3072] layer over 512 tokens.
#[divan::bench(args = [Form::CandleDense, Form::Dense, Form::Sparse, Form::Transposable, Form::PackedTranspose])]
fn layer_step(bencher: divan::Bencher, form: Form) {
    let (x, weight) = (random((512, 3072)), random((768, 3072)));
    let candle = Linear::new(weight.as_tensor().clone(), None);
    let any = AnyLinear::from(candle.clone());
    let rule = MaskRule::Transposable(Transposable::GreedyAbs);
    let settings = SparseSettings { rule, ..Default::default() };
    let layer: Box<dyn Module> = match form {
        Form::CandleDense => Box::new(candle),
        Form::Dense => Box::new(any),
        Form::Sparse => Box::new(any.sparse(SparseSettings::default()).unwrap()),
        Form::Transposable => Box::new(any.sparse(settings).unwrap()),
        Form::PackedTranspose => {
            Box::new(any.sparse(SparseSettings { input_gradient: InputGradient::PackedTranspose, ..settings }).unwrap())
        }
    };
    let slope = Tensor::randn(0f32, 1.0, (512, 768), &Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    bencher.bench_local(|| (layer.forward(&x).unwrap() * &slope).unwrap().sum_all().unwrap().backward().unwrap());
}
