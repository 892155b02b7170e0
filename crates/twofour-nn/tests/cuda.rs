//! On a device: training on the GPU against training on the CPU. Without a device the tests skip; with
//! `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

mod support;

use twofour::{
    DataType, Mask, MatrixRef,
    layer::{MaskRule, SparseLinearSettings, WeightGradient},
    select::Transposable,
};
use twofour_nn::{
    linear::SparsePrecision,
    model::{
        AttentionConfig, BlockTexts, BlockTuning, Checkpoint, DistillationLoss, FeedForwardConfig, Gpt, ModelInput,
        ModelOutput, NormConfig, NormPlace, PrunedBlock, TokenInput, TransformerConfig,
    },
    recipe::{DecayTarget, Method, ModelKind, ModelSettings, OptimizerKind, SwitchMean, TrainingSettings},
    train::{BlockNorm, Decay, LevelSchedule, SparseBegin, SparsifierPlan, SparsifierRule, SparsityPlan, Trainer},
};
use twofour_transformer::engine::{
    AdamWStep, Engine, ErrorMeasure, Kept, Kind, LinearOperations as _, Memory as _, Nonlinearity, NormGradients,
    NormInput, NormParameters, NormStatistics, OptimizerStep, ParameterState, PrunedDecay, SecondMoment, SgdStep,
    SparseLayer as _, StepOperations as _, cpu::CpuEngine, cuda::CudaEngine,
};

use support::{buffer, checkpoints::directory, corpus, engine, expect_alike, gradients, layers};

fn model() -> ModelSettings {
    ModelSettings {
        kind: ModelKind::Gpt,
        layers: 2,
        width: 128,
        heads: 4,
        kv_heads: None,
        context: 64,
        feed_forward: Some(256),
        ..Default::default()
    }
}

fn training() -> TrainingSettings {
    TrainingSettings { batch: 4, micro_batch: Some(2), steps: 60, warm_up: 4, seed: 9, ..Default::default() }
}

fn down() -> Vec<String> {
    layers().into_iter().filter(|name| name.ends_with("down")).collect()
}

fn trainer<E: Engine>(engine: E, plan: &SparsityPlan) -> Trainer<E> {
    with_settings(engine, plan, &training())
}

fn with_settings<E: Engine>(engine: E, plan: &SparsityPlan, settings: &TrainingSettings) -> Trainer<E> {
    Trainer::new(engine, &model(), settings, plan.clone(), corpus()).unwrap()
}

/// Plans of every method.
fn plans() -> Vec<(&'static str, SparsityPlan)> {
    let of = |method| SparsityPlan::of_method(method, layers(), 60);
    vec![
        ("dense", of(Method::DENSE)),
        ("fixed", of(Method::FIXED)),
        ("ste", of(Method::STE)),
        (
            "ste, transposable",
            SparsityPlan { rule: MaskRule::Transposable(Transposable::GreedyAbs), ..of(Method::STE) },
        ),
        ("sr-ste", of(Method::SR_STE)),
        ("fst", SparsityPlan { mask_every: 3, end: Some(15), ..of(Method::FST) }),
        ("s-ste", of(Method::S_STE)),
        (
            "ste, decay of weights",
            SparsityPlan { decay: Some(Decay { strength: 2.0, target: DecayTarget::Weight }), ..of(Method::STE) },
        ),
        ("step", step_switching_after(12)),
        ("step, option 2", SparsityPlan { switch_mean: SwitchMean::Geometric, ..step_switching_after(12) }),
        (
            "gradual",
            SparsityPlan {
                begin: SparseBegin::Step(3),
                two_of_four_from: Some(8),
                observes: true,
                ..of(Method::GRADUAL)
            },
        ),
        ("fst and others", mixed()),
        ("activation", SparsityPlan { end: Some(15), ..SparsityPlan::of_method(Method::ACTIVATION, down(), 60) }),
        ("s-ste, fp8", SparsityPlan { precision: SparsePrecision::Fp8, ..of(Method::S_STE) }),
        ("fst, fp8", SparsityPlan { precision: SparsePrecision::Fp8, mask_every: 3, ..of(Method::FST) }),
        (
            "sparsifier",
            SparsityPlan {
                sparsifier: Some(blocks()),
                mask_every: 5,
                begin: SparseBegin::Step(1),
                ..of(Method::SPARSIFIER)
            },
        ),
        (
            "sparsifier, in place",
            SparsityPlan {
                sparsifier: Some(in_place()),
                weight_gradient: WeightGradient::Masked,
                mask_every: 0,
                ..of(Method::SPARSIFIER)
            },
        ),
    ]
}

/// Masks of blocks, whose level rises.
fn blocks() -> SparsifierPlan {
    let rule = SparsifierRule::WeightNorm { block: [4, 4], zeros: 12, norm: BlockNorm::L2 };
    let schedule = LevelSchedule::Cubic { start_level: 0.2, start: 1, steps: 14 };
    SparsifierPlan { rule, level: 0.75, schedule, ..SparsifierPlan::TWO_OF_FOUR }
}

/// Unstructured masks in two rises, whose pruned weights stay zero.
fn in_place() -> SparsifierPlan {
    let schedule = LevelSchedule::Iterative { start: 0, every: 6, rounds: 2 };
    SparsifierPlan {
        rule: SparsifierRule::Unstructured,
        level: 0.5,
        schedule,
        in_place: true,
        ..SparsifierPlan::TWO_OF_FOUR
    }
}

/// FST, but for one layer that has another method, and one that becomes 2:4 later.
fn mixed() -> SparsityPlan {
    let of = |method, name: &str| SparsityPlan::of_method(method, vec![name.to_owned()], 60);
    let late = SparsityPlan { begin: SparseBegin::Step(6), ..of(Method::STE, "blocks.1.attn.qkv") };
    SparsityPlan {
        mask_every: 3,
        overrides: vec![of(Method::S_STE, "blocks.0.mlp.down"), late],
        ..of(Method::FST, "blocks.0.mlp.up")
    }
}

/// STEP whose layers become 2:4 after the update past that number, so that a short test sees its second moments watched
/// and then frozen.
fn step_switching_after(latest: u64) -> SparsityPlan {
    let begin = SparseBegin::Settled { earliest: latest, latest };
    SparsityPlan { begin, ..SparsityPlan::of_method(Method::STEP, layers(), 60) }
}

fn masks<E: Engine>(trainer: &Trainer<E>) -> Vec<twofour::Mask> {
    trainer.model().linears().filter_map(|linear| linear.mask().unwrap()).collect()
}

/// A LLaMA's operations: root-mean-square norm, grouped queries, SwiGLU.
#[test]
fn a_llama_trains_as_on_the_cpu() {
    let settings = ModelSettings { kind: ModelKind::Llama, kv_heads: Some(2), ..model() };
    for method in [Method::DENSE, Method::STE] {
        let plan = SparsityPlan::of_method(method, layers(), 60);
        let Some(engine) = engine(DataType::BF16) else { return };
        let mut cpu = Trainer::new(CpuEngine, &settings, &training(), plan.clone(), corpus()).unwrap();
        let mut cuda = Trainer::new(engine, &settings, &training(), plan, corpus()).unwrap();
        assert_eq!(masks(&cpu), masks(&cuda), "{method:?}");
        expect_alike(method.name(), (&mut cpu, &mut cuda), 20, [0.01, 0.05], None);
    }
}

/// A student of a teacher with other weights; the steps are captured with the teacher's pass.
#[test]
fn students_learn_as_on_the_cpu() {
    let settings = ModelSettings { kind: ModelKind::Llama, kv_heads: Some(2), ..model() };
    let loss = DistillationLoss { divergence: 1.0, cross_entropy: 0.3, hidden: 0.5 };
    for method in [Method::DENSE, Method::FIXED] {
        let plan = SparsityPlan::of_method(method, layers(), 60);
        let (Some(one), Some(other)) = (engine(DataType::BF16), engine(DataType::BF16)) else { return };
        other.capture_steps(false);
        let mut cpu = student(CpuEngine, &settings, &plan, loss);
        let mut cuda = student(one, &settings, &plan, loss);
        let mut launched = student(other, &settings, &plan, loss);
        for step in 0..20 {
            let (a, b, c) = (cpu.step().unwrap(), cuda.step().unwrap(), launched.step().unwrap());
            assert!((a.loss - b.loss).abs() < 0.02 * a.loss, "{method:?}, step {step}: {a:?}, {b:?}");
            let norms = (a.gradient_norm, b.gradient_norm);
            assert!((norms.0 - norms.1).abs() < 0.05 * norms.0, "{method:?}, step {step}: {a:?}, {b:?}");
            assert_eq!((b.loss.to_bits(), b.gradient_norm.to_bits()), (c.loss.to_bits(), c.gradient_norm.to_bits()));
            // While weights are the same.
            let gradients = (step == 0).then(|| gradients(&cpu, &cuda));
            for (name, size, apart) in gradients.into_iter().flatten() {
                assert!(apart < 0.05 * size + 0.002 * a.gradient_norm, "{method:?}, {name}: {apart} of {size}");
            }
        }
        assert!(masters(&cuda) == masters(&launched), "{method:?}");
        assert!(cuda.engine().replayed_steps() > 10 && cuda.take_note().is_none(), "{method:?}");
    }
}

fn student<E: Engine>(engine: E, model: &ModelSettings, plan: &SparsityPlan, loss: DistillationLoss) -> Trainer<E> {
    let trainer = Trainer::new(engine, model, &training(), plan.clone(), corpus()).unwrap();
    let teacher = Gpt::new(trainer.engine(), trainer.model().config().clone(), 77).unwrap();
    trainer.learn_from(teacher, loss).unwrap()
}

/// Causal attention with two heads of 64, with keys of their own or shared, over a context that no tile of attention
/// divides. Dense, because new masks make large differences of rounding.
#[test]
fn heads_of_64_train_as_on_the_cpu() {
    for (kind, kv_heads) in [(ModelKind::Gpt, None), (ModelKind::Llama, Some(1))] {
        let settings = ModelSettings { kind, heads: 2, kv_heads, context: 150, ..model() };
        let plan = SparsityPlan::dense();
        let Some(engine) = engine(DataType::BF16) else { return };
        let mut cpu = Trainer::new(CpuEngine, &settings, &training(), plan.clone(), corpus()).unwrap();
        let mut cuda = Trainer::new(engine, &settings, &training(), plan, corpus()).unwrap();
        let (trainers, of_gradients) = ((&mut cpu, &mut cuda), Some([0.05, 0.002]));
        expect_alike(&format!("{kind:?}"), trainers, 10, [0.01, 0.05], of_gradients);
    }
}

/// Gemma 2's options: bounded scores of attention and of tokens, windows, norms around blocks, scaled embeddings.
fn gemma() -> TransformerConfig {
    let settings = ModelSettings { kind: ModelKind::Llama, kv_heads: Some(2), ..model() };
    let base = TransformerConfig::from(&settings);
    let input = TokenInput { scale: Some(11.5), ..*base.tokens().unwrap() };
    let windows = vec![Some(17), None];
    TransformerConfig {
        input: ModelInput::Tokens(input),
        attention: AttentionConfig { scale: Some(0.2), soft_cap: Some(0.5), windows, ..base.attention },
        norm: NormConfig { place: NormPlace::Around, ..base.norm },
        feed_forward: FeedForwardConfig { activation: Nonlinearity::TanhGelu, ..base.feed_forward },
        // Low enough that it bends the scores of a model with random weights.
        output: ModelOutput::Vocabulary { tied: true, soft_cap: Some(0.4) },
        ..base
    }
}

#[test]
fn a_gemma_2_trains_as_on_the_cpu() {
    let cases = [
        (DataType::F32, Method::DENSE, 1e-3, 1e-2),
        (DataType::BF16, Method::DENSE, 0.01, 0.05),
        (DataType::BF16, Method::STE, 0.01, 0.05),
    ];
    for (compute, method, of_loss, of_norm) in cases {
        let Some(engine) = engine(compute) else { return };
        let plan = SparsityPlan::of_method(method, if method == Method::DENSE { vec![] } else { layers() }, 60);
        let cpu = Gpt::new(&CpuEngine, gemma(), 9).unwrap();
        let mut cpu = Trainer::with_model(CpuEngine, cpu, &training(), plan.clone(), corpus()).unwrap();
        let cuda = Gpt::new(&engine, gemma(), 9).unwrap();
        let mut cuda = Trainer::with_model(engine, cuda, &training(), plan, corpus()).unwrap();
        assert_eq!(masks(&cpu), masks(&cuda));
        let (trainers, of_gradients) = ((&mut cpu, &mut cuda), Some([2.0 * of_norm, 0.1 * of_norm]));
        expect_alike(&format!("{compute}, {method:?}"), trainers, 10, [of_loss, of_norm], of_gradients);
    }
}

/// In f32, each of these operations and its gradient.
#[test]
fn operations_of_a_llama_are_those_of_the_cpu() {
    use twofour_transformer::random::Stream;
    let Some(cuda) = engine(DataType::F32) else { return };
    let numbers = |len: usize, name: &str| -> Vec<f32> {
        let stream = Stream::new(3, name);
        (0..len as u64).map(|i| stream.normal(i) as f32).collect()
    };
    fn run<E: Engine>(engine: &E, inputs: &[Vec<f32>; 4], function: Nonlinearity) -> [Vec<f32>; 5] {
        use twofour::layer::Accumulate;
        let (tokens, width) = (37, 96);
        let buffer = |kind, values: &[f32]| buffer(engine, kind, values);
        let zeros = |kind: Kind, len: usize| engine.zeros(kind, len).unwrap();
        let [x, gain, dy, gated_x] = inputs;
        let (x, gain, dy) = (buffer(Kind::Compute, x), buffer(Kind::Wide, gain), buffer(Kind::Compute, dy));
        let gated_x = buffer(Kind::Compute, gated_x);
        let (mut y, mut statistics) = (zeros(Kind::Compute, tokens * width), zeros(Kind::Wide, tokens));
        let norm = || NormParameters { gain: &gain, bias: None, epsilon: 1e-5 };
        engine
            .norm(norm(), NormInput::Tensor(&x), &mut y, NormStatistics { mean: None, rstd: &mut statistics })
            .unwrap();
        let (mut dx, mut d_gain) = (zeros(Kind::Compute, tokens * width), zeros(Kind::Wide, width));
        let saved = (&x, NormStatistics { mean: None, rstd: &statistics });
        let gradients = NormGradients { gain: &mut d_gain, bias: None };
        engine.norm_gradient(norm(), saved, &dy, &mut dx, Accumulate::Overwrite, gradients).unwrap();
        let (mut gated, mut d_gated) = (zeros(Kind::Compute, tokens * width), zeros(Kind::Compute, tokens * 2 * width));
        engine.gated(function, width, &gated_x, &mut gated).unwrap();
        engine.gated_gradient(function, width, &gated_x, &dy, &mut d_gated).unwrap();
        [&y, &dx, &d_gain, &gated, &d_gated].map(|buffer| engine.read(buffer).unwrap())
    }
    let inputs = [numbers(37 * 96, "x"), numbers(96, "gain"), numbers(37 * 96, "dy"), numbers(37 * 192, "gated")];
    for function in [Nonlinearity::Relu, Nonlinearity::Gelu, Nonlinearity::TanhGelu, Nonlinearity::Silu] {
        let (found, expected) = (run(&cuda, &inputs, function), run(&CpuEngine, &inputs, function));
        for (what, (found, expected)) in ["y", "dx", "gain", "gated", "gate"].iter().zip(found.iter().zip(&expected)) {
            for (a, b) in found.iter().zip(expected) {
                assert!((a - b).abs() < 1e-4 * (1.0 + b.abs()), "{what}, {function:?}: {a}, {b}");
            }
        }
    }
}

#[test]
fn first_masks_are_those_of_the_cpu_and_so_are_losses_within_one_percent() {
    for (name, plan) in plans() {
        for compute in [DataType::BF16, DataType::F16] {
            let Some(engine) = engine(compute) else { return };
            let (mut cpu, mut cuda) = (trainer(CpuEngine, &plan), trainer(engine, &plan));
            assert_eq!(masks(&cpu), masks(&cuda), "{name} {compute}");
            for step in 0..20 {
                let (a, b) = (cpu.step().unwrap(), cuda.step().unwrap());
                if b.skipped {
                    // The loss scale of f16 is still falling; the CPU is one update ahead from here on.
                    break;
                }
                assert!((a.loss - b.loss).abs() < 0.01 * a.loss, "{name} {compute}, step {step}: {a:?}, {b:?}");
            }
        }
    }
}

#[test]
fn f32_on_the_gpu_is_the_cpu_but_for_rounding() {
    let Some(engine) = engine(DataType::F32) else { return };
    let plan = SparsityPlan::dense();
    let (mut cpu, mut cuda) = (trainer(CpuEngine, &plan), trainer(engine, &plan));
    expect_alike("f32", (&mut cpu, &mut cuda), 10, [1e-3, 1e-2], None);
    let (a, b) = (cpu.validate(4).unwrap(), cuda.validate(4).unwrap());
    assert!((a - b).abs() < 1e-3 * a, "{a} {b}");
}

/// Masters, bit by bit.
fn masters(trainer: &Trainer<CudaEngine>) -> Vec<u32> {
    let read = |buffer| trainer.engine().read(buffer).unwrap();
    trainer.model().parameters().iter().flat_map(|p| read(p.master())).map(f32::to_bits).collect()
}

/// Overwrites an element of the last norm's bias, and returns what it was.
fn poison(trainer: &mut Trainer<CudaEngine>, value: f32) -> f32 {
    let (engine, model) = trainer.engine_and_model();
    let bias = model.parameters_mut().into_iter().find(|parameter| parameter.name() == "norm.bias").unwrap();
    let mut values = engine.read(bias.master()).unwrap();
    let before = std::mem::replace(&mut values[3], value);
    bias.write(engine, &values).unwrap();
    before
}

/// The device decides that a step is skipped: weights and masks stay, and the next update is the one that would have
/// come.
#[test]
fn a_step_that_is_not_finite_changes_nothing_on_the_gpu() {
    for (name, plan) in plans() {
        let (Some(one), Some(other)) = (engine(DataType::BF16), engine(DataType::BF16)) else { return };
        let (mut skipping, mut straight) = (trainer(one, &plan), trainer(other, &plan));
        for trainer in [&mut skipping, &mut straight] {
            (0..2).for_each(|_| assert!(!trainer.step().unwrap().skipped));
        }
        for bad in [f32::NAN, f32::INFINITY] {
            let good = poison(&mut skipping, bad);
            let (before, masks_before) = (masters(&skipping), masks(&skipping));
            let report = skipping.step().unwrap();
            assert!(
                report.skipped && report.flip_rate == 0.0 && report.layer_flip_rates.is_empty(),
                "{name}: {report:?}"
            );
            assert!(masters(&skipping) == before, "{name}, {bad}");
            assert_eq!(masks(&skipping), masks_before, "{name}, {bad}");
            poison(&mut skipping, good);
        }
        assert_eq!(masters(&skipping), masters(&straight), "{name}");
        assert!(!skipping.step().unwrap().skipped, "{name}");
        assert!(masters(&skipping) != masters(&straight), "{name}");
    }
}

/// Masks that are learned on the host, of weights and gradients on the device.
#[test]
fn masks_are_learned_on_the_gpu_while_weights_are_frozen() {
    for compute in [DataType::BF16, DataType::F16] {
        let Some(engine) = engine(compute) else { return };
        let mut trainer = trainer(engine, &SparsityPlan::of_method(Method::LEARNABLE, layers(), 60));
        let frozen = |trainer: &Trainer<CudaEngine>| -> Vec<Vec<f32>> {
            let masked = trainer.model().linears().filter(|linear| linear.masked().is_some());
            masked.map(|linear| trainer.engine().read(linear.weight().master()).unwrap()).collect()
        };
        let (weights, before) = (frozen(&trainer), trainer.validate(8).unwrap());
        assert_eq!(weights.len(), layers().len());
        let flips: Vec<f64> = (0..44).map(|_| trainer.step().unwrap().flip_rate).collect();
        assert!(flips.iter().any(|rate| *rate > 0.0) && frozen(&trainer) == weights, "{flips:?}");
        (44..60).for_each(|_| drop(trainer.step().unwrap()));
        assert!(frozen(&trainer) != weights && trainer.validate(8).unwrap() < before);
        for mask in masks(&trainer) {
            mask.verify(twofour::Pattern::TWO_FOUR, twofour::Axis::Row).unwrap();
        }
    }
}

/// Replayed graphs have the bits of launches, through changes of form, mask selections, validation and skipped steps.
#[test]
fn captured_steps_have_the_bits_of_launched_ones() {
    let switching = SparsityPlan {
        begin: SparseBegin::Step(5),
        end: Some(10),
        ..SparsityPlan::of_method(Method::STE, layers(), 60)
    };
    for (name, plan) in plans().into_iter().chain([("ste, steps 5 to 10", switching)]) {
        let (Some(one), Some(other)) = (engine(DataType::BF16), engine(DataType::BF16)) else { return };
        other.capture_steps(false);
        let (mut captured, mut launched) = (trainer(one, &plan), trainer(other, &plan));
        for step in 0..20 {
            if step == 12 {
                // In the form that the plan begins with; the change of watched second moments is read after each
                // parameter.
                let replays = captured.engine().replayed_steps();
                assert_eq!(replays > 0, !name.starts_with("step"), "{name}: {replays} replays before step 12");
            }
            let [a, b] = [&mut captured, &mut launched].map(|trainer| {
                if step == 7 {
                    trainer.validate(3).unwrap();
                }
                let good = (step == 13).then(|| poison(trainer, f32::NAN));
                let report = trainer.step().unwrap();
                good.map(|good| poison(trainer, good));
                assert_eq!(report.skipped, step == 13, "{name}, step {step}");
                (report.loss.to_bits(), report.gradient_norm.to_bits(), report.layer_flip_rates, report.learning_rate)
            });
            assert_eq!(a, b, "{name}, step {step}");
            assert_eq!(masks(&captured), masks(&launched), "{name}, step {step}");
        }
        assert!(masters(&captured) == masters(&launched), "{name}");
        assert_eq!(captured.take_note(), None, "{name}");
        let replays = captured.engine().replayed_steps();
        assert!(replays >= 2, "{name}: {replays} replays");
        assert_eq!(launched.engine().replayed_steps(), 0, "{name}");
    }
}

/// Packed values, their metadata and the mask, as the plan of a recipe counts them: nothing is held beside.
#[test]
fn a_2_to_4_layer_holds_its_packed_weight_and_its_mask() {
    for (name, plan) in plans().into_iter().filter(|(_, plan)| plan.precision == SparsePrecision::Activations) {
        let Some(engine) = engine(DataType::BF16) else { return };
        for linear in trainer(engine, &plan).model().linears() {
            let Some(sparse) = linear.sparse() else { continue };
            let elements = linear.out_features() * linear.in_features();
            let packed = if matches!(sparse.settings().rule, MaskRule::Transposable(_)) { 18 } else { 9 };
            assert_eq!(sparse.bytes(), elements / 8 * (packed + 1), "{name}: {}", linear.name());
        }
    }
}

#[test]
fn resuming_on_the_gpu_is_exact() {
    // Resumed before the switch that is then seen, and after it.
    let early = [("step, watched", step_switching_after(5)), ("step, frozen", step_switching_after(1))];
    for (name, plan) in plans().into_iter().chain(early) {
        let directory = tempfile::tempdir().unwrap();
        let Some(first) = engine(DataType::BF16) else { return };
        let mut whole = trainer(first, &plan);
        (0..4).for_each(|_| drop(whole.step().unwrap()));
        whole.save(directory.path()).unwrap();
        let Some(second) = engine(DataType::BF16) else { return };
        let mut resumed = trainer(second, &plan);
        resumed.resume(directory.path()).unwrap();
        assert_eq!(masks(&whole), masks(&resumed), "{name}");
        for step in 4..9 {
            let (a, b) = (whole.step().unwrap(), resumed.step().unwrap());
            let numbers =
                |r: &twofour_nn::train::StepReport| (r.loss.to_bits(), r.gradient_norm.to_bits(), r.flip_rate);
            assert_eq!(numbers(&a), numbers(&b), "{name}, step {step}");
        }
        let is_dense = matches!(name, "dense" | "step" | "step, option 2") || name.starts_with("sparsifier");
        assert_eq!(whole.is_sparse(), !is_dense, "{name}");
    }
}

#[test]
fn a_checkpoint_of_one_engine_goes_on_on_the_other() {
    for (name, plan) in plans() {
        let directory = tempfile::tempdir().unwrap();
        let Some(engine) = engine(DataType::BF16) else { return };
        let (mut cpu, mut cuda) = (trainer(CpuEngine, &plan), trainer(engine, &plan));
        (0..3).for_each(|_| drop(cpu.step().unwrap()));
        cpu.save(directory.path()).unwrap();
        cuda.resume(directory.path()).unwrap();
        assert_eq!(masks(&cpu), masks(&cuda), "{name}");
        (0..3).for_each(|_| drop(cuda.step().unwrap()));
        cuda.save(directory.path()).unwrap();
        cpu.resume(directory.path()).unwrap();
        assert_eq!(masks(&cpu), masks(&cuda), "{name}");
        assert_eq!(cpu.steps_done(), 6);
        let (a, b) = (cpu.step().unwrap(), cuda.step().unwrap());
        assert!((a.loss - b.loss).abs() < 0.01 * a.loss, "{name}: {a:?}, {b:?}");
    }
}

/// A parameter after a step: its weights and moments, and the sum of changes.
fn after_step<E: Engine>(engine: &E, step: &AdamWStep, values: &[Vec<f32>; 4], masked: bool) -> ([Vec<f32>; 3], f64) {
    let [mut master, gradient, mut first, mut second] =
        values.each_ref().map(|values| buffer(engine, Kind::Wide, values));
    let layer =
        engine.sparse_linear(&master, SHAPE, SparseLinearSettings::default(), SparsePrecision::Activations).unwrap();
    let sparse = masked.then_some(&layer);
    let state = ParameterState {
        master: &mut master,
        gradient: &gradient,
        first: &mut first,
        second: Some(&mut second),
        copy: None,
        sparse,
    };
    let changes = engine.step(&OptimizerStep::AdamW(*step), vec![state], None).unwrap();
    ([&master, &first, &second].map(|buffer| engine.read(buffer).unwrap()), changes)
}

const SHAPE: (usize, usize) = (72, 132);

/// Numbers from -1 to 1, as many as [`SHAPE`] has.
fn numbers(seed: u32) -> Vec<f32> {
    let hash = |i: u32| (i ^ seed).wrapping_mul(0x9e37_79b1).rotate_left(15).wrapping_mul(0x85eb_ca77);
    (0..(SHAPE.0 * SHAPE.1) as u32).map(|i| (hash(i) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

#[test]
fn the_optimizer_has_the_bits_of_the_cpu_in_every_phase_and_with_every_decay() {
    let Some(cuda) = engine(DataType::BF16) else { return };
    let second = numbers(4 << 16).iter().map(|v| v * v).collect();
    let values = [numbers(1 << 16), numbers(2 << 16), numbers(3 << 16), second];
    for second_moment in
        [SecondMoment::Moving, SecondMoment::Watched, SecondMoment::WatchedByLogarithm, SecondMoment::Frozen { at: 4 }]
    {
        for pruned_decay in
            [PrunedDecay::None, PrunedDecay::Gradient { strength: 0.3 }, PrunedDecay::Weight { strength: 0.7 }]
        {
            for (masked, number) in [(false, 7), (true, 7), (true, 8)] {
                let step = AdamWStep {
                    learning_rate: 1e-2 / number as f64,
                    beta1: 0.9,
                    beta2: 0.95,
                    epsilon: 1e-8,
                    weight_decay: 0.1,
                    step: number,
                    gradient_scale: 0.37,
                    second_moment,
                    pruned_decay,
                };
                let (expected, of_cpu) = after_step(&CpuEngine, &step, &values, masked);
                let (found, of_cuda) = after_step(&cuda, &step, &values, masked);
                for (name, (found, expected)) in ["weight", "first", "second"].iter().zip(found.iter().zip(&expected)) {
                    let same = found.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{name}, masked {masked}: {step:?}");
                }
                assert!((of_cpu - of_cuda).abs() <= 1e-6 * of_cpu.abs(), "{of_cpu}, {of_cuda}: {step:?}");
                let is_watched = matches!(second_moment, SecondMoment::Watched | SecondMoment::WatchedByLogarithm);
                assert_eq!(of_cuda != 0.0, is_watched, "{step:?}");
            }
        }
    }
}

/// More parameters than a launch has, of odd lengths, some with a copy in 16 bits: each as alone.
#[test]
fn parameters_that_step_together_have_the_bits_of_each_alone() {
    let Some(cuda) = engine(DataType::BF16) else { return };
    let step = OptimizerStep::AdamW(AdamWStep {
        learning_rate: 3e-3,
        beta1: 0.9,
        beta2: 0.95,
        epsilon: 1e-8,
        weight_decay: 0.0,
        step: 5,
        gradient_scale: 0.37,
        second_moment: SecondMoment::Moving,
        pruned_decay: PrunedDecay::None,
    });
    let buffer = |kind, values: &[f32]| buffer(&cuda, kind, values);
    let parameters = || -> Vec<_> {
        let lengths = [1usize, 3, 4, 255, 1024, 1025, 4099].into_iter().cycle().take(150).enumerate();
        let parameter = |(index, len): (usize, usize)| {
            let values = |kind: u32| numbers((index as u32) << 4 | kind).split_off(9504 - len);
            let squares: Vec<f32> = values(3).iter().map(|v| v * v).collect();
            let wide = [values(0), values(1), values(2), squares].map(|values| buffer(Kind::Wide, &values));
            (wide, (index % 3 == 0).then(|| buffer(Kind::Compute, &vec![0.0; len])))
        };
        lengths.map(parameter).collect()
    };
    let run = |together: bool| -> Vec<Vec<f32>> {
        let mut all = parameters();
        let states = all.iter_mut().map(|([master, gradient, first, second], copy)| ParameterState {
            master,
            gradient,
            first,
            second: Some(second),
            copy: copy.as_mut(),
            sparse: None,
        });
        if together {
            assert_eq!(cuda.step(&step, states.collect(), None).unwrap(), 0.0);
        } else {
            states.for_each(|state| assert_eq!(cuda.step(&step, vec![state], None).unwrap(), 0.0));
        }
        all.iter().flat_map(|(wide, copy)| wide.iter().chain(copy)).map(|buffer| cuda.read(buffer).unwrap()).collect()
    };
    let (together, alone) = (run(true), run(false));
    assert!(together == alone);
    // They have moved, and so have the copies.
    let before: Vec<_> = parameters().iter().map(|([master, ..], _)| cuda.read(master).unwrap()).collect();
    assert!(together[0] != before[0] && together[4].iter().all(|v| *v != 0.0));
}

/// A weight and its momentum after a step of gradient descent, and the weight's copy in the compute type.
fn after_descent<E: Engine>(engine: &E, step: &SgdStep, values: &[Vec<f32>; 3], masked: bool) -> [Vec<f32>; 3] {
    let [mut master, gradient, mut momentum] = values.each_ref().map(|values| buffer(engine, Kind::Wide, values));
    let sparse = masked.then(|| {
        engine.sparse_linear(&master, SHAPE, SparseLinearSettings::default(), SparsePrecision::Activations).unwrap()
    });
    let mut copy = engine.zeros(Kind::Compute, values[0].len()).unwrap();
    let state = ParameterState {
        master: &mut master,
        gradient: &gradient,
        first: &mut momentum,
        second: None,
        copy: Some(&mut copy),
        sparse: sparse.as_ref(),
    };
    engine.step(&OptimizerStep::Sgd(*step), vec![state], None).unwrap();
    [&master, &momentum, &copy].map(|buffer| engine.read(buffer).unwrap())
}

#[test]
fn gradient_descent_has_the_bits_of_the_cpu_with_every_decay() {
    let Some(cuda) = engine(DataType::BF16) else { return };
    let values = [1, 2, 3].map(|seed| numbers(seed << 16));
    for pruned_decay in
        [PrunedDecay::None, PrunedDecay::Gradient { strength: 0.3 }, PrunedDecay::Weight { strength: 0.7 }]
    {
        for (masked, gradient_scale) in [(false, 0.37), (true, 0.37), (true, 1.0)] {
            let step = SgdStep { learning_rate: 0.03, momentum: 0.9, weight_decay: 1e-2, gradient_scale, pruned_decay };
            let [expected, momentum, _] = after_descent(&CpuEngine, &step, &values, masked);
            let found = after_descent(&cuda, &step, &values, masked);
            let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same(&found[0], &expected) && same(&found[1], &momentum), "masked {masked}: {step:?}");
            let rounded: Vec<f32> = expected.iter().map(|w| half::bf16::from_f32(*w).to_f32()).collect();
            assert!(same(&found[2], &rounded), "masked {masked}: {step:?}");
        }
    }
}

#[test]
fn masks_are_applied_with_the_bits_of_the_cpu() {
    // Rows that are not cut into whole groups or words, one row, and what no arithmetic may touch.
    for (rows, cols) in [(1, 1), (5, 3), (7, 31), (3, 32), (4, 33), (2, 64), (3, 65), (72, 132)] {
        let special = [f32::NAN, f32::INFINITY, -0.0, 1e-40];
        let of = |(i, v): (usize, f32)| special.get(i % 17).copied().unwrap_or(v);
        let weight: Vec<f32> = numbers(11).into_iter().take(rows * cols).enumerate().map(of).collect();
        let mask = Mask::from_fn(rows, cols, |row, col| (row * 5 + col * col) % 3 != 0);
        let expected = mask.apply(MatrixRef::new(rows, cols, &weight).unwrap()).unwrap();
        for compute in [DataType::F32, DataType::F16, DataType::BF16] {
            let Some(cuda) = engine(compute) else { return };
            let [apart, in_place] = under_mask(&cuda, &mask, &weight);
            let rounded: Vec<f32> = match compute {
                DataType::F16 => expected.iter().map(|w| half::f16::from_f32(*w).to_f32()).collect(),
                DataType::BF16 => expected.iter().map(|w| half::bf16::from_f32(*w).to_f32()).collect(),
                _ => expected.clone(),
            };
            let same = |a: &[f32], b: &[f32]| {
                a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
            };
            assert!(apart.len() == weight.len() && same(&apart, &rounded), "{compute}, [{rows}, {cols}]");
            assert!(same(&in_place, &expected), "{compute}, in place, [{rows}, {cols}]");
        }
        let [apart, in_place] = under_mask(&CpuEngine, &mask, &weight);
        assert!(apart.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
        assert!(in_place.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()));
    }
}

#[test]
fn weights_are_rounded_to_the_same_integers_times_scales_on_the_gpu() {
    for len in [1, 31, 255, 256, 257, 5000] {
        let special = [f32::NAN, f32::INFINITY, -f32::INFINITY, -0.0, 1e-40, 0.25, -0.75];
        let of = |(i, v): (usize, f32)| special.get(i % 23).copied().unwrap_or(v);
        let weight: Vec<f32> = numbers(11).into_iter().cycle().take(len).enumerate().map(of).collect();
        let scales: Vec<f32> = (0..len).map(|i| [0.5, 0.0, 0.037, 1e-39][i % 4]).collect();
        let on = |cuda: &CudaEngine| {
            let (scales, weight) = (buffer(cuda, Kind::Wide, &scales), buffer(cuda, Kind::Wide, &weight));
            let mut rounded = cuda.zeros(Kind::Compute, len).unwrap();
            cuda.round_to_grid(7.0, &scales, &weight, &mut rounded).unwrap();
            let mut short = cuda.zeros(Kind::Compute, len + 1).unwrap();
            assert!(cuda.round_to_grid(7.0, &scales, &weight, &mut short).is_err());
            cuda.read(&rounded).unwrap()
        };
        let mut expected = vec![0.0; len];
        twofour_transformer::cpu::grid::round(7.0, &scales, &weight, &mut expected);
        for compute in [DataType::F32, DataType::F16, DataType::BF16] {
            let Some(cuda) = engine(compute) else { return };
            let rounded = |w: f32| match compute {
                DataType::F16 => half::f16::from_f32(w).to_f32(),
                DataType::BF16 => half::bf16::from_f32(w).to_f32(),
                _ => w,
            };
            for (i, (found, expected)) in on(&cuda).into_iter().zip(&expected).enumerate() {
                let expected = rounded(*expected);
                let same = found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan());
                assert!(same, "{compute}, {len}: {found} instead of {expected} for {} by {}", weight[i], scales[i]);
            }
        }
    }
}

/// A weight under a mask: rounded to another buffer, and in place.
fn under_mask<E: Engine>(engine: &E, mask: &Mask, weight: &[f32]) -> [Vec<f32>; 2] {
    let words = twofour_transformer::cpu::masking::words(mask);
    let mut uploaded = engine.zeros(Kind::Index, words.len()).unwrap();
    engine.write_ids(&mut uploaded, &words).unwrap();
    let mut master = buffer(engine, Kind::Wide, weight);
    let mut apart = engine.zeros(Kind::Compute, weight.len()).unwrap();
    engine.prune(Kept::Mask(&uploaded), &master, mask.cols(), &mut apart).unwrap();
    engine.mask_in_place(&uploaded, mask.cols(), &mut master).unwrap();
    // Operands that do not fit.
    assert!(engine.prune(Kept::Mask(&uploaded), &master, mask.cols() + 1, &mut apart).is_err());
    let mut short = engine.zeros(Kind::Compute, weight.len() + 1).unwrap();
    assert!(engine.prune(Kept::Mask(&uploaded), &master, mask.cols(), &mut short).is_err());
    [engine.read(&apart).unwrap(), engine.read(&master).unwrap()]
}

/// On the GPU, too, masks are those of the rule outside of the loop, and what is pruned in place is zero in the master
/// weight and in its copy.
#[test]
fn masks_of_a_sparsifier_are_chosen_from_the_master_weight_on_the_gpu() {
    use twofour::sparsify::ParameterRule as _;
    for (name, plan) in plans().into_iter().filter(|(name, _)| name.starts_with("sparsifier")) {
        let Some(engine) = engine(DataType::BF16) else { return };
        let own = plan.sparsifier.clone().unwrap();
        let mut trainer = trainer(engine, &plan);
        for done in 1..=16u64 {
            trainer.step().unwrap();
            if !plan.selects_mask_after(done) && done != 1 {
                continue;
            }
            let engine = trainer.engine();
            for linear in trainer.model().linears().filter(|linear| linear.masked().is_some()) {
                let master = engine.read(linear.weight().master()).unwrap();
                let matrix = MatrixRef::new(linear.out_features(), linear.in_features(), &master).unwrap();
                let (mask, _) = linear.masked().unwrap();
                if done > 1 || !own.in_place {
                    assert_eq!(mask, &own.rule.mask(matrix, own.level_at(done)).unwrap(), "{name}, step {done}");
                }
                if own.in_place {
                    assert_eq!(mask.apply(matrix).unwrap(), master, "{name}, step {done}");
                    let copy = engine.read(linear.weight().compute()).unwrap();
                    let rounded: Vec<f32> = master.iter().map(|w| half::bf16::from_f32(*w).to_f32()).collect();
                    assert_eq!(copy, rounded, "{name}, step {done}");
                }
            }
        }
    }
}

#[test]
fn pruning_to_some_of_four_has_the_bits_of_the_cpu() {
    let Some(cuda) = engine(DataType::F32) else { return };
    // Ties, zeros of both signs, and rows that are not cut into whole groups.
    for cols in [1, 3, 4, 7, 132] {
        let weight: Vec<f32> = numbers(7).iter().take(72 * cols).map(|v| (v * 4.0).round() / 4.0).collect();
        for count in 1..=4 {
            let (expected, found) = (prune(&CpuEngine, count, &weight, cols), prune(&cuda, count, &weight, cols));
            let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{count} of 4, rows of {cols}");
        }
    }
}

fn prune<E: Engine>(engine: &E, count: u32, weight: &[f32], cols: usize) -> Vec<f32> {
    let master = buffer(engine, Kind::Wide, weight);
    let mut kept = engine.zeros(Kind::Compute, weight.len()).unwrap();
    engine.prune(Kept::OfFour(count), &master, cols, &mut kept).unwrap();
    engine.read(&kept).unwrap()
}

#[test]
fn training_by_gradient_descent_follows_the_cpu_and_resumes_exactly() {
    let plan = SparsityPlan::of_method(Method::SR_STE, layers(), 60);
    let settings = TrainingSettings { optimizer: OptimizerKind::Sgd, learning_rate: 0.2, ..training() };
    let Some(_) = engine(DataType::BF16) else { return };
    let cuda = || with_settings(engine(DataType::BF16).unwrap(), &plan, &settings);
    let (mut cpu, mut whole) = (with_settings(CpuEngine, &plan, &settings), cuda());
    let directory = tempfile::tempdir().unwrap();
    let mut losses = vec![];
    for step in 0..12 {
        let (a, b) = (cpu.step().unwrap(), whole.step().unwrap());
        assert!((a.loss - b.loss).abs() < 0.01 * a.loss, "step {step}: {a:?}, {b:?}");
        losses.push(b.loss);
        if step == 5 {
            whole.save(directory.path()).unwrap();
        }
    }
    let mut resumed = cuda();
    resumed.resume(directory.path()).unwrap();
    for (step, expected) in losses.iter().enumerate().skip(6) {
        assert_eq!(resumed.step().unwrap().loss, *expected, "step {step}");
    }
}

/// The errors of a block before and after tuning on an engine.
fn tuned<E: Engine>(engine: &E, checkpoint: &Checkpoint) -> [f64; 2] {
    let width = checkpoint.config().width;
    let text = |seed: u32| -> Vec<f32> { numbers(seed).into_iter().cycle().take(24 * width).collect() };
    let (inputs, outputs) = (text(1), text(2));
    let block = PrunedBlock { index: 0, replace: &|_| None, is_pruned: &|_| true, rounding: None };
    let texts = BlockTexts { inputs: &[&inputs], outputs: &[&outputs] };
    let tuning = BlockTuning { passes: 20, learning_rate: 1e-3, measure: ErrorMeasure::RelativeSquared };
    checkpoint.tune_block(engine, &block, texts, tuning, &|| false).unwrap().errors
}

#[test]
fn blocks_are_tuned_as_on_the_cpu() {
    let Some(engine) = engine(DataType::F32) else { return };
    for family in ["llama", "qwen2", "gemma3"] {
        let checkpoint = Checkpoint::open(directory(family)).unwrap();
        let (cpu, cuda) = (tuned(&CpuEngine, &checkpoint), tuned(&engine, &checkpoint));
        assert!((cpu[0] - cuda[0]).abs() < 0.02 * cpu[0], "{family}: {cpu:?}, {cuda:?}");
        assert!(cuda[1] < cuda[0] && (cpu[1] - cuda[1]).abs() < 0.05 * cpu[0], "{family}: {cpu:?}, {cuda:?}");
    }
}
