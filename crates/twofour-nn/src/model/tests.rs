//! The model as a whole.

use twofour::{
    DataType,
    file::Overwrite,
    layer::{Accumulate, MaskRule, SparseLinearSettings},
};

use super::{
    AttentionConfig, DistillationLoss, FeedForwardConfig, Gpt, GptConfig, Inference, ModelInput, ModelOutput,
    NormConfig, NormPlace, Objective, Positions, Rope, TokenInput, TrainedModel as _, TransformerConfig,
};
use crate::{
    block::BatchShape,
    engine::{Kind, Memory as _, Nonlinearity, cpu::CpuEngine},
};

const ENGINE: CpuEngine = CpuEngine;
const SMALL: GptConfig = GptConfig { layers: 2, width: 32, heads: 2, context: 24, feed_forward: 64 };

fn dense() -> Gpt<CpuEngine> {
    let mut model = Gpt::new(&ENGINE, &SMALL, 1).unwrap();
    model.begin_training(&ENGINE).unwrap();
    model
}

/// The same parameters, every block's layers 2:4 and the head dense.
fn sparse(rule: MaskRule) -> Gpt<CpuEngine> {
    let mut model = dense();
    let settings = SparseLinearSettings { rule, ..Default::default() };
    for linear in model.linears_mut().filter(|linear| linear.name() != "head") {
        linear.make_sparse(&ENGINE, settings, 0).unwrap();
    }
    model
}

fn bytes(count: usize, seed: u32) -> Vec<u32> {
    (0..count as u32).map(|i| (i * 37 + seed * 101 + i * i) % 256).collect()
}

fn mean_loss(model: &mut Gpt<CpuEngine>, x: &[u32], y: &[u32], shape: BatchShape) -> f64 {
    let mut loss = ENGINE.zeros(Kind::Wide, 1).unwrap();
    model.loss(&ENGINE, (x, y), shape, &mut loss).unwrap();
    f64::from(ENGINE.read(&loss).unwrap()[0]) / shape.tokens() as f64
}

fn backward(model: &mut Gpt<CpuEngine>, x: &[u32], y: &[u32], shape: BatchShape) -> f64 {
    let mut loss = ENGINE.zeros(Kind::Wide, 1).unwrap();
    let how = (1.0 / shape.tokens() as f32, Accumulate::Overwrite);
    model.gradients(&ENGINE, (x, y), shape, how, &mut loss).unwrap();
    f64::from(ENGINE.read(&loss).unwrap()[0]) / shape.tokens() as f64
}

#[test]
fn every_parameter_gets_a_gradient_dense_and_sparse() {
    let shape = BatchShape { batch: 2, positions: 9 };
    for (form, mut model) in [("dense", dense()), ("sparse", sparse(MaskRule::Magnitude))] {
        backward(&mut model, &bytes(18, 1), &bytes(18, 2), shape);
        let parameters = model.parameters();
        let count: usize = parameters.iter().map(|p| p.shape().iter().product::<usize>()).sum();
        assert_eq!(count, SMALL.parameters());
        for parameter in parameters {
            let gradient = ENGINE.read(parameter.gradient().unwrap()).unwrap();
            let largest = gradient.iter().fold(0f32, |m, v| m.max(v.abs()));
            assert!(
                largest > 0.0 && largest.is_finite(),
                "{form}: the gradient of `{}` is {largest} at most",
                parameter.name()
            );
        }
    }
}

#[test]
fn gradients_of_the_whole_model_agree_with_finite_differences() {
    let (mut model, shape) = (dense(), BatchShape { batch: 1, positions: 6 });
    let (x, y) = (bytes(6, 3), bytes(6, 4));
    let loss = backward(&mut model, &x, &y, shape);
    assert!((loss - mean_loss(&mut model, &x, &y, shape)).abs() < 1e-6);
    for index in 0..model.parameters().len() {
        let parameters = model.parameters();
        let parameter = parameters[index];
        let name = parameter.name().to_owned();
        let values = ENGINE.read(parameter.master()).unwrap();
        let gradient = ENGINE.read(parameter.gradient().unwrap()).unwrap();
        // The direction of the gradient: the derivative along it is its norm.
        let norm = gradient.iter().map(|g| g * g).sum::<f32>().sqrt();
        // The same relative change of the loss for every parameter.
        let step = 1e-2 / norm;
        let mut along = |by: f32| {
            let moved: Vec<f32> = values.iter().zip(&gradient).map(|(v, g)| v + by * g / norm).collect();
            model.parameters_mut()[index].write(&ENGINE, &moved).unwrap();
            mean_loss(&mut model, &x, &y, shape)
        };
        let numeric = (along(step) - along(-step)) / f64::from(2.0 * step);
        model.parameters_mut()[index].write(&ENGINE, &values).unwrap();
        let norm = f64::from(norm);
        assert!((numeric - norm).abs() < 0.05 * norm, "`{name}`: {numeric} along a gradient of norm {norm}");
    }
}

#[test]
fn the_future_does_not_reach_the_past() {
    let mut model = dense();
    let shape = BatchShape { batch: 1, positions: 10 };
    let first = bytes(10, 5);
    let changed: Vec<u32> = first[..6].iter().copied().chain(bytes(4, 9)).collect();
    let (a, b) = (model.logits(&ENGINE, &first, shape).unwrap(), model.logits(&ENGINE, &changed, shape).unwrap());
    assert_eq!(a[..6 * 256], b[..6 * 256]);
    assert_ne!(a[6 * 256..], b[6 * 256..]);
}

#[test]
fn bad_tokens_and_shapes_are_refused() {
    let mut model = dense();
    let shape = BatchShape { batch: 1, positions: 3 };
    let error = model.logits(&ENGINE, &[1, 256, 2], shape).unwrap_err().to_string();
    assert!(error.contains("token 256 at position 1"), "{error}");
    assert!(model.logits(&ENGINE, &[1, 2], shape).is_err());
    let long = BatchShape { batch: 1, positions: 25 };
    assert!(model.logits(&ENGINE, &bytes(25, 1), long).unwrap_err().to_string().contains("25 tokens"));
    assert!(model.logits(&ENGINE, &[], BatchShape { batch: 0, positions: 3 }).is_err());
}

#[test]
fn files_keep_the_model() {
    let directory = tempfile::tempdir().unwrap();
    let (text, shape) = (bytes(10, 7), BatchShape { batch: 1, positions: 10 });
    let models =
        [("dense", dense()), ("sparse", sparse(MaskRule::Magnitude)), ("soft", sparse(MaskRule::SoftThreshold))];
    for (name, mut model) in models {
        let expected = model.logits(&ENGINE, &text, shape).unwrap();
        for (dtype, tolerance) in [(DataType::F32, 1e-5), (DataType::BF16, 2e-2), (DataType::F16, 2e-3)] {
            let path = directory.path().join(format!("{name}-{dtype}.safetensors"));
            model.save(&ENGINE, &path, Overwrite::No, dtype).unwrap();
            assert!(model.save(&ENGINE, &path, Overwrite::No, dtype).is_err(), "an existing file was replaced");
            let mut loaded = Gpt::load(&ENGINE, &path).unwrap();
            assert_eq!(loaded.config(), model.config());
            let found = loaded.logits(&ENGINE, &text, shape).unwrap();
            let distance = found.iter().zip(&expected).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(distance < tolerance, "{name} {dtype}: {distance}");
        }
        assert!(model.save(&ENGINE, directory.path().join("i8"), Overwrite::No, DataType::I8).is_err());
    }
    let size = |name: &str| std::fs::metadata(directory.path().join(name)).unwrap().len();
    assert!(size("sparse-bf16.safetensors") < size("dense-bf16.safetensors"));
}

/// A LLaMA with heads that share keys and values; its head is the embedding, or has a weight of its own.
fn llama(tied: bool) -> TransformerConfig {
    use crate::recipe::{ModelKind, ModelSettings};
    let settings = ModelSettings {
        kind: ModelKind::Llama,
        layers: 2,
        width: 32,
        heads: 4,
        kv_heads: Some(2),
        context: 24,
        feed_forward: Some(48),
        ..Default::default()
    };
    let output = ModelOutput::Vocabulary { tied, soft_cap: None };
    TransformerConfig { output, ..TransformerConfig::from(&settings) }
}

/// What differs from LLaMA in the decoders that train.
fn families() -> Vec<(&'static str, TransformerConfig)> {
    let gpt2 = TransformerConfig {
        positions: Positions::Learned,
        output: ModelOutput::Vocabulary { tied: true, soft_cap: None },
        ..TransformerConfig::from(&SMALL)
    };
    let gelu = FeedForwardConfig { activation: Nonlinearity::TanhGelu, ..gpt2.feed_forward };
    let qwen3 = llama(true);
    let head_norms = AttentionConfig { head_norms: true, ..qwen3.attention.clone() };
    let input = TokenInput { scale: Some(5.5), ..*qwen3.tokens().unwrap() };
    let windows = vec![Some(3), None];
    let local_rope = Some(Rope { base: 100.0, scaling: None });
    let attention =
        AttentionConfig { scale: Some(0.3), soft_cap: Some(2.0), windows, local_rope, ..head_norms.clone() };
    let gemma = TransformerConfig {
        input: ModelInput::Tokens(input),
        attention,
        norm: NormConfig { place: NormPlace::Around, ..qwen3.norm },
        feed_forward: FeedForwardConfig { activation: Nonlinearity::TanhGelu, ..qwen3.feed_forward },
        output: ModelOutput::Vocabulary { tied: true, soft_cap: Some(3.0) },
        ..qwen3.clone()
    };
    vec![
        ("llama", llama(false)),
        ("tied llama", llama(true)),
        ("gpt2", TransformerConfig { feed_forward: gelu, ..gpt2 }),
        ("qwen3", TransformerConfig { attention: head_norms, ..qwen3 }),
        ("gemma", gemma),
    ]
}

#[test]
fn gradients_of_families_agree_with_finite_differences() {
    let shape = BatchShape { batch: 2, positions: 9 };
    let (x, y) = (bytes(18, 1), bytes(18, 2));
    for (family, config) in families() {
        let mut model = Gpt::new(&ENGINE, config.clone(), 1).unwrap();
        model.begin_training(&ENGINE).unwrap();
        // Twenty times the initial deviation, so that differences stand out of rounding.
        for parameter in model.parameters_mut() {
            let values: Vec<f32> = ENGINE.read(parameter.master()).unwrap();
            let factor = if parameter.shape().len() == 2 { 20.0 } else { 1.0 };
            parameter.write(&ENGINE, &values.iter().map(|v| v * factor).collect::<Vec<_>>()).unwrap();
        }
        backward(&mut model, &x, &y, shape);
        let count: usize = model.parameters().iter().map(|p| p.shape().iter().product::<usize>()).sum();
        assert_eq!(count, config.parameters(), "{family}");
        for index in 0..model.parameters().len() {
            let parameter = model.parameters()[index];
            let name = parameter.name().to_owned();
            let gradient = ENGINE.read(parameter.gradient().unwrap()).unwrap();
            let values = ENGINE.read(parameter.master()).unwrap();
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            assert!(norm > 0.0, "{family}, {name}: no gradient");
            let h = 2e-2 / norm.max(0.05) as f32 * 0.05;
            let mut along = |by: f32| {
                let moved: Vec<f32> = values.iter().zip(&gradient).map(|(v, g)| v + by * g / norm as f32).collect();
                model.parameters_mut()[index].write(&ENGINE, &moved).unwrap();
                mean_loss(&mut model, &x, &y, shape)
            };
            let numeric = (along(h) - along(-h)) / f64::from(2.0 * h);
            along(0.0);
            assert!(
                (numeric - norm).abs() < 2e-2 * norm.max(0.01),
                "{family}, {name}: {numeric}, by the gradient {norm}"
            );
        }
    }
}

#[test]
fn gradients_of_students_agree_with_finite_differences() {
    let shape = BatchShape { batch: 2, positions: 9 };
    let (x, y) = (bytes(18, 1), bytes(18, 2));
    let loss = DistillationLoss { divergence: 0.7, cross_entropy: 0.2, hidden: 0.5 };
    for (family, config) in families() {
        let grown = |seed: u64| {
            let mut model = Gpt::new(&ENGINE, config.clone(), seed).unwrap();
            model.begin_training(&ENGINE).unwrap();
            for parameter in model.parameters_mut() {
                let values: Vec<f32> = ENGINE.read(parameter.master()).unwrap();
                let factor = if parameter.shape().len() == 2 { 20.0 } else { 1.0 };
                parameter.write(&ENGINE, &values.iter().map(|v| v * factor).collect::<Vec<_>>()).unwrap();
            }
            model
        };
        let (mut model, mut teacher) = (grown(1), grown(2));
        model.expect_teacher(&teacher, &loss).unwrap();
        let batch = model.uploaded(&ENGINE, (&x, &y), shape).unwrap().unwrap();
        let taught = teacher.parameters().iter().map(|p| ENGINE.read(p.master()).unwrap()).collect::<Vec<_>>();
        let mut pass = |model: &mut Gpt<CpuEngine>, loss| {
            let mut sum = ENGINE.zeros(Kind::Wide, 1).unwrap();
            let (batch, scaling) = ((&batch, Objective::Teacher(&mut teacher, loss)), (1.0, Accumulate::Overwrite));
            model.gradients_of(&ENGINE, batch, shape, scaling, &mut sum, &mut |_| Ok(())).unwrap();
            f64::from(ENGINE.read(&sum).unwrap()[0])
        };
        pass(&mut model, loss);
        let gradients: Vec<_> =
            model.parameters().iter().map(|p| ENGINE.read(p.gradient().unwrap()).unwrap()).collect();
        for (index, gradient) in gradients.iter().enumerate() {
            let name = model.parameters()[index].name().to_owned();
            let values = ENGINE.read(model.parameters()[index].master()).unwrap();
            let norm = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            assert!(norm > 0.0, "{family}, {name}: no gradient");
            let h = 1e-3f32;
            let mut along = |by: f32| {
                let moved: Vec<f32> = values.iter().zip(gradient).map(|(v, g)| v + by * g / norm as f32).collect();
                model.parameters_mut()[index].write(&ENGINE, &moved).unwrap();
                pass(&mut model, loss)
            };
            let numeric = (along(h) - along(-h)) / f64::from(2.0 * h);
            along(0.0);
            assert!((numeric - norm).abs() < 2e-2 * norm.max(0.5), "{family}, {name}: {numeric}, by {norm}");
        }
        // A teacher stays as it is, and one that has the student's weights has nothing to teach.
        let alike = DistillationLoss { cross_entropy: 0.0, ..loss };
        let mut own = grown(1);
        let mut sum = ENGINE.zeros(Kind::Wide, 1).unwrap();
        let both = (&batch, Objective::Teacher(&mut own, alike));
        model.gradients_of(&ENGINE, both, shape, (1.0, Accumulate::Overwrite), &mut sum, &mut |_| Ok(())).unwrap();
        assert!(ENGINE.read(&sum).unwrap()[0].abs() < 1e-3, "{family}: {sum:?}");
        for (before, after) in taught.iter().zip(teacher.parameters()) {
            assert!(*before == ENGINE.read(after.master()).unwrap(), "{family}: {}", after.name());
        }
    }
}

#[test]
fn teachers_that_do_not_fit_are_refused() {
    let model = |config: TransformerConfig| Gpt::new(&ENGINE, config, 1).unwrap();
    let student = model(llama(false));
    let hidden = DistillationLoss { hidden: 1.0, ..Default::default() };
    let sized = |layers, context| {
        let settings = GptConfig { layers, context, ..SMALL };
        TransformerConfig::from(&settings)
    };
    student.expect_teacher(&model(sized(3, 24)), &DistillationLoss::default()).unwrap();
    for (teacher, loss, words) in [
        (llama(false).with_vocabulary(300), Default::default(), "300, for a student of 256, is not as many"),
        (sized(2, 23), Default::default(), "the context of a teacher: 23"),
        (sized(3, 24), hidden, "layers of a teacher of hidden states: 3"),
        (llama(false), DistillationLoss { divergence: 0.0, ..Default::default() }, "one of them above 0"),
        (llama(false), DistillationLoss { hidden: -1.0, ..Default::default() }, "finite numbers from 0 up"),
        (llama(false), DistillationLoss { divergence: f64::NAN, ..Default::default() }, "NaN"),
    ] {
        let error = student.expect_teacher(&model(teacher), &loss).unwrap_err().to_string();
        assert!(error.contains(words), "{words}: {error}");
    }
    let wide = GptConfig { width: 48, ..SMALL };
    let error = student.expect_teacher(&model(TransformerConfig::from(&wide)), &hidden).unwrap_err().to_string();
    assert!(error.contains("the width of a teacher"), "{error}");
}

#[test]
fn a_llama_is_saved_loaded_and_run() {
    let directory = tempfile::tempdir().unwrap();
    for tied in [false, true] {
        let path = directory.path().join(format!("{tied}.safetensors"));
        let mut model = Gpt::new(&ENGINE, llama(tied), 1).unwrap();
        model.save(&ENGINE, &path, Overwrite::No, DataType::F32).unwrap();
        let mut loaded = Gpt::load(&ENGINE, &path).unwrap();
        assert_eq!(*loaded.config(), llama(tied));
        let (x, shape) = (bytes(12, 3), BatchShape { batch: 1, positions: 12 });
        let expected = model.logits(&ENGINE, &x, shape).unwrap();
        assert_eq!(loaded.logits(&ENGINE, &x, shape).unwrap(), expected);
        let found = Inference::<f32>::load(&path).unwrap().session().logits(&x).unwrap();
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4));
    }
}
