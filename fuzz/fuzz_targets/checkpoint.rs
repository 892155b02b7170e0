//! A checkpoint's file from a stranger: what is refused leaves the trainer as it was, and training goes on after
//! either.

#![no_main]

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

use libfuzzer_sys::fuzz_target;
use twofour::file::Reader;
use twofour_fuzz::damaged_file;
use twofour_nn::{
    model::CHECKPOINT_FILE,
    recipe::{Method, ModelKind, ModelSettings, TrainingSettings},
    train::{Corpus, SparsityPlan, Trainer},
};
use twofour_transformer::engine::{Memory as _, cpu::CpuEngine};

fn trainer() -> Trainer<CpuEngine> {
    let kind = ModelKind::Gpt;
    let model =
        ModelSettings { kind, layers: 1, width: 8, heads: 1, context: 4, feed_forward: Some(8), ..Default::default() };
    let training = TrainingSettings { batch: 1, steps: 1 << 40, warm_up: 1, ..Default::default() };
    let layers = ["attn.qkv", "attn.out", "mlp.up", "mlp.down"].map(|part| format!("blocks.0.{part}")).to_vec();
    let plan = SparsityPlan::of_method(Method::STE, layers, training.steps);
    let corpus = Corpus::new(b"Two of every four weights are kept. ".repeat(8), 0.1).expect("the text is long enough");
    Trainer::new(CpuEngine, &model, &training, plan, Arc::new(corpus)).expect("the settings are valid")
}

/// The parameters' bits.
fn bits(trainer: &Trainer<CpuEngine>) -> BTreeMap<String, Vec<u32>> {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let parameters = trainer.model().parameters().into_iter();
    parameters
        .map(|parameter| {
            let values = CpuEngine.read(parameter.master()).expect("masters are f32");
            (parameter.name().to_owned(), bits(values))
        })
        .collect()
}

static VALID: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let mut trainer = trainer();
    trainer.step().expect("training works");
    trainer.save(folder.path()).expect("the folder is writable");
    std::fs::read(folder.path().join(CHECKPOINT_FILE)).expect("it was written")
});

fuzz_target!(init: {
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
}, |input: &[u8]| {
    let Ok(reader) = Reader::from_bytes("checkpoint", damaged_file(&VALID, "twofour.checkpoint", input)) else { return };
    let mut trainer = trainer();
    let before = bits(&trainer);
    if trainer.resume_from_reader(&reader).is_err() {
        assert!(bits(&trainer) == before, "a refused checkpoint changed the parameters");
    }
    let _ = trainer.step();
});
