//! Embeddings of sentences against sentence-transformers; skipped where python3 does not have it.
#![allow(missing_docs)]

use std::{collections::HashMap, path::Path, process::Command};

use twofour::DataType;
use twofour_nn::model::SentenceEncoder;

/// Writes models of sentence-transformers with every pooling, linear layers and normalization into folders, and their
/// embeddings of sentences to `expected.json`.
const SCRIPT: &str = r#"
import json, os, shutil, sys, warnings
warnings.filterwarnings("ignore")
import torch
from sentence_transformers import SentenceTransformer, models
checkpoints, out = sys.argv[1:]
sentences = ["two of four", "the mask", "a weight is pruned, and the rest of them are kept", "rows", "half of the work"]
torch.manual_seed(0)
found = {}
for name, poolings, layers in [
    ("bert", ["cls"], []),
    ("bert", ["max"], []),
    ("bert", ["mean"], [(6, torch.nn.Tanh()), (4, torch.nn.Identity())]),
    ("bert", ["mean_sqrt_len_tokens"], [(12, torch.nn.ReLU())]),
    ("bert", ["weightedmean"], [(6, torch.nn.Sigmoid())]),
    ("bert", ["lasttoken"], []),
    ("bert", ["mean", "cls"], [(6, torch.nn.SiLU())]),
    ("qwen2", ["lasttoken"], []),
    ("llama", ["mean"], [(6, torch.nn.Tanh())]),
    ("gpt2", ["weightedmean"], []),
]:
    base = os.path.join(out, "of-" + name)
    if not os.path.exists(base):
        shutil.copytree(os.path.join(checkpoints, name), base)
        # The tokenizer as its file has it; batches of one are never padded.
        with open(os.path.join(base, "tokenizer_config.json"), "w") as file:
            json.dump({"tokenizer_class": "PreTrainedTokenizerFast"}, file)
    transformer = models.Transformer(base)
    if transformer.tokenizer.pad_token is None:
        transformer.tokenizer.pad_token = transformer.tokenizer.convert_ids_to_tokens(0)
    width = transformer.get_word_embedding_dimension()
    flags = {"pooling_mode": poolings if len(poolings) > 1 else poolings[0]}
    modules = [transformer, models.Pooling(width, **flags)]
    width *= len(poolings)
    for outputs, function in layers:
        modules.append(models.Dense(width, outputs, activation_function=function))
        width = outputs
    modules.append(models.Normalize())
    model = SentenceTransformer(modules=modules, device="cpu").float()
    folder = "-".join([name, *poolings, str(len(layers))])
    model.save(os.path.join(out, folder))
    found[folder] = [model.encode(sentence).tolist() for sentence in sentences]
json.dump({"sentences": sentences, "embeddings": found}, open(os.path.join(out, "expected.json"), "w"))
"#;

#[derive(serde::Deserialize)]
struct Expected {
    sentences: Vec<String>,
    embeddings: HashMap<String, Vec<Vec<f64>>>,
}

#[test]
fn embeddings_are_those_of_sentence_transformers() {
    let present = Command::new("python3").args(["-c", "import sentence_transformers"]).output();
    if !present.as_ref().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: python3 with sentence_transformers is not installed");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let checkpoints = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints");
    let output = Command::new("python3").args(["-c", SCRIPT]).arg(&checkpoints).arg(folder.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read(folder.path().join("expected.json")).unwrap();
    let expected: Expected = serde_json::from_slice(&text).unwrap();
    assert_eq!(expected.embeddings.len(), 10);
    for (name, embeddings) in &expected.embeddings {
        let model = SentenceEncoder::load(folder.path().join(name), DataType::F32).unwrap();
        for (sentence, expected) in expected.sentences.iter().zip(embeddings) {
            let found = model.embedding(sentence, model.context()).unwrap();
            let difference = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(found.len() == expected.len() && difference < 2e-5, "{name}, {sentence}: {difference}");
        }
    }
}
