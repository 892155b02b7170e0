//! On a device: the encoder on the GPU against the encoder on the CPU. Without a device the tests skip; with
//! `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

mod support;

use std::sync::Arc;

use serde_json::{Value, json};
use twofour::{
    DataType,
    layer::{Accumulate, SparseLinearSettings},
};
use twofour_nn::{
    model::{Bert, BertConfig, BertSamples, EncoderTask, GptConfig, Tokenizer, TransformerConfig},
    questions::QuestionFile,
    recipe::{Method, TrainingSettings},
    text::SpecialTokens,
    train::{Corpus, EncoderData, MaskedText, QuestionSet, SparsityPlan, Trainer},
};
use twofour_transformer::{
    engine::{Engine, Kind, cpu::CpuEngine},
    random::Stream,
};

use support::engine;

const TASKS: [EncoderTask; 2] = [EncoderTask::MaskedTokens, EncoderTask::Answers];

/// Heads of 32 elements, as MiniLM's; 37 positions fill no tile of the attention kernels.
fn config(task: EncoderTask) -> BertConfig {
    let sizes = GptConfig { layers: 2, width: 128, heads: 4, context: 40, feed_forward: 256 };
    let encoder = TransformerConfig::bert(&sizes, 211);
    BertConfig { encoder, task, positions: 37 }
}

fn model<E: Engine>(engine: &E, task: EncoderTask, sparse: bool) -> Bert<E> {
    let mut model = Bert::build(engine, &config(task), |name, shape| {
        let (stream, mean) = (Stream::new(3, name), if name.ends_with("norm.weight") { 1.0 } else { 0.0 });
        let count: usize = shape.iter().product();
        Ok((0..count as u64).map(|i| (mean + 0.08 * stream.normal(i)) as f32).collect())
    })
    .unwrap();
    if sparse {
        for linear in model.linears_mut().filter(|linear| linear.name().starts_with("blocks.")) {
            linear.make_sparse(engine, SparseLinearSettings::default(), 1).unwrap();
        }
    }
    model.begin_training(engine).unwrap();
    model
}

/// The loss of three sequences, and the gradient of each parameter by name.
fn passes<E: Engine>(engine: &E, task: EncoderTask, sparse: bool) -> (f64, Vec<(String, Vec<f32>)>) {
    let tokens: Vec<u32> = (0..3 * 37u32).map(|i| i * i % 211).collect();
    let types: Vec<u32> = (0..3 * 37).map(|i| u32::from(i % 37 > 11)).collect();
    let places: Vec<u32> = (0..18).map(|i| 6 * (i % 6) + i / 6).collect();
    let (places, targets) = match task {
        EncoderTask::MaskedTokens => (places, (0..18).map(|i| 11 * i).collect()),
        EncoderTask::Answers => (vec![], vec![3u32, 5, 0, 36, 17, 17]),
    };
    let samples = BertSamples { sequences: 3, tokens: &tokens, types: &types, places: &places, targets: &targets };
    let mut model = model(engine, task, sparse);
    let mut loss = engine.zeros(Kind::Wide, 1).unwrap();
    // Twice, so that buffers of the first pass are used again.
    for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
        model.gradients(engine, samples, (0.5, accumulate), &mut loss).unwrap();
    }
    let gradient = |parameter: &twofour_transformer::parameter::Parameter<E>| {
        (parameter.name().to_owned(), engine.read(parameter.gradient().unwrap()).unwrap())
    };
    (f64::from(engine.read(&loss).unwrap()[0]), model.parameters().into_iter().map(gradient).collect())
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |most, x| most.max(x.abs()))
}

/// The largest difference over the largest magnitude, or over `least` where that is more.
fn distance(found: &[f32], expected: &[f32], least: f32) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0f32, |d, (a, b)| d.max((a - b).abs())) / largest(expected).max(least)
}

#[test]
fn losses_and_gradients_of_every_parameter_are_those_of_the_cpu() {
    // TF32 is not used; bf16 has 8 bits of mantissa, over two layers forward and back.
    for (compute, tolerance) in [(DataType::F32, 2e-4), (DataType::BF16, 0.12), (DataType::F16, 0.03)] {
        let Some(engine) = engine(compute) else { return };
        for (task, sparse) in TASKS.into_iter().flat_map(|task| [(task, false), (task, true)]) {
            // The GPU has no 2:4 layers in f32.
            if sparse && compute == DataType::F32 {
                continue;
            }
            let (expected_loss, expected) = passes(&CpuEngine, task, sparse);
            let (loss, found) = passes(&engine, task, sparse);
            let off = (loss / expected_loss - 1.0).abs();
            assert!(off < f64::from(tolerance) / 4.0, "{compute} {task:?} {sparse}: {loss} and {expected_loss}");
            // Some gradients are zero but for rounding: that of the last norm's bias, because the gradients of answers'
            // scores add up to zero over positions. Rounding leaves more of it where the mantissa is shorter.
            let least = f32::max(tolerance / 6.0, 1e-3)
                * expected.iter().fold(0f32, |most, (_, gradient)| most.max(largest(gradient)));
            for ((name, found), (other, expected)) in found.iter().zip(&expected) {
                assert_eq!(name, other);
                let d = distance(found, expected, least);
                // The gradient of the keys' bias is zero but for rounding, and lies within that of the whole bias.
                assert!(d < tolerance, "{compute} {task:?}, 2:4 {sparse}, {name}: off by {d} of the largest element");
            }
        }
    }
}

#[test]
fn passes_repeat_bit_for_bit() {
    let Some(engine) = engine(DataType::BF16) else { return };
    for task in TASKS {
        let (first, second) = (passes(&engine, task, true), passes(&engine, task, true));
        assert_eq!(first.0.to_bits(), second.0.to_bits(), "{task:?}");
        for ((name, a), (_, b)) in first.1.iter().zip(&second.1) {
            assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{task:?} {name}");
        }
    }
}

/// Texts of the fixture's words, with a question each.
fn questions() -> QuestionSet {
    let folder = tempfile::tempdir().unwrap();
    let mut tokenizer: Value = serde_json::from_str(include_str!("fixtures/checkpoints/bert/tokenizer.json")).unwrap();
    let special = |name: &str| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = json!({"Sequence": {"id": "A", "type_id": 0}});
    tokenizer["post_processor"]["single"] = json!([special("<begin>"), text, special("<end>")]);
    let token = |name: &str, id: u32| json!({"id": name, "ids": [id], "tokens": [name]});
    tokenizer["post_processor"]["special_tokens"] = json!({"<begin>": token("<begin>", 1), "<end>": token("<end>", 0)});
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("tokenizer.json"), tokenizer.to_string()).unwrap();
    let paragraph = |index: usize| {
        let context =
            format!("{} a mask says which two weights of four are kept", "two of every four ".repeat(index % 3));
        let start = context.find("which two").unwrap();
        json!({"context": context, "qas": [{"id": index.to_string(), "question": "a mask says what",
        "answers": [{"text": "which two", "answer_start": start}]}]})
    };
    let file = json!({"data": [{"paragraphs": (0..60).map(paragraph).collect::<Vec<_>>()}]});
    std::fs::write(path("questions.json"), file.to_string()).unwrap();
    let (file, tokenizer) = (QuestionFile::read(path("questions.json")), Tokenizer::read(&path("tokenizer.json")));
    QuestionSet::new(&file.unwrap(), &tokenizer.unwrap(), 37, 0.2).unwrap()
}

fn trainer<E: Engine>(engine: E, task: EncoderTask, method: Method) -> Trainer<E, EncoderData> {
    let data = match task {
        EncoderTask::Answers => EncoderData::Questions(Arc::new(questions())),
        EncoderTask::MaskedTokens => {
            let corpus = Corpus::of_tokens((0..4000).map(|i| 10 + i % 90).collect(), 0.1).unwrap();
            let special = SpecialTokens { framing: [vec![1], vec![2]], mask: 3 };
            EncoderData::MaskedText(MaskedText::new(corpus, special, 211).unwrap())
        }
    };
    let training =
        TrainingSettings { batch: 16, micro_batch: Some(8), steps: 60, warm_up: 4, seed: 9, ..Default::default() };
    let layers = (0..2)
        .flat_map(|layer| ["attn.qkv", "attn.out", "mlp.up", "mlp.down"].map(|part| format!("blocks.{layer}.{part}")));
    let plan = SparsityPlan::of_method(method, layers.collect(), 60);
    Trainer::new(engine, config(task), &training, plan, Arc::new(data)).unwrap()
}

const METHODS: [Method; 5] = [Method::DENSE, Method::FIXED, Method::STE, Method::SR_STE, Method::S_STE];

#[test]
fn training_in_f32_on_the_gpu_is_that_on_the_cpu_but_for_rounding() {
    for task in TASKS {
        let Some(cuda) = engine(DataType::F32) else { return };
        let (mut cpu, mut cuda) = (trainer(CpuEngine, task, Method::DENSE), trainer(cuda, task, Method::DENSE));
        for step in 0..10 {
            let (a, b) = (cpu.step().unwrap(), cuda.step().unwrap());
            assert!((a.loss - b.loss).abs() < 1e-3 * a.loss, "{task:?}, step {step}: {a:?}, {b:?}");
            assert!((a.gradient_norm - b.gradient_norm).abs() < 1e-2 * a.gradient_norm, "{task:?}: {a:?}, {b:?}");
        }
        let (a, b) = (cpu.evaluate(12).unwrap(), cuda.evaluate(12).unwrap());
        assert!((a.loss - b.loss).abs() < 1e-3 * a.loss, "{task:?}: {a:?}, {b:?}");
    }
}

#[test]
fn losses_of_every_method_are_those_of_the_cpu_within_four_percent_and_steps_are_replayed() {
    for (task, method) in TASKS.into_iter().flat_map(|task| METHODS.map(|method| (task, method))) {
        let Some(cuda) = engine(DataType::BF16) else { return };
        let (mut cpu, mut cuda) = (trainer(CpuEngine, task, method), trainer(cuda, task, method));
        for step in 0..15 {
            let (a, b) = (cpu.step().unwrap(), cuda.step().unwrap());
            assert!((a.loss - b.loss).abs() < 0.04 * a.loss.max(0.5), "{task:?} {method:?}, {step}: {a:?}, {b:?}");
        }
        assert_eq!(cuda.take_note(), None, "{task:?} {method:?}");
        assert!(cuda.engine().replayed_steps() > 0, "{task:?} {method:?}");
    }
}

#[test]
fn captured_steps_have_the_bits_of_launched_ones() {
    for (task, method) in TASKS.into_iter().flat_map(|task| METHODS.map(|method| (task, method))) {
        let (Some(one), Some(other)) = (engine(DataType::BF16), engine(DataType::BF16)) else { return };
        other.capture_steps(false);
        let (mut captured, mut launched) = (trainer(one, task, method), trainer(other, task, method));
        for step in 0..12 {
            let [a, b] = [&mut captured, &mut launched].map(|trainer| {
                if step == 6 {
                    trainer.evaluate(12).unwrap();
                }
                let report = trainer.step().unwrap();
                (report.loss.to_bits(), report.gradient_norm.to_bits(), report.layer_flip_rates)
            });
            assert_eq!(a, b, "{task:?} {method:?}, step {step}");
        }
    }
}
