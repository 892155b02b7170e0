//! On a device: a vision transformer on the GPU against the CPU. Without a device the tests skip; with
//! `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

mod support;

use std::sync::Arc;

use twofour::DataType;
use twofour_nn::{
    model::Pooling,
    recipe::{Method, ModelKind, ModelSettings, TrainingSettings},
    train::{ImageSet, SparsityPlan, Trainer},
};
use twofour_transformer::{
    engine::{Engine, cpu::CpuEngine},
    random::Stream,
};

use support::{engine, expect_alike, gradients, layers};

/// Images of `side * side` values, whose classes are told by where they are bright.
fn images(side: usize) -> Arc<ImageSet> {
    let stream = Stream::new(1, "images");
    let labels: Vec<u8> = (0..200).map(|i| stream.below(i, 4) as u8).collect();
    let image = side * side;
    let value = |at: usize| {
        let bright = if usize::from(labels[at / image]) == at % image / (image / 4) { 150 } else { 0 };
        bright + stream.below(1000 + at as u64, 100) as u8
    };
    Arc::new(ImageSet::new([side, side, 1], (0..200 * image).map(value).collect(), labels.clone(), 0.2).unwrap())
}

/// A model over images of 16 x 16 values, which are 16 tokens.
fn model(pooling: Pooling) -> ModelSettings {
    ModelSettings {
        kind: ModelKind::Vit,
        layers: 2,
        width: 128,
        heads: 4,
        feed_forward: Some(256),
        image: Some(16),
        patch: Some(4),
        // Rows of scores that no vector load divides.
        classes: Some(10),
        pooling: Some(pooling),
        ..Default::default()
    }
}

fn training(learning_rate: f64) -> TrainingSettings {
    TrainingSettings {
        batch: 16,
        micro_batch: Some(8),
        steps: 60,
        warm_up: 4,
        seed: 9,
        learning_rate,
        final_learning_rate: learning_rate / 10.0,
        ..Default::default()
    }
}

fn plan(method: Method) -> SparsityPlan {
    SparsityPlan::of_method(method, layers(), 60)
}

fn trainer<E: Engine>(engine: E, method: Method, pooling: Pooling) -> Trainer<E, ImageSet> {
    trainer_at(engine, method, pooling, 1e-3)
}

fn trainer_at<E: Engine>(engine: E, method: Method, pooling: Pooling, learning_rate: f64) -> Trainer<E, ImageSet> {
    Trainer::new(engine, &model(pooling), &training(learning_rate), plan(method), images(16)).unwrap()
}

/// With heads of 64 over images of 48 x 48 values: 144 tokens, and one more where there is a class token. No tile of
/// attention divides either.
fn trainer_with_heads_of_64<E: Engine>(engine: E, method: Method, pooling: Pooling) -> Trainer<E, ImageSet> {
    let model = ModelSettings { heads: 2, image: Some(48), ..model(pooling) };
    let training = TrainingSettings { batch: 4, micro_batch: Some(2), ..training(3e-4) };
    Trainer::new(engine, &model, &training, plan(method), images(48)).unwrap()
}

const METHODS: [Method; 6] = [Method::DENSE, Method::FIXED, Method::STE, Method::SR_STE, Method::S_STE, Method::STEP];

#[test]
fn f32_on_the_gpu_is_the_cpu_but_for_rounding() {
    for pooling in [Pooling::Class, Pooling::Mean] {
        let Some(cuda) = engine(DataType::F32) else { return };
        let (mut cpu, mut cuda) = (trainer(CpuEngine, Method::DENSE, pooling), trainer(cuda, Method::DENSE, pooling));
        expect_alike(&format!("{pooling:?}"), (&mut cpu, &mut cuda), 10, [1e-3, 1e-2], None);
        for (name, size, apart) in gradients(&cpu, &cuda) {
            assert!(apart < 0.02 * size + 1e-6, "{pooling:?}, {name}: {apart} of {size}");
        }
        // The last batch has five images.
        let (a, b) = (cpu.evaluate(37).unwrap(), cuda.evaluate(37).unwrap());
        assert!((a.loss - b.loss).abs() < 1e-3 * a.loss, "{a:?}, {b:?}");
    }
}

#[test]
fn losses_of_every_method_are_those_of_the_cpu_within_two_percent_and_steps_are_replayed() {
    for method in METHODS {
        let Some(cuda) = engine(DataType::BF16) else { return };
        // At 1e-3 the loss has a spike at step 17, where rounding grows to more than two percent.
        let mut cpu = trainer_at(CpuEngine, method, Pooling::Mean, 3e-4);
        let mut cuda = trainer_at(cuda, method, Pooling::Mean, 3e-4);
        for step in 0..20 {
            let (a, b) = (cpu.step().unwrap(), cuda.step().unwrap());
            assert!((a.loss - b.loss).abs() < 0.02 * a.loss.max(0.5), "{method:?}, step {step}: {a:?}, {b:?}");
        }
        let (a, b) = (cpu.evaluate(37).unwrap(), cuda.evaluate(37).unwrap());
        assert!((a.loss - b.loss).abs() < 0.02 * a.loss.max(0.5), "{method:?}: {a:?}, {b:?}");
        assert_eq!(cuda.take_note(), None, "{method:?}");
        assert!(cuda.engine().replayed_steps() > 0 || method == Method::STEP, "{method:?}");
    }
}

#[test]
fn heads_of_64_train_as_on_the_cpu() {
    for (method, pooling) in
        [(Method::DENSE, Pooling::Class), (Method::DENSE, Pooling::Mean), (Method::STE, Pooling::Class)]
    {
        let Some(cuda) = engine(DataType::BF16) else { return };
        let mut cpu = trainer_with_heads_of_64(CpuEngine, method, pooling);
        let mut cuda = trainer_with_heads_of_64(cuda, method, pooling);
        for step in 0..10 {
            let (a, b) = (cpu.step().unwrap(), cuda.step().unwrap());
            let what = format!("{method:?}, {pooling:?}, step {step}: {a:?}, {b:?}");
            assert!((a.loss - b.loss).abs() < 0.02 * a.loss.max(0.5), "{what}");
            assert!((a.gradient_norm - b.gradient_norm).abs() < 0.05 * a.gradient_norm, "{what}");
            // While weights are the same.
            let gradients = (step == 0).then(|| gradients(&cpu, &cuda));
            for (name, size, apart) in gradients.into_iter().flatten() {
                let most = 0.05 * size + 0.002 * a.gradient_norm;
                assert!(apart < most, "{method:?}, {pooling:?}, {name}: {apart} of {size}");
            }
        }
    }
}

#[test]
fn captured_steps_have_the_bits_of_launched_ones() {
    for method in METHODS {
        let (Some(one), Some(other)) = (engine(DataType::BF16), engine(DataType::BF16)) else { return };
        other.capture_steps(false);
        let (mut captured, mut launched) =
            (trainer(one, method, Pooling::Class), trainer(other, method, Pooling::Class));
        for step in 0..12 {
            let [a, b] = [&mut captured, &mut launched].map(|trainer| {
                if step == 6 {
                    trainer.evaluate(40).unwrap();
                }
                let report = trainer.step().unwrap();
                (report.loss.to_bits(), report.gradient_norm.to_bits(), report.layer_flip_rates)
            });
            assert_eq!(a, b, "{method:?}, step {step}");
        }
    }
}

#[test]
fn features_on_the_gpu_tell_classes_apart_as_those_of_the_cpu_do() {
    let Some(cuda) = engine(DataType::BF16) else { return };
    let (mut cpu, mut cuda) =
        (trainer(CpuEngine, Method::STE, Pooling::Mean), trainer(cuda, Method::STE, Pooling::Mean));
    for _ in 0..60 {
        cpu.step().unwrap();
        cuda.step().unwrap();
    }
    let images = images(16);
    let (engine, model) = cpu.engine_and_model();
    let a = images.probe(engine, model, 64).unwrap();
    let (engine, model) = cuda.engine_and_model();
    // Batches that no GEMM's tile divides.
    for batch in [64, 7] {
        let b = images.probe(engine, model, batch).unwrap();
        assert!(b.validation_accuracy > 0.85 && a.validation_accuracy > 0.85, "{a:?}, {b:?}");
    }
}
