//! A checkpoint's file from a stranger: what is refused leaves the trainer as it was, and training goes on after either.

#![no_main]

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
};

use candle_core::Device;
use libfuzzer_sys::fuzz_target;
use twofour::file::Reader;
use twofour_candle::{
    gpt::{Config, Gpt},
    linear::HasLinears,
    linear::SparseSettings,
    train::{CHECKPOINT_FILE, Corpus, TrainConfig, Trainer},
};
use twofour_fuzz::damaged_file;

fn trainer() -> Trainer {
    let config = Config { layers: 1, width: 8, heads: 1, context: 4, feed_forward: 8 };
    let mut model = Gpt::new(&config, 1, &Device::Cpu).expect("the sizes are valid");
    model
        .visit_linears(&mut |name, linear| {
            if name != "head" {
                *linear = linear.sparse(SparseSettings::default())?;
            }
            Ok(())
        })
        .expect("every layer can be sparse");
    let corpus = Corpus::new(b"Two of every four weights are kept. ".repeat(8), 0.1).expect("the text is long enough");
    let settings = TrainConfig { batch: 1, steps: 1 << 40, warm_up: 1, ..Default::default() };
    Trainer::new(model, Arc::new(corpus), settings).expect("the settings are valid")
}

/// The parameters' bits.
fn bits(trainer: &Trainer) -> BTreeMap<String, Vec<u32>> {
    let variables = trainer.model().variables().expect("the model has variables");
    let bits = |tensor: &candle_core::Tensor| {
        let values = tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("parameters are f32");
        values.into_iter().map(f32::to_bits).collect()
    };
    variables.into_iter().map(|(name, variable)| (name, bits(&variable))).collect()
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
