//! Checkpoints against what transformers computes with them (`tests/fixtures/checkpoints.py`), and damaged ones.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::{Value, json};
use twofour::{
    DataType, Selector,
    file::{self, Compress, Convert, Overwrite, PlannedTensor, Prune, Reader, StoredDType, Writer},
};

use super::{Checkpoint, CheckpointError};
use crate::{
    Error,
    model::{
        Calibration, EncoderCheckpoint, EncoderTask, Inference, LanguageModel, Positions, Rope, RopeScaling, Sampling,
        SavedModel, TransformerConfig, Windows, open_blockwise,
    },
};

const FAMILIES: [&str; 36] = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt2",
    "gemma2",
    "gemma3",
    "phi3",
    "opt",
    "gpt_neox_in_turn",
    "falcon_in_turn",
    "llava",
    "qwen2_5_vl",
    "gemma",
    "starcoder2",
    "smollm3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_neox",
    "falcon",
    "falcon_grouped",
    "gpt_oss",
    "mixtral_joined",
    "phi3_long",
    "bloom",
    "mpt",
    "falcon_alibi",
    "opt_projected",
    "granite",
    "stablelm",
    "stablelm_parallel",
    "phi2",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
];

/// How many of them train.
const TRAINED: usize = 16;

/// How many of them store their tensors as LLaMA and GPT-2 do.
const FIRST: usize = 8;

/// What transformers computes.
#[derive(Deserialize)]
struct Expected {
    text: String,
    tokens: Vec<u32>,
    prompt: String,
    prompt_tokens: Vec<u32>,
    logits: Vec<f32>,
    greedy: Vec<u32>,
    greedy_text: String,
    perplexity: Vec<ExpectedPerplexity>,
}

#[derive(Deserialize)]
struct ExpectedPerplexity {
    window: usize,
    stride: usize,
    perplexity: f64,
    tokens: usize,
}

fn directory(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints").join(family)
}

fn expected(family: &str) -> Expected {
    serde_json::from_slice(&fs::read(directory(family).join("expected.json")).unwrap()).unwrap()
}

fn greedy(model: &Inference<f32>, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut tokens = vec![];
    let sampling = Sampling { temperature: 0.0, seed: 0 };
    let generated = model.generate(prompt, count, sampling, |token| {
        tokens.push(token);
        ControlFlow::Continue(())
    });
    generated.unwrap();
    tokens
}

fn largest_difference(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0f32, |most, (a, b)| most.max((a - b).abs()))
}

#[test]
fn logits_perplexity_and_greedy_tokens_are_those_of_transformers() {
    for family in FAMILIES {
        let (checkpoint, expected) = (Checkpoint::open(directory(family)).unwrap(), expected(family));
        let model = checkpoint.inference::<f32>().unwrap();
        let logits = model.session().logits(&expected.prompt_tokens).unwrap();
        let d = largest_difference(&logits, &expected.logits);
        assert!(d < 1e-4, "{family}: logits differ by {d}");
        assert_eq!(greedy(&model, &expected.prompt_tokens, expected.greedy.len()), expected.greedy, "{family}");
        for ExpectedPerplexity { window, stride, perplexity, tokens } in expected.perplexity {
            let found = model.perplexity(&expected.tokens, Windows { window, stride, begin: None }, |_, _| {}).unwrap();
            assert_eq!(found.tokens, tokens, "{family}, {window} by {stride}");
            let d = (found.perplexity / perplexity - 1.0).abs();
            assert!(d < 1e-4, "{family}, {window} by {stride}: {} and {perplexity}", found.perplexity);
        }
    }
}

#[test]
fn a_text_is_continued_in_three_lines() {
    let expected = expected("llama");
    let text = LanguageModel::load(directory("llama")).unwrap().generate(&expected.prompt, 12).unwrap();
    assert_eq!(text, expected.greedy_text);
}

#[test]
fn a_sequence_fed_in_pieces_has_the_same_logits() {
    for family in FAMILIES {
        let model = Checkpoint::open(directory(family)).unwrap().inference::<f32>().unwrap();
        let tokens = &expected(family).tokens[..30];
        for pieces in [1, 4, 13] {
            let (mut session, mut fed) = (model.session(), 0);
            for piece in tokens.chunks(pieces) {
                let found = session.logits(piece).unwrap();
                fed += piece.len();
                // The text so far at once: the rotation may depend on its length.
                let whole = model.session().logits(&tokens[..fed]).unwrap();
                let d = largest_difference(&found, &whole[whole.len() - found.len()..]);
                assert!(d < 1e-4, "{family} by {pieces}, {fed} tokens: {d}");
            }
        }
    }
}

/// Beyond the original context LongRoPE rotates all tokens by other angles, of texts that are cut back and of several
/// that are written at once, too.
#[test]
fn texts_that_grow_beyond_the_original_context_are_computed_anew() {
    use crate::model::{Decoder, SampledTexts, Sequence};
    let model = Checkpoint::open(directory("phi3_long")).unwrap().inference::<f32>().unwrap();
    let expected = expected("phi3_long");
    let tokens = &expected.tokens;
    let whole = |tokens: &[u32]| model.session().feed(tokens).unwrap();
    let mut session = model.session();
    let mut text = vec![];
    for (kept, fed) in [(0, 12), (12, 1), (13, 8), (5, 2), (7, 5), (12, 3), (15, 20)] {
        text.truncate(kept);
        session.truncate(kept);
        let more = &tokens[text.len()..][..fed];
        text.extend_from_slice(more);
        let d = largest_difference(&session.feed(more).unwrap(), &whole(&text));
        assert!(d < 1e-5, "{kept} and {fed}: {d}");
    }
    // Tokens before the twelfth have other scores in a longer text.
    let (short, long) =
        (model.session().logits(&tokens[..12]).unwrap(), model.session().logits(&tokens[..13]).unwrap());
    assert!(largest_difference(&short, &long[..short.len()]) > 1e-2);
    let texts = SampledTexts {
        prompt: &expected.prompt_tokens,
        count: 3,
        length: expected.prompt_tokens.len() + expected.greedy.len(),
        sampling: Sampling { temperature: 0.0, seed: 0 },
    };
    for written in model.sample(&texts, &mut |_| Ok(())).unwrap() {
        assert_eq!(written[expected.prompt_tokens.len()..], expected.greedy);
    }
}

/// Where layers have windows, too, which no family with such positions has: by GEMMs as one token at a time.
#[test]
fn positions_by_distance_hold_within_windows() {
    for family in ["bloom", "mpt", "falcon_alibi"] {
        let checkpoint = Checkpoint::open(directory(family)).unwrap();
        let tokens = &expected(family).tokens[..30];
        let logits = |windows: Vec<Option<usize>>, pieces: usize| -> Vec<f32> {
            let mut config = checkpoint.config().clone();
            config.attention.windows = windows;
            let model = Inference::<f32>::build(config, &checkpoint.parts()).unwrap();
            let mut session = model.session();
            tokens.chunks(pieces).flat_map(|piece| session.logits(piece).unwrap()).collect()
        };
        let (whole, windowed) = (logits(vec![], 30), logits(vec![Some(5), None], 30));
        assert!(largest_difference(&whole, &logits(vec![Some(30), Some(40)], 1)) < 1e-4, "{family}");
        assert!(largest_difference(&whole, &windowed) > 1e-2, "{family}");
        for pieces in [1, 7, 20] {
            let d = largest_difference(&logits(vec![Some(5), None], pieces), &windowed);
            assert!(d < 1e-4, "{family} by {pieces}: {d}");
        }
    }
}

#[test]
fn models_that_train_compute_the_same_logits() {
    use crate::{block::BatchShape, engine::cpu::CpuEngine};
    for family in &FAMILIES[TRAINED..] {
        let error = Checkpoint::open(directory(family)).unwrap().model(&CpuEngine).unwrap_err().to_string();
        assert!(error.contains("training engine does not support"), "{family}: {error}");
    }
    for family in &FAMILIES[..TRAINED] {
        let (checkpoint, expected) = (Checkpoint::open(directory(family)).unwrap(), expected(family));
        let mut model = checkpoint.model(&CpuEngine).unwrap();
        let shape = BatchShape { batch: 1, positions: expected.prompt_tokens.len() };
        let logits = model.logits(&CpuEngine, &expected.prompt_tokens, shape).unwrap();
        let d = largest_difference(&logits, &expected.logits);
        assert!(d < 1e-4, "{family}: {d}");
    }
}

/// Weights that are stored across, norms of heads and learned positions come back as transformers reads them; of
/// positions, those that did not train stay.
#[test]
fn what_trained_is_saved_as_its_family_stores_it() {
    use crate::{engine::cpu::CpuEngine, model::SavedModel};
    for family in [
        "gpt2",
        "qwen3",
        "gemma2",
        "gemma3",
        "phi3",
        "opt",
        "gpt_neox_in_turn",
        "falcon_in_turn",
        "gemma",
        "starcoder2",
    ] {
        let (saved, tokens) = (SavedModel::open(directory(family)).unwrap(), expected(family).tokens);
        let context = saved.config().context() - 3;
        let model = saved.model(&CpuEngine, context).unwrap();
        assert_eq!(model.config().context(), context);
        let (checkpoint, out) = (saved.checkpoint().unwrap(), tempfile::tempdir().unwrap());
        checkpoint.save((&CpuEngine, &model), out.path(), Overwrite::No, DataType::F32).unwrap();
        let [old, new] = [directory(family), out.path().to_owned()].map(|at| {
            Checkpoint::open(at).unwrap().inference::<f32>().unwrap().session().logits(&tokens[..30]).unwrap()
        });
        assert!(largest_difference(&old, &new) < 1e-5, "{family}");
        let is_positions = |name: &str| name.contains("wpe") || name.contains("embed_positions");
        for tensor in checkpoint.reader().tensors().filter(|tensor| is_positions(&tensor.name)) {
            let reader = Checkpoint::open(out.path()).unwrap();
            let of = |reader: &Reader| crate::model::file::plain(reader, &tensor.name, &tensor.shape).unwrap();
            assert_eq!(of(checkpoint.reader()), of(reader.reader()), "{family}");
        }
    }
}

/// Fine-tuning of a pruned model: the static mask is that of its zeros, and what is saved is a checkpoint again.
#[test]
fn a_pruned_checkpoint_is_fine_tuned_and_saved() {
    use std::sync::Arc;

    use crate::{
        engine::cpu::CpuEngine,
        train::{Corpus, SparsityPlan, Trainer, TrainingSettings, methods::Method},
    };
    let is_linear = |name: &str| name.contains("proj.weight");
    let which = |tensor: &file::TensorInfo| is_linear(&tensor.name).then_some(Selector::TWO_FOUR);
    let (_folder, pruned) = converted("llama", |to| {
        Convert::open(directory("llama")).unwrap().run(to, Prune::new(&which)).unwrap();
    });
    fs::copy(directory("llama").join("tokenizer.json"), pruned.join("tokenizer.json")).unwrap();
    let checkpoint = Checkpoint::open(&pruned).unwrap();
    let model = checkpoint.model(&CpuEngine).unwrap();
    let layers: Vec<String> = model.linears().map(|l| l.name().to_owned()).filter(|name| name != "head").collect();
    let training = TrainingSettings { steps: 25, batch: 2, warm_up: 2, learning_rate: 3e-3, ..Default::default() };
    let plan = SparsityPlan::of_method(Method::FIXED, layers, training.steps);
    let tokens = expected("llama").tokens.repeat(10);
    let corpus = Arc::new(Corpus::of_tokens(tokens.clone(), 0.1).unwrap());
    let mut trainer = Trainer::with_model(CpuEngine, model, &training, plan, corpus).unwrap();
    let before = trainer.validate(2).unwrap();
    while !trainer.is_finished() {
        trainer.step().unwrap();
    }
    assert!(trainer.validate(2).unwrap() < before - 0.3);
    let out = tempfile::tempdir().unwrap();
    let (engine, model) = trainer.engine_and_model();
    checkpoint.save((engine, model), out.path(), Overwrite::No, DataType::F32).unwrap();
    let saved = Checkpoint::open(out.path()).unwrap();
    saved.tokenizer().unwrap();
    let shape = crate::block::BatchShape { batch: 1, positions: 20 };
    let trained = model.logits(engine, &tokens[..20], shape).unwrap();
    let logits = saved.inference::<f32>().unwrap().session().logits(&tokens[..20]).unwrap();
    assert!(largest_difference(&logits, &trained) < 1e-3);
    // Not a zero of the pruned checkpoint has come back.
    for tensor in checkpoint.reader().tensors().filter(|tensor| is_linear(&tensor.name)) {
        let of = |reader: &Reader| crate::model::file::plain(reader, &tensor.name, &tensor.shape).unwrap();
        let (old, new) = (of(checkpoint.reader()), of(saved.reader()));
        assert!(old != new && old.iter().zip(&new).all(|(old, new)| *old != 0.0 || *new == 0.0), "{}", tensor.name);
    }
}

#[test]
#[cfg(unix)]
fn what_is_saved_replaces_no_link() {
    use crate::engine::cpu::CpuEngine;
    let checkpoint = Checkpoint::open(directory("llama")).unwrap();
    let model = checkpoint.model(&CpuEngine).unwrap();
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let out = tempfile::tempdir().unwrap();
        let (precious, link) = (out.path().join("precious"), out.path().join(file));
        fs::write(&precious, "of somebody else").unwrap();
        std::os::unix::fs::symlink(&precious, &link).unwrap();
        let saved = checkpoint.save((&CpuEngine, &model), out.path(), Overwrite::Yes, DataType::F32);
        let message = saved.unwrap_err().to_string();
        assert!(message.contains(file) && message.contains("symbolic link"), "{message}");
        assert_eq!((fs::read_to_string(&precious).unwrap().as_str(), link.is_symlink()), ("of somebody else", true));
    }
}

#[test]
fn tokenizers_encode_and_decode_as_the_python_package_does() {
    for family in FAMILIES {
        let (checkpoint, expected) = (Checkpoint::open(directory(family)).unwrap(), expected(family));
        let tokenizer = checkpoint.tokenizer().unwrap();
        assert_eq!(tokenizer.encode(&expected.text).unwrap(), expected.tokens, "{family}");
        assert_eq!(tokenizer.encode(&expected.prompt).unwrap(), expected.prompt_tokens, "{family}");
        let mut decoder = tokenizer.decoder(&expected.prompt_tokens);
        let mut text: String = expected.greedy.iter().map(|token| decoder.push(*token)).collect();
        let is_incomplete = decoder.is_incomplete();
        text.push_str(&decoder.finish());
        // transformers shows a replacement character for one that is cut.
        assert_eq!(text, expected.greedy_text.trim_end_matches('\u{FFFD}'), "{family}");
        assert_eq!(expected.greedy_text.ends_with('\u{FFFD}'), is_incomplete, "{family}");
    }
}

#[test]
fn types_and_special_tokens_are_read() {
    let of = |family: &str| Checkpoint::open(directory(family)).unwrap();
    let types: Vec<_> = FAMILIES[..FIRST].iter().map(|family| of(family).dtype()).collect();
    let [f32, f16, bf16] = [DataType::F32, DataType::F16, DataType::BF16];
    assert_eq!(types, [f32, f16, bf16, bf16, f32, bf16, f32, f16]);
    assert_eq!((of("llama").begin(), of("llama").end()), (Some(1), &[0u32][..]));
}

/// A copy of a checkpoint's directory.
fn copy_of(family: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(directory(family)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

/// A copy whose weights are `tensors`.
fn with_tensors(family: &str, change: impl Fn(&mut Vec<(String, Vec<usize>, Vec<f32>)>)) -> tempfile::TempDir {
    let copy = copy_of(family);
    let reader = Reader::open(copy.path()).unwrap();
    let mut tensors: Vec<_> = reader
        .tensors()
        .map(|info| {
            let values = crate::model::file::plain(&reader, &info.name, &info.shape).unwrap();
            (info.name.clone(), info.shape.clone(), values)
        })
        .collect();
    drop(reader);
    change(&mut tensors);
    for entry in fs::read_dir(copy.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains("safetensors") {
            fs::remove_file(path).unwrap();
        }
    }
    let planned = tensors.iter().map(|(name, shape, _)| PlannedTensor::new(name, StoredDType::F32, shape.clone()));
    let path = copy.path().join("model.safetensors");
    let mut writer = Writer::create(path, Overwrite::No, planned.collect::<Vec<_>>(), Default::default()).unwrap();
    for (name, _, values) in &tensors {
        writer.write_elements(name, values).unwrap();
    }
    writer.finish().unwrap();
    copy
}

/// A copy whose configuration has other fields.
fn with_config(family: &str, change: impl Fn(&mut serde_json::Map<String, Value>)) -> tempfile::TempDir {
    let copy = copy_of(family);
    let path = copy.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(config.as_object_mut().unwrap());
    fs::write(path, config.to_string()).unwrap();
    copy
}

fn refused(copy: &tempfile::TempDir) -> CheckpointError {
    match Checkpoint::open(copy.path()) {
        Err(Error::Checkpoint(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// A directory with a checkpoint's configuration, and with weights that `convert` writes where it is told: to a
/// directory if the checkpoint is sharded.
fn converted(family: &str, convert: impl FnOnce(&Path)) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    if directory(family).join("model.safetensors").exists() {
        fs::create_dir(&model).unwrap();
        convert(&model.join("model.safetensors"));
    } else {
        convert(&model);
    }
    fs::copy(directory(family).join("config.json"), model.join("config.json")).unwrap();
    (folder, model)
}

#[test]
fn pruned_and_compressed_checkpoints_compute_what_the_zeros_say() {
    for family in ["llama", "qwen2", "gpt2"] {
        let is_linear = |tensor: &file::TensorInfo| {
            (tensor.name.contains("proj") || tensor.name.contains(".c_")) && tensor.shape.len() == 2
        };
        let which = |tensor: &file::TensorInfo| is_linear(tensor).then_some(Selector::TWO_FOUR);
        let (_pruned_folder, pruned) = converted(family, |to| {
            Convert::open(directory(family)).unwrap().run(to, Prune::new(&which)).unwrap();
        });
        let options = Compress { which: &is_linear, ..Default::default() };
        let (_small_folder, small) = converted(family, |to| {
            Convert::open(&pruned).unwrap().run(to, options).unwrap();
        });
        let tokens = expected(family).prompt_tokens;
        let [dense, small] = [&pruned, &small].map(|of| Checkpoint::open(of).unwrap().inference::<f32>().unwrap());
        let logits = |model: &Inference<f32>| model.session().logits(&tokens).unwrap();
        // Compressed weights are multiplied in the file's type.
        let d = largest_difference(&logits(&small), &logits(&dense));
        assert!(d < if family == "qwen2" { 0.2 } else { 1e-4 }, "{family}: {d}");
        assert!(
            largest_difference(&logits(&dense), &expected(family).logits) > 0.1,
            "{family}: pruning changed nothing"
        );
        let original = Checkpoint::open(directory(family)).unwrap().inference::<f32>().unwrap();
        match family {
            // `Conv1D` weights are stored across, so zeros along the stored rows are none along the input features.
            "gpt2" => assert_eq!(dense.weight_bytes(), original.weight_bytes()),
            _ => assert!(dense.weight_bytes() < original.weight_bytes(), "{family}: not on the 2:4 kernels"),
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let missing = with_tensors("llama", |tensors| tensors.retain(|(name, ..)| !name.ends_with("1.mlp.up_proj.weight")));
    let error = refused(&missing);
    assert!(
        matches!(&error, CheckpointError::MissingTensor { name, expected, .. }
            if name == "model.layers.1.mlp.up_proj.weight" && expected == &[24, 16]),
        "{error}"
    );
    let extra = with_tensors("llama", |tensors| tensors.push(("model.layers.0.adapter".into(), vec![1], vec![0.0])));
    assert!(matches!(refused(&extra), CheckpointError::ExtraTensor { name, .. } if name == "model.layers.0.adapter"));
    let wide = with_config("llama", |config| config["intermediate_size"] = json!(28));
    let error = refused(&wide);
    let endings = ["gate_proj.bias", "gate_proj.weight", "down_proj.weight"];
    assert!(
        matches!(&error, CheckpointError::Shape { name, expected, found, .. }
            if endings.iter().any(|ending| name.ends_with(ending)) && expected.contains(&28) && found.contains(&24)),
        "{error}"
    );
    let integers = copy_of("gpt2");
    let reader = Reader::open(integers.path()).unwrap();
    let planned = reader.tensors().map(|info| {
        let dtype = if info.name.ends_with("wpe.weight") { StoredDType::I32 } else { info.dtype };
        PlannedTensor::new(&info.name, dtype, info.shape.clone())
    });
    let path = integers.path().join("model.safetensors");
    let mut writer = Writer::create(&path, Overwrite::Yes, planned.collect::<Vec<_>>(), Default::default()).unwrap();
    for info in reader.tensors() {
        writer.write(&info.name, &reader.tensor(&info.name).unwrap().bytes().unwrap()).unwrap();
    }
    writer.finish().unwrap();
    let error = Checkpoint::open(integers.path()).unwrap().inference::<f32>().unwrap_err().to_string();
    assert!(error.contains("wpe.weight") && error.contains("I32"), "{error}");
}

#[test]
fn what_older_versions_stored_is_ignored() {
    let buffers = with_tensors("gpt2", |tensors| {
        tensors.push(("transformer.h.0.attn.bias".into(), vec![1, 1, 2, 2], vec![1.0; 4]));
        tensors.push(("lm_head.weight".into(), vec![1], vec![7.0]));
        for (name, ..) in tensors.iter_mut() {
            *name = name.replace("transformer.", "");
        }
    });
    let model = Checkpoint::open(buffers.path()).unwrap().inference::<f32>().unwrap();
    let expected = expected("gpt2");
    assert_eq!(greedy(&model, &expected.prompt_tokens, 12), expected.greedy);
}

/// transformers 5 ties no head that is stored and is not the embedding.
#[test]
fn a_head_of_its_own_is_used_whatever_is_said_of_tying() {
    let tied = with_config("llama", |config| config["tie_word_embeddings"] = json!(true));
    let checkpoint = Checkpoint::open(tied.path()).unwrap();
    assert!(!checkpoint.config().is_tied());
    let expected = expected("llama");
    assert_eq!(greedy(&checkpoint.inference::<f32>().unwrap(), &expected.prompt_tokens, 12), expected.greedy);
    let same = with_tensors("gpt2", |tensors| {
        let (_, shape, values) = tensors.iter().find(|(name, ..)| name.ends_with("wte.weight")).unwrap().clone();
        tensors.push(("lm_head.weight".into(), shape, values));
    });
    assert!(Checkpoint::open(same.path()).unwrap().config().is_tied());
}

#[test]
fn fields_that_are_not_supported_are_named() {
    for (family, field, value, word) in [
        ("llama", "model_type", json!("mamba"), "mamba"),
        ("llama", "model_type", json!(null), "absent"),
        ("llama", "hidden_act", json!("mish"), "hidden_act"),
        ("llama", "rope_parameters", json!({"rope_type": "longrope", "factor": 2.0}), "rope_parameters.rope_type"),
        ("llama", "rope_parameters", json!({"rope_type": "yarn", "factor": 0.0}), "rope_parameters.factor"),
        ("llama", "rope_parameters", json!({"rope_type": "yarn", "factor": 2, "rope_theta": 1}), "rope_theta"),
        ("gpt_neox", "rope_parameters", json!({"partial_rotary_factor": 2}), "rotated elements"),
        ("llama", "rope_parameters", json!({"rope_type": "dynamic"}), "rope_parameters.factor"),
        ("llama", "rope_parameters", json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        ("gemma2", "rope_parameters", json!({"rope_type": "yarn", "factor": 2.0}), "rope_parameters"),
        ("phi3", "rope_scaling", json!({"rope_type": "yarn", "factor": 2.0}), "rope_scaling"),
        ("mixtral", "num_local_experts", json!(1 << 18), "fewer tensors"),
        ("mixtral", "num_experts_per_tok", json!(5), "5 of 4"),
        ("qwen3_moe", "moe_intermediate_size", json!(null), "moe_intermediate_size"),
        ("deepseek_v2", "norm_topk_prob", json!(true), "norm_topk_prob"),
        ("deepseek_v2", "topk_method", json!("noaux_tc"), "topk_method"),
        ("deepseek_v2", "n_group", json!(null), "n_group"),
        ("deepseek_v2", "n_group", json!(4), "groups of experts"),
        ("deepseek_v2", "n_group", json!(0), "groups of experts"),
        ("deepseek_v2", "topk_group", json!(4), "groups of experts"),
        ("deepseek_v2", "num_experts_per_tok", json!(5), "groups of experts"),
        ("deepseek_v2", "routed_scaling_factor", json!(0), "routed_scaling_factor"),
        ("deepseek_v2", "mlp_bias", json!(true), "mlp_bias"),
        ("deepseek_v2", "v_head_dim", json!(11), "a head of values"),
        ("deepseek_v2", "qk_nope_head_dim", json!(0), "a head of values"),
        ("deepseek_v3", "attention_bias", json!(true), "attention_bias"),
        ("deepseek_v3", "num_key_value_heads", json!(1), "num_key_value_heads"),
        ("deepseek_v3", "moe_layer_freq", json!(2), "moe_layer_freq"),
        ("deepseek_v3", "scoring_func", json!("softmax"), "scoring_func"),
        ("deepseek_v3", "kv_lora_rank", json!(0), "latent of keys"),
        (
            "deepseek_v3",
            "quantization_config",
            json!({"quant_method": "fp8", "weight_block_size": [128, 128]}),
            "quantization_config",
        ),
        ("smollm3", "no_rope_layers", json!([1]), "no_rope_layers"),
        ("opt", "enable_bias", json!(false), "enable_bias"),
        ("bloom", "apply_residual_connection_post_layernorm", json!(true), "post_layernorm"),
        ("mpt", "attn_config", json!({"alibi": false}), "attn_config.alibi"),
        ("mpt", "attn_config", json!({"clip_qkv": -1}), "attn_config.clip_qkv"),
        ("mpt", "attn_config", json!({"attn_type": "multiquery_attention"}), "attn_config.attn_type"),
        ("mpt", "attn_config", json!({"alibi_bias_max": 16}), "attn_config.alibi_bias_max"),
        ("mpt", "logit_scale", json!("inv_sqrt_d_model"), "logit_scale"),
        (
            "phi3_long",
            "rope_scaling",
            json!({"type": "su", "short_factor": [1], "long_factor": [1]}),
            "one for each pair",
        ),
        ("phi3_long", "rope_scaling", json!({"type": "su", "short_factor": [1, 0, 1]}), "rope_scaling.short_factor"),
        ("phi3_long", "rope_scaling", json!({"type": "linear", "factor": 2}), "rope_scaling.type"),
        ("llava", "text_config", json!({"model_type": "t5"}), "text_config.model_type"),
        ("llama", "rope_parameters", json!({"rope_type": "llama3"}), "rope_parameters.factor"),
        ("llama", "rope_parameters", json!({"rope_type": "llama3", "factor": -8.0}), "rope_parameters.factor"),
        ("llama", "rope_parameters", json!({"rope_type": "llama3", "factor": 0}), "rope_parameters.factor"),
        ("llama", "rope_scaling", json!({"rope_type": "longrope", "factor": 4.0}), "rope_scaling.rope_type"),
        ("llama", "num_attention_heads", json!("four"), "num_attention_heads"),
        ("llama", "hidden_size", json!(null), "hidden_size"),
        ("llama", "num_hidden_layers", json!(1 << 20), "num_hidden_layers"),
        ("llama", "quantization_config", json!({"quant_method": "gptq"}), "quantization_config"),
        ("qwen3", "head_dim", json!(null), "head_dim"),
        ("mistral", "num_key_value_heads", json!(null), "num_key_value_heads"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", json!(true), "scale_attn_by_inverse_layer_idx"),
        ("gemma2", "use_bidirectional_attention", json!(true), "use_bidirectional_attention"),
        ("gemma2", "attn_logit_softcapping", json!(0.0), "attn_logit_softcapping"),
        ("gemma2", "layer_types", json!(["chunked_attention", "full_attention"]), "layer_types"),
        ("gemma3", "attn_logit_softcapping", json!(50.0), "attn_logit_softcapping"),
        ("gemma3", "sliding_window", json!("wide"), "sliding_window"),
    ] {
        let error =
            refused(&with_config(family, |config| _ = config.insert(field.to_owned(), value.clone()))).to_string();
        assert!(error.contains(word) && error.contains("config.json"), "{field} = {value}: {error}");
    }
    for (family, word) in [("opt", "self_attn"), ("gpt_neox", "attention"), ("gpt_neox_in_turn", "rotation")] {
        let odd = with_config(family, |config| config["num_attention_heads"] = json!(3));
        let error = refused(&odd).to_string();
        assert!(error.contains(word), "{family}: {error}");
    }
    let odd = with_config("llama", |config| config["num_key_value_heads"] = json!(3));
    assert!(Checkpoint::open(odd.path()).unwrap_err().to_string().contains("3 for 4 heads"));
    let empty = tempfile::tempdir().unwrap();
    fs::write(empty.path().join("config.json"), "[]").unwrap();
    assert!(refused(&empty).to_string().contains("not a JSON object"));
    fs::write(empty.path().join("config.json"), "{").unwrap();
    assert!(matches!(refused(&empty), CheckpointError::NotAConfig { .. }));
}

#[test]
fn older_configurations_of_gemma_mean_the_same() {
    let config = |copy: &tempfile::TempDir| Checkpoint::open(copy.path()).unwrap().config().clone();
    for family in ["gemma2", "gemma3"] {
        let older = with_config(family, |config| {
            config.remove("layer_types");
            let parameters = config.remove("rope_parameters").unwrap();
            if family == "gemma2" {
                config.insert("rope_theta".into(), parameters["rope_theta"].clone());
                return;
            }
            config.insert("sliding_window_pattern".into(), json!(3));
            config.insert("rope_theta".into(), parameters["full_attention"]["rope_theta"].clone());
            config.insert("rope_local_base_freq".into(), parameters["sliding_attention"]["rope_theta"].clone());
            config.insert("rope_scaling".into(), json!({"rope_type": "linear", "factor": 8.0}));
        });
        assert_eq!(config(&older), config(&with_config(family, |_| {})), "{family}");
    }
    let unbounded = with_config("gemma2", |config| _ = config.insert("attn_logit_softcapping".into(), json!(null)));
    assert_eq!(config(&unbounded).attention.soft_cap, None);
    let default = with_config("gemma2", |config| _ = config.remove("attn_logit_softcapping"));
    assert_eq!(config(&default).attention.soft_cap, Some(50.0));
}

#[test]
fn older_configurations_mean_the_same() {
    let older = with_config("llama", |config| {
        let parameters = config.remove("rope_parameters").unwrap();
        config.insert("rope_theta".into(), parameters["rope_theta"].clone());
        let mut scaling = parameters;
        let scaling_fields = scaling.as_object_mut().unwrap();
        scaling_fields.remove("rope_theta");
        config.insert("rope_scaling".into(), scaling);
    });
    let open = |path: &Path| Checkpoint::open(path).unwrap().config().clone();
    assert_eq!(open(older.path()), open(&directory("llama")));
    // What users add to a configuration of today comes first, as in transformers.
    let added = with_config("llama", |config| {
        let mut scaling = config["rope_parameters"].clone();
        scaling["factor"] = json!(4.0);
        config.insert("rope_scaling".into(), scaling);
    });
    let of_llama3 = |config: TransformerConfig| match config.positions {
        Positions::Rotary(Rope { scaling: Some(RopeScaling::Llama3 { factor, original_context, .. }), .. }) => {
            (factor, original_context)
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(of_llama3(open(added.path())).0, 4.0);
    // The field of the configuration itself is before that of the scaling; without either it is the whole context.
    for (own, nested, expected) in [(Some(20.0), Some(16.0), 20.0), (None, Some(16.0), 16.0), (None, None, 40.0)] {
        let copy = with_config("llama", |config| {
            config.extend(own.map(|own| ("original_max_position_embeddings".to_owned(), json!(own))));
            config["rope_parameters"]["original_max_position_embeddings"] = json!(nested);
        });
        assert_eq!(of_llama3(open(copy.path())).1, expected, "{own:?}, {nested:?}");
    }
    let older = with_config("mistral", |config| {
        config.remove("rope_parameters");
        config.insert("rope_theta".into(), json!(10_000.0));
    });
    assert_eq!(open(older.path()), open(&directory("mistral")));
    // As DeepSeek wrote its own.
    let own = with_config("deepseek_v2_lite", |config| {
        let mut scaling = config.remove("rope_parameters").unwrap();
        let fields = scaling.as_object_mut().unwrap();
        config.insert("rope_theta".into(), fields.remove("rope_theta").unwrap());
        fields.insert("type".into(), fields["rope_type"].clone());
        fields.remove("rope_type");
        config.insert("rope_scaling".into(), scaling);
        for field in ["head_dim", "qk_head_dim", "mlp_bias", "n_group", "topk_group"] {
            config.remove(field);
        }
        for (field, value) in [("scoring_func", json!("softmax")), ("moe_layer_freq", json!(1)), ("ep_size", json!(1))]
        {
            config.insert(field.into(), value);
        }
    });
    assert_eq!(open(own.path()), open(&directory("deepseek_v2_lite")));
}

#[test]
fn a_missing_or_damaged_tokenizer_is_an_error() {
    let copy = copy_of("llama");
    let path = copy.path().join("tokenizer.json");
    fs::write(&path, "{}").unwrap();
    let error = Checkpoint::open(copy.path()).unwrap().tokenizer().unwrap_err().to_string();
    assert!(error.contains("tokenizer.json"), "{error}");
    fs::remove_file(path).unwrap();
    assert!(Checkpoint::open(copy.path()).unwrap().tokenizer().is_err());
}

/// The hidden states of a text behind the last block.
fn last_hidden(directory: &Path) -> Vec<Vec<f32>> {
    let checkpoint = open_blockwise(directory).unwrap();
    let mut calibration = Calibration::new(checkpoint.as_ref(), &[vec![3, 5, 7, 11]]).unwrap();
    while !calibration.is_finished() {
        calibration.advance(&|_| None).unwrap();
    }
    calibration.texts().into_iter().map(<[f32]>::to_vec).collect()
}

#[test]
fn decoders_without_a_head_run_block_by_block_and_say_that_they_score_no_tokens() {
    for family in &FAMILIES[..FIRST] {
        let expected = last_hidden(&directory(family));
        let is_head = |name: &str| name == "lm_head.weight";
        let alone = |name: &str| {
            let name = name.strip_prefix("model.").or(name.strip_prefix("transformer.")).unwrap_or(name);
            name.to_owned()
        };
        let untied = |copy: &tempfile::TempDir| {
            let path = copy.path().join("config.json");
            let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            config["tie_word_embeddings"] = false.into();
            fs::write(path, config.to_string()).unwrap();
        };
        // As an embedding model is stored, and as a reward model is.
        let embedding = with_tensors(family, |tensors| {
            tensors.retain(|(name, ..)| !is_head(name));
            tensors.iter_mut().for_each(|(name, ..)| *name = alone(name));
        });
        untied(&embedding);
        let reward = with_tensors(family, |tensors| {
            tensors.retain(|(name, ..)| !is_head(name));
            tensors.push(("score.weight".to_owned(), vec![1, 16], vec![0.5; 16]));
        });
        for copy in [embedding, reward] {
            assert_eq!(last_hidden(copy.path()), expected, "{family}");
            let error = Checkpoint::open(copy.path()).unwrap().inference::<f32>().unwrap_err();
            assert!(matches!(error, Error::Checkpoint(CheckpointError::NoHead { .. })), "{family}: {error}");
            let error = SavedModel::open(copy.path()).unwrap_err().to_string();
            assert!(error.contains("lm_head.weight") && error.contains("reward"), "{error}");
        }
    }
}

#[test]
fn norms_of_bert_may_have_the_names_that_tensorflow_gave_them() {
    let old = |name: &str| match name.contains("LayerNorm") {
        true => name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        false => name.to_owned(),
    };
    let copy = with_tensors("bert", |tensors| tensors.iter_mut().for_each(|(name, ..)| *name = old(name)));
    let names = |at: &Path| Reader::open(at).unwrap().tensors().map(|t| t.name.clone()).collect::<Vec<_>>();
    assert!(names(copy.path()).iter().any(|name| name.ends_with("LayerNorm.gamma")));
    assert_eq!(last_hidden(copy.path()), last_hidden(&directory("bert")));
    // A model that is trained from it has the names of today.
    let engine = crate::engine::cpu::CpuEngine;
    let checkpoint = EncoderCheckpoint::open(copy.path()).unwrap();
    let model = checkpoint.model(&engine, EncoderTask::MaskedTokens, 8, 0).unwrap();
    let saved = tempfile::tempdir().unwrap();
    checkpoint.save((&engine, &model), saved.path().join("m"), Overwrite::No, DataType::F32).unwrap();
    assert!(names(&saved.path().join("m")).iter().all(|name| !name.contains("gamma") && !name.contains("beta")));
    assert_eq!(last_hidden(&saved.path().join("m")), last_hidden(&directory("bert")));
}

#[derive(Deserialize)]
struct Rotations {
    tokens: Vec<u32>,
    rotations: Vec<ExpectedRotation>,
}

#[derive(Deserialize)]
struct ExpectedRotation {
    rope_parameters: Value,
    logits: Vec<f32>,
    perplexity: ExpectedPerplexity,
}

#[test]
fn scaled_rotations_compute_what_they_do_in_transformers() {
    let text = fs::read(directory("llama_rotations.json")).unwrap();
    let Rotations { tokens, rotations } = serde_json::from_slice(&text).unwrap();
    for ExpectedRotation { rope_parameters, logits, perplexity: expected } in rotations {
        let copy = with_config("llama", |config| config["rope_parameters"] = rope_parameters.clone());
        let checkpoint = Checkpoint::open(copy.path()).unwrap();
        let model = checkpoint.inference::<f32>().unwrap();
        let d = largest_difference(&model.session().feed(&tokens[..30]).unwrap(), &logits);
        assert!(d < 1e-4, "{rope_parameters}: {d}");
        let windows = Windows { window: expected.window, stride: expected.stride, begin: None };
        let found = model.perplexity(&tokens, windows, |_, _| {}).unwrap();
        assert!((found.perplexity / expected.perplexity - 1.0).abs() < 1e-4, "{rope_parameters}: {found:?}");
        // The model that trains has the same.
        use crate::{block::BatchShape, engine::cpu::CpuEngine};
        let mut trained = checkpoint.model(&CpuEngine).unwrap();
        let all = trained.logits(&CpuEngine, &tokens[..30], BatchShape { batch: 1, positions: 30 }).unwrap();
        assert!(largest_difference(&all[29 * logits.len()..], &logits) < 1e-4, "{rope_parameters}");
    }
}

/// Every family, block by block, with each expert's own tokens.
#[test]
fn blocks_in_steps_compute_what_the_model_does_and_experts_see_the_tokens_that_they_get() {
    for family in FAMILIES {
        let checkpoint = Checkpoint::open(directory(family)).unwrap();
        let model = checkpoint.inference::<f32>().unwrap();
        let texts = [expected(family).tokens[..30].to_vec(), vec![9, 5, 33]];
        let mut calibration = Calibration::new(&checkpoint, &texts).unwrap();
        while !calibration.is_finished() {
            let block = calibration.block();
            let inputs = calibration.inputs().unwrap();
            let mut shown = vec![];
            for (index, input) in inputs.iter().enumerate() {
                let mut tokens = 0;
                let observe = &mut |seen: crate::model::Observation<'_>, _: crate::model::Beside<&[f32]>| {
                    assert_eq!(seen.input, input);
                    tokens += seen.tokens;
                };
                calibration.observe(index, &|_| None, observe).unwrap();
                shown.push((tokens, input.weights[0].clone()));
            }
            let mut previewed = vec![0; inputs.len()];
            let fresh = Calibration::new(&checkpoint, &texts).unwrap();
            fresh
                .preview(usize::MAX, &mut |seen, _| {
                    previewed[inputs.iter().position(|input| input == seen.input).unwrap_or_default()] += seen.tokens;
                })
                .unwrap();
            match checkpoint.config().experts(block) {
                None => assert!(shown.iter().all(|(tokens, _)| *tokens == 33), "{family}: {shown:?}"),
                Some(experts) => {
                    let of_attention = 2 + checkpoint.config().of_latents().len();
                    let with_shared = experts.count + usize::from(experts.shared.is_some());
                    assert_eq!(inputs.len(), of_attention + 2 * with_shared);
                    let of = |part: &str| -> Vec<usize> {
                        let names = shown.iter().filter(|(_, name)| name.contains(part) && name.contains(".experts."));
                        names.map(|(tokens, _)| *tokens).collect()
                    };
                    let (up, down) = match family {
                        "mixtral" => (of(".w1."), of(".w2.")),
                        "gpt_oss" | "mixtral_joined" => (of(".gate_up_proj."), of(".down_proj.")),
                        _ => (of(".gate_proj."), of(".down_proj.")),
                    };
                    // One without tokens is shown as many as it has features.
                    assert!(up.iter().sum::<usize>() >= 33 * experts.per_token, "{family}: {shown:?}");
                    assert_eq!(up.len(), experts.count);
                    assert!(up.iter().zip(&down).all(|(up, down)| up == down || (*up, *down) == (16, experts.hidden)));
                }
            }
            if block == 0 {
                let counts: Vec<usize> = shown.iter().map(|(tokens, _)| *tokens).collect();
                assert_eq!(previewed, counts, "{family}");
            }
            calibration.advance(&|_| None).unwrap();
        }
        for (x, text) in calibration.texts().into_iter().zip(&texts) {
            let d = largest_difference(&model.head_of(x).unwrap(), &model.session().logits(text).unwrap());
            assert!(d < 1e-4, "{family}: {d}");
        }
    }
}

/// An expert that no token reaches is still pruned: by magnitude, which is what independent features of one size give.
#[test]
fn an_expert_without_tokens_is_shown_the_identity() {
    let away = with_tensors("mixtral", |tensors| {
        for (_, _, values) in tensors.iter_mut().filter(|(name, ..)| name.ends_with("moe.gate.weight")) {
            // Equal scores: the first experts of all tokens.
            values.fill(0.0);
        }
    });
    let checkpoint = Checkpoint::open(away.path()).unwrap();
    let texts = [vec![3, 4, 5]];
    let mut calibration = Calibration::new(&checkpoint, &texts).unwrap();
    let inputs = calibration.inputs().unwrap();
    let mut identities = vec![];
    for (index, input) in inputs.iter().enumerate().skip(2) {
        let observe = &mut |seen: crate::model::Observation<'_>, _: crate::model::Beside<&[f32]>| {
            let features = seen.x.len() / seen.tokens.max(1);
            let is_one = |i: usize, value: f32| value == if i.is_multiple_of(features + 1) { 1.0 } else { 0.0 };
            if seen.tokens > 0
                && seen.tokens == features
                && seen.x.iter().enumerate().all(|(i, value)| is_one(i, *value))
            {
                identities.push((input.weights[0].clone(), features));
            }
        };
        calibration.observe(index, &|_| None, observe).unwrap();
    }
    let names: Vec<_> = identities.iter().map(|(name, features)| (&name[name.len() - 11..], *features)).collect();
    assert_eq!(names, [("2.w1.weight", 16), ("3.w1.weight", 16), ("2.w2.weight", 24), ("3.w2.weight", 24)]);
}

/// Beside what an expert reads is what the stored one would read of the same tokens, wherever the stored model sends
/// them: nothing else where no weight changed.
#[test]
fn beside_the_tokens_of_an_expert_is_what_the_stored_one_would_read_of_them() {
    let texts = [expected("mixtral").tokens[..30].to_vec(), vec![9, 5, 33]];
    for family in ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v2"] {
        let checkpoint = Checkpoint::open(directory(family)).unwrap();
        let inputs = |changes: bool| -> Vec<(Vec<f32>, Vec<f32>)> {
            let mut calibration = Calibration::new(&checkpoint, &texts).unwrap().beside_dense_of(usize::MAX).unwrap();
            let replace = |name: &str| -> Option<Vec<f32>> {
                let is_changed = changes && name.contains("layers.0.self_attn.o_proj.weight");
                let mut tensors = checkpoint.reader().tensors().filter(|tensor| is_changed && tensor.name == name);
                let len = tensors.next()?.shape.iter().product();
                Some((0..len).map(|i| (i as f32 * 0.7).sin()).collect())
            };
            let mut found = vec![];
            while !calibration.is_finished() {
                for index in 0..calibration.inputs().unwrap().len() {
                    let (mut own, mut dense) = (vec![], vec![]);
                    let observe = &mut |seen: crate::model::Observation<'_>, beside: crate::model::Beside<&[f32]>| {
                        own.extend_from_slice(seen.x);
                        if let crate::model::Beside::Inputs(x) = beside {
                            assert_eq!(x.len(), seen.x.len(), "{family}, {index}");
                            dense.extend_from_slice(x);
                        }
                    };
                    calibration.observe(index, &replace, observe).unwrap();
                    let first = 2 + checkpoint.config().of_latents().len();
                    if index >= first && checkpoint.config().experts(calibration.block()).is_some() {
                        found.push((own, dense));
                    }
                }
                calibration.advance(&replace).unwrap();
            }
            found
        };
        let (same, changed) = (inputs(false), inputs(true));
        assert!(!same.is_empty() && same.iter().all(|(own, dense)| own == dense), "{family}");
        // The stored model's rows stay what they were; which expert they are shown of follows the changed model.
        let width = checkpoint.config().width;
        let experts = same.len() / checkpoint.config().layers.max(1);
        assert!(changed.iter().any(|(own, dense)| own != dense), "{family}");
        let rows: Vec<&[f32]> = same.iter().flat_map(|(own, _)| own.chunks_exact(width)).collect();
        for (_, dense) in changed.iter().take(experts / 2) {
            // One without tokens is shown the rows of an identity.
            let is_one_hot = |row: &[f32]| row.iter().filter(|value| **value != 0.0).count() == 1;
            assert!(dense.chunks_exact(width).all(|row| is_one_hot(row) || rows.contains(&row)), "{family}");
        }
    }
}

/// Every token is shown to what reads latents; beside it is what the stored model has there.
#[test]
fn what_reads_latents_is_shown_its_part_beside_that_of_the_stored_model() {
    for (family, of_latents) in [("deepseek_v2_lite", vec![12]), ("deepseek_v3", vec![8, 12])] {
        let checkpoint = Checkpoint::open(directory(family)).unwrap();
        let texts = [expected(family).tokens[..30].to_vec(), vec![9, 5, 33]];
        let inputs = |changes: bool| -> Vec<(Vec<f32>, Vec<f32>)> {
            let mut calibration = Calibration::new(&checkpoint, &texts).unwrap().beside_dense_of(usize::MAX).unwrap();
            let replace = |name: &str| -> Option<Vec<f32>> {
                let is_changed = changes && name.contains("layers.0.self_attn.kv_a_proj");
                is_changed.then(|| (0..16 * 16).map(|i| (i as f32 * 0.7).sin()).collect())
            };
            let mut found = vec![];
            for index in 0..of_latents.len() + 2 {
                let (mut own, mut dense) = (vec![], vec![]);
                let observe = &mut |seen: crate::model::Observation<'_>, beside: crate::model::Beside<&[f32]>| {
                    own.extend_from_slice(seen.x);
                    if let crate::model::Beside::Inputs(x) = beside {
                        dense.extend_from_slice(x);
                    }
                };
                calibration.observe(index, &replace, observe).unwrap();
                found.push((own, dense));
            }
            found
        };
        let (same, changed) = (inputs(false), inputs(true));
        for (index, features) in of_latents.iter().enumerate() {
            let ((own, dense), (other, beside)) = (&same[index + 1], &changed[index + 1]);
            assert_eq!(own.len(), 33 * features, "{family}");
            assert!(own == dense && own == beside, "{family}");
            // The latent of queries does not depend on what was changed.
            assert_eq!(own != other, index + 1 == of_latents.len(), "{family}");
        }
        // The values of attention: beside them are the products of the one layer that reads them.
        assert!(changed.last().unwrap().0 != same.last().unwrap().0, "{family}");
    }
}

#[test]
fn models_with_other_fields_compute_what_transformers_does() {
    #[derive(Deserialize)]
    struct Changed {
        changed: Vec<Fields>,
    }
    #[derive(Deserialize)]
    struct Fields {
        fields: serde_json::Map<String, Value>,
        logits: Vec<f32>,
    }
    for family in ["deepseek_v3", "smollm3"] {
        let text = fs::read(directory(family).join("expected.json")).unwrap();
        let Changed { changed } = serde_json::from_slice(&text).unwrap();
        assert_eq!(changed.len(), 2);
        let tokens = expected(family).tokens;
        for Fields { fields, logits } in changed {
            let copy = with_config(family, |config| config.extend(fields.clone()));
            let model = Checkpoint::open(copy.path()).unwrap().inference::<f32>().unwrap();
            let d = largest_difference(&model.session().feed(&tokens[..30]).unwrap(), &logits);
            assert!(d < 1e-4, "{family}, {fields:?}: {d}");
        }
    }
    // SmolLM3 with a window where heads are rotated.
    for types in [json!(["sliding_attention", "full_attention"]), json!(["full_attention"])] {
        let copy = with_config("smollm3", |config| {
            config.extend([("use_sliding_window".into(), json!(true)), ("layer_types".into(), types.clone())]);
        });
        assert!(refused(&copy).to_string().contains("layer_types"), "{types}");
    }
}

/// DeepSeek-V3 is released with a layer behind the last one, which generation does without.
#[test]
fn layers_that_predict_further_tokens_are_not_read() {
    let more = with_tensors("deepseek_v3", |tensors| {
        tensors.push(("model.layers.2.eh_proj.weight".into(), vec![2, 4], vec![1.0; 8]));
    });
    assert!(refused(&more).to_string().contains("model.layers.2.eh_proj.weight"));
    let path = more.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["num_nextn_predict_layers"] = json!(1);
    fs::write(&path, config.to_string()).unwrap();
    let expected = expected("deepseek_v3");
    let model = Checkpoint::open(more.path()).unwrap().inference::<f32>().unwrap();
    assert_eq!(greedy(&model, &expected.prompt_tokens, 12), expected.greedy);
}

/// Where the tensors of a model of text and images lay before and lie today.
#[test]
fn the_language_part_is_found_under_every_name_that_it_has_had() {
    let today = with_tensors("llava", |tensors| {
        for (name, ..) in tensors.iter_mut() {
            *name = match name.strip_prefix("language_model.model.") {
                Some(rest) => format!("model.language_model.{rest}"),
                None => match name.strip_prefix("language_model.") {
                    Some(rest) => rest.to_owned(),
                    None => format!("model.{name}"),
                },
            };
        }
    });
    let flat = with_config("qwen2_5_vl", |config| {
        let text = config.remove("text_config").unwrap();
        for (field, value) in text.as_object().unwrap().iter().filter(|(field, _)| *field != "model_type") {
            config.insert(field.clone(), value.clone());
        }
        config.remove("rope_parameters");
        config.insert("rope_theta".into(), json!(500.0));
        config.insert("rope_scaling".into(), json!({"type": "mrope", "mrope_section": [1, 1, 0]}));
    });
    for (family, copy) in [("llava", today), ("qwen2_5_vl", flat)] {
        let expected = expected(family);
        let model = Checkpoint::open(copy.path()).unwrap().inference::<f32>().unwrap();
        assert_eq!(greedy(&model, &expected.prompt_tokens, 12), expected.greedy, "{family}");
    }
    // LLaVA's own leaves out what LLaMA has by default.
    let short = with_config("llava", |config| {
        config["text_config"] = json!({"model_type": "llama", "vocab_size": 80, "max_position_embeddings": 40});
    });
    let error = Checkpoint::open(short.path()).unwrap_err().to_string();
    assert!(error.contains("fewer tensors") || error.contains("4096"), "{error}");
}
