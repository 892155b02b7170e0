//! Training of encoders: it learns, micro-batches add up, and it resumes bit for bit.

use std::sync::Arc;

use super::training;
use crate::{
    engine::{Memory as _, cpu::CpuEngine},
    model::{BertConfig, EncoderTask, GptConfig, TransformerConfig},
    questions::tests::{asked, tokenizer},
    text::SpecialTokens,
    train::{
        Corpus, EncoderData, MaskedText, QuestionSet, SparsityPlan, StepReport, Trainer, TrainingSettings,
        methods::Method,
    },
};

const TASKS: [EncoderTask; 2] = [EncoderTask::Answers, EncoderTask::MaskedTokens];

fn config(task: EncoderTask) -> BertConfig {
    let sizes = GptConfig { layers: 2, width: 32, heads: 2, context: 48, feed_forward: 64 };
    let encoder = TransformerConfig::bert(&sizes, 90);
    BertConfig { encoder, task, positions: 40 }
}

fn data(task: EncoderTask) -> Arc<EncoderData> {
    Arc::new(match task {
        EncoderTask::Answers => {
            let folder = tempfile::tempdir().unwrap();
            let set = QuestionSet::new(&asked(8), &tokenizer(folder.path()), 40, 0.2).unwrap();
            EncoderData::Questions(Arc::new(set))
        }
        EncoderTask::MaskedTokens => {
            let corpus = Corpus::of_tokens((0..2000).map(|i| 10 + i % 7).collect(), 0.1).unwrap();
            let special = SpecialTokens { framing: [vec![1], vec![2]], mask: 3 };
            EncoderData::MaskedText(MaskedText::new(corpus, special, 90).unwrap())
        }
    })
}

fn plan(method: Method) -> SparsityPlan {
    let layers = (0..2).flat_map(|layer| ["up", "down"].map(|part| format!("blocks.{layer}.mlp.{part}"))).collect();
    SparsityPlan::of_method(method, layers, 60)
}

fn trainer(task: EncoderTask, method: Method, training: &TrainingSettings) -> Trainer<CpuEngine, EncoderData> {
    Trainer::new(CpuEngine, config(task), training, plan(method), data(task)).unwrap()
}

fn steps(trainer: &mut Trainer<CpuEngine, EncoderData>, count: usize) -> Vec<StepReport> {
    (0..count).map(|_| StepReport { seconds: 0.0, ..trainer.step().unwrap() }).collect()
}

fn bits(trainer: &Trainer<CpuEngine, EncoderData>) -> Vec<u32> {
    let masters = trainer.model().parameters().into_iter().flat_map(|p| CpuEngine.read(p.master()).unwrap());
    masters.map(f32::to_bits).collect()
}

#[test]
fn encoders_learn_both_tasks_dense_and_two_of_four() {
    for task in TASKS {
        for method in [Method::DENSE, Method::STE, Method::FIXED] {
            let mut trainer = trainer(task, method, &training());
            let before = trainer.evaluate(16).unwrap();
            assert_eq!(before.accuracy, None);
            let reports = steps(&mut trainer, 60);
            let targets = config(task).targets();
            assert!(reports.iter().all(|report| report.targets == 4 * targets && !report.skipped));
            assert_eq!(reports[59].is_sparse, method != Method::DENSE);
            let after = trainer.evaluate(16).unwrap();
            assert!(after.loss < 0.7 * before.loss, "{task:?} {method:?}: {before:?}, {after:?}");
            assert_eq!(trainer.evaluate(16).unwrap(), after, "validation changes nothing");
        }
    }
}

#[test]
fn micro_batches_of_an_encoder_add_up_to_the_batch() {
    for task in TASKS {
        let mut whole = trainer(task, Method::STE, &training());
        let mut parts = trainer(task, Method::STE, &TrainingSettings { micro_batch: Some(1), ..training() });
        for (a, b) in steps(&mut whole, 3).iter().zip(steps(&mut parts, 3)) {
            assert!((a.loss - b.loss).abs() < 1e-5, "{task:?}: {} and {}", a.loss, b.loss);
            let norm = (a.gradient_norm - b.gradient_norm).abs() / a.gradient_norm;
            assert!(norm < 1e-4, "{task:?}: {} and {}", a.gradient_norm, b.gradient_norm);
        }
    }
}

#[test]
fn an_encoder_goes_on_from_its_checkpoint_bit_for_bit() {
    for task in TASKS {
        let mut whole = trainer(task, Method::SR_STE, &training());
        let expected = steps(&mut whole, 8);
        let directory = tempfile::tempdir().unwrap();
        let mut begun = trainer(task, Method::SR_STE, &training());
        steps(&mut begun, 3);
        begun.save(directory.path()).unwrap();
        let mut resumed = trainer(task, Method::SR_STE, &training());
        resumed.resume(directory.path()).unwrap();
        assert_eq!(steps(&mut resumed, 5), expected[3..], "{task:?}");
        assert!(bits(&resumed) == bits(&whole), "{task:?}");
    }
}

#[test]
fn data_and_layers_that_do_not_fit_the_encoder_are_refused() {
    let refused = |config: BertConfig, plan: SparsityPlan, task: EncoderTask| {
        Trainer::new(CpuEngine, config, &training(), plan, data(task)).unwrap_err().to_string()
    };
    let [answers, masked] = TASKS;
    assert!(refused(config(answers), plan(Method::DENSE), masked).contains("another task"));
    let short = BertConfig { positions: 32, ..config(answers) };
    assert!(refused(short, plan(Method::DENSE), answers).contains("windows"));
    let mut few = config(answers);
    few.encoder = few.encoder.with_vocabulary(20);
    assert!(refused(few, plan(Method::DENSE), answers).contains("vocabulary has 20"));
    let embedding = SparsityPlan::of_method(Method::STE, vec!["embedding".to_owned()], 60);
    assert!(refused(config(masked), embedding, masked).contains("read dense"));
    assert!(
        refused(config(masked), SparsityPlan::of_method(Method::ACTIVATION, vec![], 60), masked).contains("squared")
    );
}
