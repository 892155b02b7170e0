//! Greedy text of compressed and quantized checkpoints against that of the same checkpoints decompressed.

use std::{fs, ops::ControlFlow, path::Path};

use half::bf16;
use twofour::{
    DataType, Selector,
    file::{self, Compress, Convert, Decompress, Prune, Quantization, Quantize, Reader, StoredDType},
    int4::Granularity,
    kernel::KernelElement,
    quantization::ScaleRule,
};

use super::{Checkpoint, StoredElement};
use crate::model::{Inference, Sampling};

fn is_linear(name: &str) -> bool {
    name.contains("proj")
}

fn is_head_or_embedding(name: &str) -> bool {
    name.contains("embed") || name.contains("head")
}

fn pruned(family: &str, to: &Path) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints").join(family);
    fs::create_dir(to).unwrap();
    let which =
        |tensor: &file::TensorInfo| (is_linear(&tensor.name) && tensor.shape.len() == 2).then_some(Selector::TWO_FOUR);
    let sharded = !from.join("model.safetensors").exists();
    if sharded {
        fs::remove_dir(to).unwrap();
        Convert::open(&from).unwrap().run(to, Prune::new(&which)).unwrap();
    } else {
        let to = to.join("model.safetensors");
        Convert::open(from.join("model.safetensors")).unwrap().run(to, Prune::new(&which)).unwrap();
    }
    fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
}

/// Forty greedy tokens and the scores behind the prompt.
fn written<T: KernelElement + StoredElement>(directory: &Path) -> (Vec<u32>, Vec<f32>) {
    let model: Inference<T> = Checkpoint::open(directory).unwrap().inference().unwrap();
    let (prompt, mut tokens) = ([3, 5, 7, 11], vec![]);
    let mut push = |token| {
        tokens.push(token);
        ControlFlow::Continue(())
    };
    model.generate(&prompt, 40, Sampling { temperature: 0.0, seed: 0 }, &mut push).unwrap();
    (tokens, model.session().feed(&prompt).unwrap())
}

#[test]
fn compressed_and_decompressed_checkpoints_write_the_same_text() {
    for family in ["llama", "mistral", "qwen2", "qwen3"] {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        pruned(family, &at("pruned"));
        let which = |tensor: &file::TensorInfo| is_linear(&tensor.name) && tensor.shape.len() == 2;
        let options = Compress { which: &which, ..Default::default() };
        Convert::open(at("pruned")).unwrap().run(at("small"), options).unwrap();
        Convert::open(at("small")).unwrap().run(at("again"), Decompress).unwrap();
        // In f32 weights of the file's 16 bits are multiplied in those: other roundings, so other text is possible.
        if family == "llama" {
            assert_eq!(written::<f32>(&at("small")), written::<f32>(&at("again")), "{family}");
        }
        if family.starts_with("qwen") {
            assert_eq!(written::<bf16>(&at("small")), written::<bf16>(&at("again")), "{family}");
        }
        for head in [false, true] {
            let name = |what: &str| at(&format!("{what}-{head}"));
            let options = Quantize {
                which: &|name, _: StoredDType, _| is_linear(name),
                dense: &|name, _: StoredDType, _| head && is_head_or_embedding(name),
                to: Quantization::Int8(Granularity::Row),
                rule: ScaleRule::MaxAbs,
            };
            let report = Convert::open(at("pruned")).unwrap().run(name("int8"), options).unwrap();
            let dense = |made: &file::Quantized| made.is_dense && made.relative_error < 0.02;
            let tied = family == "qwen2";
            assert_eq!(
                report.changed().filter(|(_, made)| dense(made)).count(),
                if !head {
                    0
                } else if tied {
                    1
                } else {
                    2
                }
            );
            // Decompressed, the layers are floats, and inputs are not rounded to integers.
            Convert::open(name("int8")).unwrap().run(name("int8-dense"), Decompress).unwrap();
            let is_float =
                |tensor: &file::TensorInfo| tensor.dtype.element().is_some_and(|dtype| dtype != DataType::I8);
            assert!(Reader::open(name("int8-dense")).unwrap().tensors().all(is_float), "{family}");
            let [small, again, original] =
                [name("int8"), name("int8-dense"), at("pruned")].map(|path| written::<f32>(&path).1);
            let size = original.iter().fold(0f32, |most, score| most.max(score.abs()));
            for (a, b) in [(&small, &again), (&small, &original), (&again, &original)] {
                let distance = a.iter().zip(b).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
                assert!(distance > 0.0 && distance < 0.1 * size, "{family}: {distance} of {size}");
            }
            let [all, quantized] = [at("pruned"), name("int8")]
                .map(|path| Checkpoint::open(path).unwrap().inference::<f32>().unwrap().weight_bytes());
            assert!(quantized < all, "{family}: {quantized} of {all}");
        }
    }
}
