//! A model's file from a stranger, dense or compressed: what is accepted generates text.

#![no_main]

use std::{ops::ControlFlow, sync::LazyLock};

use half::bf16;
use libfuzzer_sys::fuzz_target;
use twofour::{
    DataType,
    file::{self, Compress, Convert, NotSparse, Overwrite, Reader},
};
use twofour_fuzz::damaged_file;
use twofour_nn::{
    Error,
    model::{Gpt, GptConfig, Inference, Sampling},
};
use twofour_transformer::engine::cpu::CpuEngine;

/// A small model's file, dense and with compressed layers.
static VALID: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let [dense, small] = ["dense", "small"].map(|name| folder.path().join(name));
    let config = GptConfig { layers: 1, width: 8, heads: 1, context: 4, feed_forward: 8 };
    let model = Gpt::new(&CpuEngine, &config, 1).expect("the sizes are valid");
    model.save(&CpuEngine, &dense, Overwrite::No, DataType::F32).expect("the folder is writable");
    let which = |tensor: &file::TensorInfo| tensor.name.ends_with("up.weight") || tensor.name.ends_with("down.weight");
    let options = Compress { which: &which, not_sparse: NotSparse::Prune, ..Default::default() };
    Convert::open(&dense).expect("it was written").run(&small, options).expect("it is finite");
    [dense, small].map(|path| std::fs::read(path).expect("it was written"))
});

fuzz_target!(init: {
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
}, |input: &[u8]| {
    let Some((kind, input)) = input.split_first() else { return };
    let file = damaged_file(&VALID[usize::from(kind % 2)], "twofour.gpt", input);
    let Ok(reader) = Reader::from_bytes("model", file) else { return };
    // For training it is refused or read, too.
    let _ = Gpt::from_reader(&CpuEngine, &reader);
    let Ok(inference) = Inference::<bf16>::from_reader(&reader) else { return };
    let config = inference.config();
    config.validate().expect("it was validated");
    let mut text = Vec::new();
    let generated = inference.generate(&[97, 98], 1, Sampling::default(), |token| {
        text.push(token);
        ControlFlow::Continue(())
    });
    match generated {
        Ok(()) => assert_eq!(text.len(), 1),
        // Weights may be anything, and so may what they give.
        generated => assert!(matches!(generated, Err(Error::NotFinite { .. })), "{generated:?}"),
    }
});
