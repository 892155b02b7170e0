//! Gradients of the blocks against finite differences of a loss that is linear in the output.

use std::sync::Arc;

use twofour::layer::{Accumulate, MaskRule, SparseLinearSettings};
use twofour::select::Transposable;

use super::{
    Attention, AttentionOptions, BatchShape, Block, BlockHeads, BlockNorms, Branch, FeedForward, HeadNorms, Norm,
    Stream, Workspace,
};
use crate::{
    engine::{
        Kind, LayerOperations as _, LinearOperations as _, Memory as _, Nonlinearity, ScoreOptions,
        cpu::{CpuBuffer, CpuEngine},
    },
    linear::Linear,
    parameter::Parameter,
    parts::ModelParts,
    random,
};

const ENGINE: CpuEngine = CpuEngine;

fn random(len: usize, seed: u64) -> Vec<f32> {
    let stream = random::Stream::new(seed, "block tests");
    (0..len as u64).map(|i| stream.normal(i) as f32).collect()
}

fn buffer(values: &[f32]) -> CpuBuffer {
    let mut buffer = ENGINE.zeros(Kind::Compute, values.len()).unwrap();
    ENGINE.write(&mut buffer, values).unwrap();
    buffer
}

fn parameter(name: &str, shape: &[usize], deviation: f32, mean: f32, seed: u64) -> Parameter<CpuEngine> {
    let values: Vec<f32> = random(shape.iter().product(), seed).iter().map(|v| v * deviation + mean).collect();
    let mut parameter = Parameter::new(&ENGINE, name, shape, &values, true).unwrap();
    parameter.begin_training(&ENGINE).unwrap();
    parameter
}

fn linear(name: &str, out: usize, inputs: usize, seed: u64) -> Linear<CpuEngine> {
    let weight = parameter(&format!("{name}.weight"), &[out, inputs], 0.3, 0.0, seed);
    Linear::new(name, weight, Some(parameter(&format!("{name}.bias"), &[out], 0.3, 0.0, seed + 1))).unwrap()
}

fn norm(width: usize, seed: u64) -> Norm<CpuEngine> {
    let bias = parameter("norm.bias", &[width], 0.2, 0.0, seed + 1);
    Norm::new(parameter("norm.weight", &[width], 0.2, 1.0, seed), Some(bias), 1e-5).unwrap()
}

fn rms_norm(width: usize, seed: u64) -> Norm<CpuEngine> {
    named_rms_norm("norm", width, seed)
}

fn named_rms_norm(name: &str, width: usize, seed: u64) -> Norm<CpuEngine> {
    Norm::new(parameter(&format!("{name}.weight"), &[width], 0.2, 1.0, seed), None, 1e-5).unwrap()
}

/// A block as the tests see it.
trait AnyBlock {
    fn forward(&self, x: &[f32]) -> Vec<f32>;
    fn backward(&mut self, x: &[f32], dy: &[f32], accumulate: Accumulate) -> Vec<f32>;
    fn linears(&mut self) -> Vec<&mut Linear<CpuEngine>>;
    fn parameters(&mut self) -> Vec<&mut Parameter<CpuEngine>>;
}

const SHAPE: BatchShape = BatchShape { batch: 2, positions: 5 };

impl<B: Branch<CpuEngine>> AnyBlock for Block<CpuEngine, B> {
    fn forward(&self, x: &[f32]) -> Vec<f32> {
        let mut workspace = Workspace::default();
        let x = Stream::Plain(buffer(x));
        let (y, saved) = Block::forward(self, &ENGINE, &mut workspace, x, SHAPE, None).unwrap();
        Self::release(&ENGINE, saved, &mut workspace);
        ENGINE.read(y.x()).unwrap()
    }

    fn backward(&mut self, x: &[f32], dy: &[f32], accumulate: Accumulate) -> Vec<f32> {
        let mut workspace = Workspace::default();
        let x = Stream::Plain(buffer(x));
        let (_, saved) = Block::forward(self, &ENGINE, &mut workspace, x, SHAPE, None).unwrap();
        let dx = Block::backward(self, &ENGINE, &mut workspace, saved, buffer(dy), accumulate).unwrap();
        ENGINE.read(&dx).unwrap()
    }

    fn linears(&mut self) -> Vec<&mut Linear<CpuEngine>> {
        self.linears_mut().collect()
    }

    fn parameters(&mut self) -> Vec<&mut Parameter<CpuEngine>> {
        self.parameters_mut()
    }
}

fn block<B: Branch<CpuEngine> + 'static>(norms: BlockNorms<CpuEngine>, branch: B) -> Box<dyn AnyBlock> {
    Box::new(Block::new(norms, branch).unwrap())
}

fn feed_forward(function: Nonlinearity, is_gated: bool) -> FeedForward<CpuEngine> {
    let hidden = if is_gated { 32 } else { 16 };
    FeedForward::new(linear("up", hidden, 8, 9), linear("down", 8, 16, 11), function, is_gated).unwrap()
}

fn full_attention() -> Attention<CpuEngine> {
    let heads = BlockHeads { heads: 2, kv_heads: 2, head_dim: 4 };
    Attention::new(linear("qkv", 24, 8, 3), linear("out", 8, 8, 5), heads, AttentionOptions::full()).unwrap()
}

fn blocks() -> Vec<(&'static str, Box<dyn AnyBlock>)> {
    let rotary = Arc::new(ENGINE.rotary(8, &[1.0, 0.01]).unwrap());
    let heads = BlockHeads { heads: 2, kv_heads: 2, head_dim: 4 };
    let attention = Attention::new(
        linear("qkv", 24, 8, 3),
        linear("out", 8, 8, 5),
        heads,
        AttentionOptions::causal(rotary.clone()),
    );
    // Four heads of queries for two of keys and values, wider together than the residual stream.
    let heads = BlockHeads { heads: 4, kv_heads: 2, head_dim: 4 };
    let grouped = || {
        let options = AttentionOptions::causal(rotary.clone());
        Attention::new(linear("qkv", 32, 8, 3), linear("out", 8, 16, 5), heads, options).unwrap()
    };
    let mut all = vec![
        ("attention", block(BlockNorms::pre(norm(8, 1)), attention.unwrap())),
        ("grouped", block(BlockNorms::pre(rms_norm(8, 1)), grouped())),
    ];
    let plain = [
        ("gelu", Nonlinearity::Gelu),
        ("gelu by tanh", Nonlinearity::TanhGelu),
        ("silu", Nonlinearity::Silu),
        ("squared relu", Nonlinearity::SquaredRelu),
    ];
    for (name, function) in plain {
        all.push((name, block(BlockNorms::pre(norm(8, 7)), feed_forward(function, false))));
    }
    let gated =
        [("swiglu", Nonlinearity::Silu), ("geglu", Nonlinearity::TanhGelu), ("sreglu", Nonlinearity::SquaredRelu)];
    for (name, function) in gated {
        all.push((name, block(BlockNorms::pre(rms_norm(8, 7)), feed_forward(function, true))));
    }
    let scores = ScoreOptions { window: Some(2), scale: Some(0.4), soft_cap: Some(0.8) };
    let options = AttentionOptions { scores, ..AttentionOptions::causal(rotary.clone()) };
    let bounded = Attention::new(linear("qkv", 32, 8, 3), linear("out", 8, 16, 5), heads, options).unwrap();
    all.push(("window, scale, soft cap", block(BlockNorms::pre(rms_norm(8, 1)), bounded)));
    let head_norms = || HeadNorms::new(named_rms_norm("query_norm", 4, 41), named_rms_norm("key_norm", 4, 43));
    all.push(("head norms", block(BlockNorms::pre(rms_norm(8, 1)), grouped().with_norms(head_norms()).unwrap())));
    all.push(("post-norm attention", block(BlockNorms::post(norm(8, 1)), full_attention())));
    all.push(("post-norm feed-forward", block(BlockNorms::post(norm(8, 7)), feed_forward(Nonlinearity::Gelu, false))));
    let sandwich = || BlockNorms::sandwich(rms_norm(8, 1), norm(8, 7));
    all.push(("sandwiched attention", block(sandwich(), full_attention())));
    all.push(("sandwiched feed-forward", block(sandwich(), feed_forward(Nonlinearity::Gelu, false))));
    all
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// The derivative of a function along a direction from a point, and what the gradient says it is.
fn check(what: &str, point: &[f32], gradient: &[f32], mut loss: impl FnMut(&[f32]) -> f64) {
    for seed in 0..3 {
        // Half along the gradient, so that the derivative is large; half in a random direction.
        let norm = dot(gradient, gradient).sqrt() as f32;
        assert!(norm > 0.0 && norm.is_finite(), "{what}: a gradient of norm {norm}");
        let other = random(point.len(), 100 + seed);
        let length = dot(&other, &other).sqrt() as f32;
        let direction: Vec<f32> = gradient.iter().zip(&other).map(|(g, o)| g / norm + o / length).collect();
        let h = 5e-3f32;
        let mut along = |by: f32| loss(&point.iter().zip(&direction).map(|(p, d)| p + by * d).collect::<Vec<_>>());
        let numeric = (along(h) - along(-h)) / f64::from(2.0 * h);
        let expected = dot(gradient, &direction);
        assert!(
            (numeric - expected).abs() < 1e-2 * expected.abs().max(0.1),
            "{what}: {numeric}, by the gradient {expected}"
        );
    }
}

fn gradients_agree(name: &str, block: &mut dyn AnyBlock) {
    let n = SHAPE.tokens() * 8;
    let (x, dy) = (random(n, 21), random(n, 22));
    let dx = block.backward(&x, &dy, Accumulate::Overwrite);
    check(&format!("{name}: x"), &x, &dx, |x| dot(&block.forward(x), &dy));
    let count = block.parameters().len();
    for index in 0..count {
        let parameters = block.parameters();
        let parameter = &parameters[index];
        let what = format!("{name}: {}", parameter.name());
        let values = ENGINE.read(parameter.master()).unwrap();
        let gradient = ENGINE.read(parameter.gradient().unwrap()).unwrap();
        check(&what, &values, &gradient, |moved| {
            block.parameters()[index].write(&ENGINE, moved).unwrap();
            block.linears().into_iter().for_each(|linear| linear.refresh(&CpuEngine, false).unwrap());
            dot(&block.forward(&x), &dy)
        });
        block.parameters()[index].write(&ENGINE, &values).unwrap();
        block.linears().into_iter().for_each(|linear| linear.refresh(&CpuEngine, false).unwrap());
    }
}

#[test]
fn gradients_of_dense_blocks_agree_with_finite_differences() {
    for (name, mut block) in blocks() {
        gradients_agree(name, &mut *block);
    }
}

/// With the masked weight gradient, the gradient is that of the loss as a function of the master under a mask that
/// stays.
#[test]
fn gradients_of_sparse_blocks_agree_with_finite_differences() {
    for rule in [MaskRule::Magnitude, MaskRule::Transposable(Transposable::GreedyAbs)] {
        for (name, mut block) in blocks() {
            let weight_gradient = twofour::layer::WeightGradient::Masked;
            let settings = SparseLinearSettings { rule, weight_gradient, ..Default::default() };
            block.linears().into_iter().for_each(|linear| linear.make_sparse(&ENGINE, settings, 1).unwrap());
            gradients_agree(&format!("{name}, {rule:?}"), &mut *block);
        }
    }
}

#[test]
fn a_sparse_block_is_the_dense_one_with_masked_weights() {
    for (name, mut block) in blocks() {
        let settings = SparseLinearSettings::default();
        block.linears().into_iter().for_each(|linear| linear.make_sparse(&ENGINE, settings, 1).unwrap());
        let n = SHAPE.tokens() * 8;
        let (x, dy) = (random(n, 21), random(n, 22));
        let gradients = |block: &mut dyn AnyBlock| -> Vec<f32> {
            let mut all = block.backward(&x, &dy, Accumulate::Overwrite);
            for parameter in block.parameters() {
                all.extend(ENGINE.read(parameter.gradient().unwrap()).unwrap());
            }
            all
        };
        let (y, sparse) = (block.forward(&x), gradients(&mut *block));
        for linear in block.linears() {
            use crate::engine::SparseLayer as _;
            let mask = linear.sparse().unwrap().mask().unwrap();
            let master = ENGINE.read(linear.weight().master()).unwrap();
            let matrix = twofour::MatrixRef::new(mask.rows(), mask.cols(), &master).unwrap();
            let masked = mask.apply(matrix).unwrap();
            linear.make_dense(&ENGINE).unwrap();
            linear.parameters_mut().next().unwrap().write(&ENGINE, &masked).unwrap();
        }
        let (expected_y, expected) = (block.forward(&x), gradients(&mut *block));
        let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(distance(&y, &expected_y) < 1e-4 && distance(&sparse, &expected) < 1e-3, "{name}");
    }
}

/// Pruned, the hidden layer is another constant to the second layer, and the first one's gradient is that of an
/// activation that is not pruned.
#[test]
fn a_block_with_a_pruned_activation_is_the_dense_one_of_what_is_kept() {
    use twofour::{MatrixRef, select};
    for rule in [Transposable::GreedyAbs, Transposable::Optimal] {
        let block = || Block::new(BlockNorms::pre(norm(8, 7)), feed_forward(Nonlinearity::SquaredRelu, false)).unwrap();
        let (mut dense, mut pruned) = (block(), block());
        pruned.branch.down.make_input_sparse(&ENGINE, rule).unwrap();
        let (tokens, n) = (SHAPE.tokens(), SHAPE.tokens() * 8);
        let (x, dy) = (random(n, 21), random(n, 22));
        // The hidden layer, by the parts of the dense block.
        let mut workspace = Workspace::default();
        let (normalized, _) =
            dense.norms.before().unwrap().forward(&ENGINE, &mut workspace, &buffer(&x), tokens).unwrap();
        let mut hidden = buffer(&vec![0.0; tokens * 16]);
        dense.branch.up.forward(&ENGINE, &normalized, tokens, &mut hidden).unwrap();
        let squared: Vec<f32> = ENGINE.read(&hidden).unwrap().iter().map(|v| v.max(0.0).powi(2)).collect();
        let matrix = MatrixRef::new(tokens, 16, &squared).unwrap();
        let kept = select::transposable(matrix, rule).unwrap().apply(matrix).unwrap();
        assert!(kept != squared);
        let mut expected = buffer(&vec![0.0; n]);
        dense.branch.down.forward(&ENGINE, &buffer(&kept), tokens, &mut expected).unwrap();
        ENGINE.add(&buffer(&x), &mut expected).unwrap();
        let distance = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        let y = AnyBlock::forward(&pruned, &x);
        assert!(distance(&y, &ENGINE.read(&expected).unwrap()) < 1e-5, "{rule:?}");
        for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
            let found = AnyBlock::backward(&mut pruned, &x, &dy, accumulate);
            assert_eq!(found, AnyBlock::backward(&mut dense, &x, &dy, accumulate), "{rule:?}");
        }
        let gradients = |block: &mut Block<CpuEngine, FeedForward<CpuEngine>>| -> Vec<Vec<f32>> {
            AnyBlock::parameters(block).iter().map(|p| ENGINE.read(p.gradient().unwrap()).unwrap()).collect()
        };
        let (found, mut wanted) = (gradients(&mut pruned), gradients(&mut dense));
        // Norm, up, down: the weight of the last one, twice.
        let mut weight = buffer(&vec![0.0; 8 * 16]);
        let shape = crate::engine::LinearShape { tokens, out_features: 8, in_features: 16 };
        for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
            ENGINE.weight_gradient(shape, &buffer(&dy), &buffer(&kept), accumulate, &mut weight).unwrap();
        }
        wanted[4] = ENGINE.read(&weight).unwrap();
        for (index, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert!(distance(found, wanted) < 1e-4, "{rule:?}, parameter {index}");
        }
    }
}

/// A residual addition that is made with the norm behind it has the bits of a block and a norm apart, and the backward
/// pass reads the same.
#[test]
fn a_block_between_norms_has_the_bits_of_the_block_and_the_norms() {
    let tokens = SHAPE.tokens();
    let (x, dy) = (random(tokens * 8, 21), random(tokens * 8, 22));
    let read = |buffer: &CpuBuffer| ENGINE.read(buffer).unwrap();
    for next in [norm(8, 31), rms_norm(8, 31)] {
        let feed_forward = || feed_forward(Nonlinearity::Gelu, false);
        let mut workspace = Workspace::default();
        let ws = &mut workspace;
        macro_rules! compare {
            ($block:expr) => {{
                let (mut apart, mut between) = ($block.unwrap(), $block.unwrap());
                let (y, saved) = apart.forward(&ENGINE, ws, Stream::Plain(buffer(&x)), SHAPE, None).unwrap();
                let (normalized, _) = next.forward(&ENGINE, ws, y.x(), tokens).unwrap();
                let dx = apart.backward(&ENGINE, ws, saved, buffer(&dy), Accumulate::Overwrite).unwrap();
                let input = Stream::Plain(buffer(&x)).through(&ENGINE, ws, between.norms.before(), tokens).unwrap();
                let (output, saved) = between.forward(&ENGINE, ws, input, SHAPE, Some(&next)).unwrap();
                assert!(read(output.x()) == read(y.x()) && read(output.read()) == read(&normalized));
                let found = between.backward(&ENGINE, ws, saved, buffer(&dy), Accumulate::Overwrite).unwrap();
                assert_eq!(read(&found), read(&dx));
                for (a, b) in apart.parameters_mut().into_iter().zip(between.parameters_mut()) {
                    assert_eq!(read(a.gradient().unwrap()), read(b.gradient().unwrap()), "{}", a.name());
                }
            }};
        }
        compare!(Block::new(BlockNorms::pre(norm(8, 1)), full_attention()));
        compare!(Block::new(BlockNorms::pre(rms_norm(8, 7)), feed_forward()));
        compare!(Block::new(BlockNorms::sandwich(rms_norm(8, 7), norm(8, 1)), feed_forward()));
    }
}

#[test]
fn gradients_are_added_where_asked() {
    for (name, mut block) in blocks() {
        let n = SHAPE.tokens() * 8;
        let (x, dy) = (random(n, 21), random(n, 22));
        block.backward(&x, &dy, Accumulate::Overwrite);
        let read = |block: &mut dyn AnyBlock| -> Vec<f32> {
            let all = block.parameters();
            all.iter().flat_map(|p| ENGINE.read(p.gradient().unwrap()).unwrap()).collect()
        };
        let once = read(&mut *block);
        block.backward(&x, &dy, Accumulate::Add);
        assert!(read(&mut *block).iter().zip(&once).all(|(twice, once)| *twice == 2.0 * once), "{name}");
    }
}
