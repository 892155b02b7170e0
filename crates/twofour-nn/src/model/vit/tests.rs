//! Gradients of a vision transformer against finite differences, its training, its file.

use std::sync::Arc;

use twofour::{DataType, file::Overwrite, layer::Accumulate};

use super::{Vit, VitConfig};
use crate::{
    Error,
    block::BatchShape,
    engine::{
        Kind, Memory as _,
        cpu::{CpuBuffer, CpuEngine},
    },
    model::{Gpt, IndexBatch, ModelParts, Objective, Pooling, TrainedModel},
    random::Stream,
    recipe::{ModelKind, ModelSettings},
    train::{ImageSet, SparsityPlan, Trainer, TrainingData as _, TrainingSettings, methods::Method},
};

const ENGINE: CpuEngine = CpuEngine;

fn settings(pooling: Pooling) -> ModelSettings {
    ModelSettings {
        kind: ModelKind::Vit,
        layers: 2,
        width: 16,
        heads: 2,
        feed_forward: Some(32),
        image: Some(6),
        patch: Some(3),
        channels: Some(2),
        classes: Some(3),
        pooling: Some(pooling),
        ..Default::default()
    }
}

/// Images whose classes are told by where they are bright.
fn images(count: usize) -> ImageSet {
    let stream = Stream::new(1, "images");
    let labels: Vec<u8> = (0..count).map(|i| stream.below(i as u64, 3) as u8).collect();
    let value = |at: usize| {
        let (image, row) = (at / 72, at % 72 / 24);
        let bright = if usize::from(labels[image]) == row { 150 } else { 0 };
        bright + stream.below(1000 + at as u64, 100) as u8
    };
    ImageSet::new([6, 6, 2], (0..72 * count).map(value).collect(), labels, 0.25).unwrap()
}

fn model(pooling: Pooling, images: &ImageSet) -> Vit<CpuEngine> {
    let config = VitConfig::from(&settings(pooling));
    // Larger than initial weights are, so that every gradient is one.
    let mut model = Vit::build(&ENGINE, &config, |name, shape| {
        let (stream, count) = (Stream::new(5, name), shape.iter().product::<usize>() as u64);
        let (mean, deviation) = if name.ends_with("norm.weight") { (1.0, 0.1) } else { (0.0, 0.3) };
        Ok((0..count).map(|i| (mean + deviation * stream.normal(i)) as f32).collect())
    })
    .unwrap();
    images.prepare(&ENGINE, &mut model).unwrap();
    model.parameters_mut().into_iter().try_for_each(|p| p.begin_training(&ENGINE)).unwrap();
    model
}

fn scalar() -> CpuBuffer {
    ENGINE.zeros(Kind::Wide, 1).unwrap()
}

#[test]
fn gradients_of_all_variables_agree_with_finite_differences() {
    let images = images(12);
    for pooling in [Pooling::Class, Pooling::Mean] {
        let mut model = model(pooling, &images);
        let tokens = model.positions();
        assert_eq!(tokens, if pooling == Pooling::Class { 5 } else { 4 });
        let shape = BatchShape { batch: 4, positions: tokens };
        let batch = images.batch_of([3, 0, 7, 11], tokens);
        let uploaded = IndexBatch::new(&ENGINE, (&batch.inputs, &batch.targets)).unwrap();
        let (mut ready, scaling) = (0, (1.0, Accumulate::Overwrite));
        model
            .gradients_of(&ENGINE, (&uploaded, Objective::Targets), shape, scaling, &mut scalar(), &mut |found| {
                ready += found.len();
                Ok(())
            })
            .unwrap();
        let count = ModelParts::parameters(&model).len();
        assert_eq!(ready, count, "each gradient is announced once");
        let loss_of = |model: &mut Vit<CpuEngine>| {
            let mut loss = scalar();
            model.loss(&ENGINE, (&batch.inputs, &batch.targets), shape, &mut loss).unwrap();
            f64::from(ENGINE.read(&loss).unwrap()[0])
        };
        for index in 0..count {
            let (name, values, gradient) = {
                let parameter = ModelParts::parameters(&model)[index];
                let read = |buffer| ENGINE.read(buffer).unwrap();
                (parameter.name().to_owned(), read(parameter.master()), read(parameter.gradient().unwrap()))
            };
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            assert!(norm > 1e-4, "{name}, {pooling:?}: a gradient of norm {norm}");
            let h = 2e-3;
            let mut along = |by: f64| {
                let moved: Vec<f32> =
                    values.iter().zip(&gradient).map(|(v, g)| v + (by * f64::from(*g) / norm) as f32).collect();
                model.parameters_mut()[index].write(&ENGINE, &moved).unwrap();
                loss_of(&mut model)
            };
            let numeric = (along(h) - along(-h)) / (2.0 * h);
            model.parameters_mut()[index].write(&ENGINE, &values).unwrap();
            assert!(
                (numeric - norm).abs() < 2e-2 * norm.max(0.05),
                "{name}, {pooling:?}: {numeric}, by the gradient {norm}"
            );
        }
    }
}

fn trainer(method: Method, steps: u64, images: &Arc<ImageSet>) -> Trainer<CpuEngine, ImageSet> {
    let layers = (0..2).flat_map(|layer| ["up", "down"].map(|part| format!("blocks.{layer}.mlp.{part}"))).collect();
    let layers: Vec<String> = layers;
    let layers = layers.into_iter().filter(|name| method != Method::ACTIVATION || name.ends_with("down")).collect();
    let training = TrainingSettings {
        steps,
        batch: 16,
        micro_batch: Some(8),
        warm_up: 4,
        learning_rate: 3e-3,
        final_learning_rate: 3e-4,
        seed: 2,
        ..Default::default()
    };
    let plan = SparsityPlan::of_method(method, layers, steps);
    Trainer::new(ENGINE, &settings(Pooling::Class), &training, plan, images.clone()).unwrap()
}

#[test]
fn every_method_trains_it_and_a_resumed_run_goes_on_bit_for_bit() {
    let images = Arc::new(images(200));
    let methods = [
        Method::DENSE,
        Method::FIXED,
        Method::STE,
        Method::SR_STE,
        Method::FST,
        Method::S_STE,
        Method::STEP,
        Method::ACTIVATION,
    ];
    for method in methods {
        let directory = tempfile::tempdir().unwrap();
        let mut whole = trainer(method, 80, &images);
        let before = whole.evaluate(50).unwrap();
        (0..40).for_each(|_| assert_eq!(whole.step().unwrap().targets, 16));
        whole.save(directory.path()).unwrap();
        let mut resumed = trainer(method, 80, &images);
        resumed.resume(directory.path()).unwrap();
        for step in 40..80 {
            let [a, b] = [&mut whole, &mut resumed].map(|trainer| trainer.step().unwrap());
            assert_eq!((a.loss.to_bits(), a.flip_rate), (b.loss.to_bits(), b.flip_rate), "{method:?}, step {step}");
        }
        let after = whole.evaluate(50).unwrap();
        assert!(after.loss < 0.7 * before.loss, "{method:?}: {before:?}, {after:?}");
        assert!(after.accuracy.unwrap() > 0.8, "{method:?}: {after:?}");
        assert!(trainer(method, 90, &images).resume(directory.path()).is_err(), "a checkpoint of another run");
    }
}

#[test]
fn regression_on_features_tells_what_training_has_taught() {
    let images = Arc::new(images(200));
    let mut trainer = trainer(Method::STE, 80, &images);
    (0..80).for_each(|_| drop(trainer.step().unwrap()));
    let (engine, model) = trainer.engine_and_model();
    let [all, few] = [200, 7].map(|batch| images.probe(engine, model, batch).unwrap());
    assert!(all.validation_accuracy > 0.8 && all.training_accuracy > 0.95, "{all:?}");
    // Batches of another size may round otherwise in a GEMM, and no image is near a boundary by chance.
    assert!((all.validation_accuracy - few.validation_accuracy).abs() < 0.05, "{all:?}, {few:?}");
    // The features are those of the images whose classes they are judged by.
    let shuffled: Vec<u8> = images.labels().iter().rev().copied().collect();
    let pixels: Vec<u8> = images.images().flatten().copied().collect();
    let wrong = ImageSet::new([6, 6, 2], pixels, shuffled, 0.25).unwrap();
    let wrong = wrong.probe(engine, model, 50).unwrap();
    assert!(wrong.validation_accuracy < 0.6, "{wrong:?}");
}

#[test]
fn a_saved_model_has_the_scores_of_the_trained_one() {
    let images = Arc::new(images(40));
    let mut trainer = trainer(Method::STE, 10, &images);
    (0..10).for_each(|_| drop(trainer.step().unwrap()));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vit.safetensors");
    let (engine, model) = trainer.engine_and_model();
    TrainedModel::save(model, engine, &path, Overwrite::No, DataType::F32).unwrap();
    let error = Gpt::load(engine, &path).unwrap_err().to_string();
    assert!(error.contains("vision transformer"), "{error}");
    let bytes = std::fs::read(&path).unwrap();
    for (name, damaged) in [("truncated", &bytes[..bytes.len() - 5]), ("header", &bytes[..100]), ("empty", &[])] {
        let path = directory.path().join(name);
        std::fs::write(&path, damaged).unwrap();
        let error = Vit::load(engine, &path).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    // The class token and four patches are five positions; another patch is another number of them.
    let text = String::from_utf8_lossy(&bytes[8..]).into_owned();
    let at = 8 + text.find("patch\\\":3").unwrap() + "patch\\\":".len();
    let mut other = bytes.clone();
    other[at] = b'6';
    std::fs::write(directory.path().join("other"), other).unwrap();
    let error = Vit::load(engine, directory.path().join("other")).unwrap_err().to_string();
    assert!(error.contains("positions.weight") || error.contains("patches.weight"), "{error}");
    let mut loaded = Vit::load(engine, &path).unwrap();
    images.prepare(engine, &mut loaded).unwrap();
    let shape = BatchShape { batch: 3, positions: model.positions() };
    let batch = images.batch_of([0, 1, 2], shape.positions);
    let [expected, found] = [model, &mut loaded].map(|model| model.features(engine, &batch.inputs, shape).unwrap());
    for (expected, found) in expected.iter().flatten().zip(found.iter().flatten()) {
        assert!((expected - found).abs() < 1e-4, "{expected} {found}");
    }
}

#[test]
fn sizes_and_data_that_do_not_fit_are_errors() {
    let good = VitConfig::from(&settings(Pooling::Class));
    for (bad, word) in [
        (VitConfig { patch: 4, ..good.clone() }, "patch"),
        (VitConfig { classes: 0, ..good.clone() }, "classes"),
        (VitConfig { heads: 3, ..good.clone() }, "heads"),
        (VitConfig { image: [1 << 20; 2], patch: 1, ..good.clone() }, "patch"),
    ] {
        let message = bad.validate().unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
    let mut model = Vit::new(&ENGINE, good.clone(), 1).unwrap();
    let shape = BatchShape { batch: 1, positions: 5 };
    assert!(model.features(&ENGINE, &[0, 1, 2, 3, 4], shape).is_err(), "not prepared");
    let other = ImageSet::new([3, 6, 2], vec![0; 36 * 8], vec![0; 8], 0.25).unwrap();
    assert!(matches!(other.prepare(&ENGINE, &mut model), Err(Error::Setting { .. })));
    let beyond = ImageSet::new([6, 6, 2], vec![0; 72 * 8], vec![3; 8], 0.25).unwrap();
    assert!(matches!(
        beyond.prepare(&ENGINE, &mut model),
        Err(Error::Operation(twofour_transformer::Error::Token { token: 3, .. }))
    ));
    images(8).prepare(&ENGINE, &mut model).unwrap();
    assert!(matches!(
        model.features(&ENGINE, &[0, 1, 2, 3, 40], shape),
        Err(Error::Operation(twofour_transformer::Error::Token { .. }))
    ));
}
