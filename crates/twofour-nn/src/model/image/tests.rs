//! Image encoders against what transformers computes (`tests/fixtures/checkpoints.py`), and damaged ones.

use std::{
    fs,
    path::{Path, PathBuf},
};

use half::bf16;
use serde::Deserialize;
use serde_json::{Value, json};
use twofour::{
    Selector,
    file::{Compress, Convert, Prune, Quantization, Quantize, TensorInfo},
    int4::Granularity,
    quantization::ScaleRule,
};

use super::{ImageEncoder, ImageWeights, TransformerConfig, WeightForm};
use crate::{
    Error,
    engine::Nonlinearity,
    model::{CheckpointError, GptConfig, ImageCheckpoint, ImageInput},
};

const KINDS: [&str; 5] = ["vit", "dinov2", "dinov2_gated", "dinov2_with_registers", "sam"];

#[derive(Deserialize)]
struct Expected {
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

fn directory(kind: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints").join(kind)
}

/// The pixel values that `checkpoints.py` makes.
fn pixels(config: &TransformerConfig, images: usize) -> Vec<f32> {
    (0..images * config.image().unwrap().image_len()).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect()
}

fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0f32, |most, (a, b)| most.max((a - b).abs()))
}

/// A copy of a checkpoint with another configuration.
fn with_config(kind: &str, change: impl Fn(&mut Value)) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    fs::copy(directory(kind).join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(directory(kind).join("config.json")).unwrap()).unwrap();
    change(&mut config);
    fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    copy
}

#[test]
fn hidden_states_and_logits_are_those_of_transformers() {
    for kind in KINDS {
        let expected: Expected =
            serde_json::from_slice(&fs::read(directory(kind).join("expected.json")).unwrap()).unwrap();
        let encoder = ImageEncoder::<f32>::load(directory(kind)).unwrap();
        let pixels = pixels(encoder.config(), 2);
        let hidden = encoder.forward(&pixels).unwrap();
        let d = distance(&hidden.concat(), &expected.hidden);
        assert!(d < 1e-4, "{kind}: hidden states differ by {d}");
        let logits: Vec<f32> = hidden.iter().filter_map(|hidden| encoder.classify(hidden).unwrap()).flatten().collect();
        let d = distance(&logits, &expected.logits);
        assert!(d < 1e-4, "{kind}: logits differ by {d}");
        // One by one, and in a narrower type.
        let alone = encoder.forward(&pixels[encoder.config().image().unwrap().image_len()..]).unwrap();
        assert!(alone.len() == 1 && distance(&alone[0], &hidden[1]) < 1e-5);
        let narrow = ImageEncoder::<bf16>::load(directory(kind)).unwrap().forward(&pixels).unwrap();
        assert!(distance(&narrow.concat(), &hidden.concat()) < 0.3 && narrow != hidden, "{kind}");
    }
}

#[test]
fn the_image_encoder_of_sam_alone_is_read_as_in_the_whole_model() {
    let alone = with_config("sam", |config| {
        *config = config["vision_config"].take();
        config["model_type"] = json!("sam_vision_model");
    });
    let [whole, alone] =
        [directory("sam"), alone.path().to_owned()].map(|path| ImageEncoder::<f32>::load(path).unwrap());
    let pixels = pixels(whole.config(), 1);
    assert_eq!(whole.forward(&pixels).unwrap(), alone.forward(&pixels).unwrap());
}

/// Whether a weight is that of a linear layer of a block.
fn is_linear(name: &str) -> bool {
    let linears = ["attention.", "attn.qkv", "attn.proj", "mlp.", "dense."];
    name.ends_with(".weight") && !name.starts_with("mask_decoder") && linears.iter().any(|part| name.contains(part))
}

#[test]
fn pruned_compressed_and_quantized_checkpoints_run() {
    for kind in KINDS {
        let dir = tempfile::tempdir().unwrap();
        let [pruned, compressed, int8] = ["pruned", "compressed", "int8"].map(|name| dir.path().join(name));
        let weights = |of: &Path| of.join("model.safetensors");
        for to in [&pruned, &compressed, &int8] {
            fs::create_dir(to).unwrap();
            fs::copy(directory(kind).join("config.json"), to.join("config.json")).unwrap();
        }
        let which = |tensor: &TensorInfo| is_linear(&tensor.name).then_some(Selector::TWO_FOUR);
        Convert::open(weights(&directory(kind))).unwrap().run(weights(&pruned), Prune::new(&which)).unwrap();
        let dense = ImageEncoder::<f32>::load(directory(kind)).unwrap();
        let pixels = pixels(dense.config(), 1);
        let checkpoint = ImageCheckpoint::open(&pruned).unwrap();
        let (sparse, as_dense) = (checkpoint.inference::<f32>().unwrap(), checkpoint.dense_inference::<f32>().unwrap());
        assert!(sparse.weight_bytes() < as_dense.weight_bytes() && as_dense.weight_bytes() == dense.weight_bytes());
        let expected = as_dense.forward(&pixels).unwrap();
        assert!(distance(&expected[0], &dense.forward(&pixels).unwrap()[0]) > 0.05, "{kind}: pruning changed nothing");
        assert!(distance(&sparse.forward(&pixels).unwrap()[0], &expected[0]) < 1e-4, "{kind}");
        let options = Compress { which: &|tensor| is_linear(&tensor.name), ..Default::default() };
        Convert::open(weights(&pruned)).unwrap().run(weights(&compressed), options).unwrap();
        let packed = ImageEncoder::<f32>::load(&compressed).unwrap().forward(&pixels).unwrap();
        // Compressed weights are multiplied in the file's type.
        assert!(distance(&packed[0], &expected[0]) < if kind == "dinov2" { 0.05 } else { 1e-4 }, "{kind}");
        let options = Quantize {
            which: &|name, _, _| is_linear(name),
            dense: &|_, _, _| false,
            to: Quantization::Int8(Granularity::Row),
            rule: ScaleRule::MaxAbs,
        };
        Convert::open(weights(&pruned)).unwrap().run(weights(&int8), options).unwrap();
        let quantized = ImageEncoder::<f32>::load(&int8).unwrap();
        assert!(quantized.weight_bytes() < sparse.weight_bytes());
        let d = distance(&quantized.forward(&pixels).unwrap()[0], &expected[0]);
        assert!(d > 0.0 && d < 0.3, "{kind}: {d}");
    }
}

#[test]
fn forms_of_random_weights_compute_about_the_same() {
    let sizes = GptConfig { layers: 2, width: 32, heads: 2, context: 0, feed_forward: 64 };
    let sam = TransformerConfig::sam(&sizes, 80, (3, &[1]));
    let image = ImageInput { class_token: true, registers: 3, ..*sam.image().unwrap() };
    let mut dinov2 = TransformerConfig { layer_scale: true, ..TransformerConfig::vit(&sizes, image) };
    (dinov2.feed_forward.gated, dinov2.feed_forward.activation) = (true, Nonlinearity::Silu);
    for config in [sam, dinov2] {
        forms_compute_about_the_same(&config);
    }
}

fn forms_compute_about_the_same(config: &TransformerConfig) {
    let hidden = |weights: ImageWeights| {
        let encoder = ImageEncoder::<f32>::random(config.clone(), weights, 7).unwrap();
        (encoder.weight_bytes(), encoder.forward(&pixels(config, 1)).unwrap().remove(0))
    };
    let [dense, sparse, dense_int8, sparse_int8] =
        [WeightForm::Dense, WeightForm::TwoFour, WeightForm::DenseInt8, WeightForm::TwoFourInt8]
            .map(|form| hidden(ImageWeights::all(form)));
    // The outputs are normalized: elements are of the order of one.
    let (int8, of_sparse, pruned) =
        (distance(&dense_int8.1, &dense.1), distance(&sparse_int8.1, &sparse.1), distance(&sparse.1, &dense.1));
    assert!(
        int8 > 0.0 && int8 < 0.1 && of_sparse > 0.0 && of_sparse < 0.1 && pruned > int8,
        "{int8} {of_sparse} {pruned}"
    );
    assert!(dense.0 > sparse.0 && dense_int8.0 > sparse_int8.0 && sparse.0 > sparse_int8.0);
    let mixed = hidden(ImageWeights {
        attention: WeightForm::DenseInt8,
        up: WeightForm::TwoFourInt8,
        down: WeightForm::TwoFour,
    });
    assert!(mixed.0 < sparse.0 && distance(&mixed.1, &dense.1) > 0.0);
}

fn refused(copy: &tempfile::TempDir) -> CheckpointError {
    match ImageCheckpoint::open(copy.path()) {
        Err(Error::Checkpoint(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn configurations_that_do_not_fit_are_refused_by_name() {
    for (kind, field, value, named) in [
        ("dinov2", "use_swiglu_ffn", json!(true), "mlp.weights_"),
        ("dinov2", "use_swiglu_ffn", json!(1), "use_swiglu_ffn"),
        ("dinov2", "model_type", json!("dinov2_with_registers"), "is missing"),
        ("dinov2_gated", "mlp_ratio", json!(2), "mlp.weights_"),
        ("dinov2_with_registers", "num_register_tokens", json!(3), "register_tokens"),
        ("dinov2_with_registers", "num_register_tokens", json!(-1), "num_register_tokens"),
        ("dinov2", "mlp_ratio", json!(3), "mlp.fc"),
        ("dinov2", "image_size", json!(12), "position_embeddings"),
        ("vit", "hidden_size", json!(20), "tensor"),
        ("vit", "image_size", json!([8]), "image_size"),
        ("vit", "num_hidden_layers", json!(3), "encoder.layer.2"),
        ("vit", "num_hidden_layers", json!(1), "encoder.layer.1"),
        ("vit", "num_hidden_layers", json!(1_000_000), "num_hidden_layers"),
        ("vit", "patch_size", json!([4, 2]), "patch_size"),
        ("vit", "hidden_act", json!("quick_gelu"), "hidden_act"),
        ("vit", "qkv_bias", json!(false), ".bias"),
        ("vit", "model_type", json!("swin"), "vit, dinov2, dinov2_with_registers, sam and sam_vision_model"),
        ("sam", "vision_config", json!(null), "vision_config"),
        ("sam", "vision_config", json!(7), "vision_config"),
    ] {
        let error = refused(&with_config(kind, |config| config[field] = value.clone())).to_string();
        assert!(error.contains(named), "{kind} {field} {value}: {error}");
    }
    for (field, value, named) in [
        ("use_abs_pos", json!(false), "vision_config.use_abs_pos"),
        ("window_size", json!(4), "rel_pos"),
        ("image_size", json!([20, 24]), "vision_config.image_size"),
        ("output_channels", json!(4), "neck."),
        ("global_attn_indexes", json!([0]), "rel_pos"),
    ] {
        let error = refused(&with_config("sam", |config| config["vision_config"][field] = value.clone())).to_string();
        assert!(error.contains(named), "{field} {value}: {error}");
    }
    for (kind, field, value) in
        [("vit", "num_attention_heads", json!(3)), ("vit", "patch_size", json!(5)), ("vit", "hidden_size", json!(0))]
    {
        let copy = with_config(kind, |config| config[field] = value.clone());
        assert!(
            matches!(ImageCheckpoint::open(copy.path()), Err(Error::Checkpoint(CheckpointError::NotAConfig { .. }))),
            "{field}"
        );
    }
    let copy = with_config("sam", |config| config["vision_config"]["global_attn_indexes"] = json!([3]));
    assert!(matches!(ImageCheckpoint::open(copy.path()), Err(Error::Checkpoint(CheckpointError::NotAConfig { .. }))));
}

#[test]
fn images_of_another_size_and_hidden_states_of_another_number_are_refused() {
    let encoder = ImageEncoder::<f32>::load(directory("dinov2")).unwrap();
    for len in [0, 1, encoder.config().image().unwrap().image_len() + 1] {
        assert!(matches!(encoder.forward(&vec![0.0; len]), Err(Error::Setting { what: "images", .. })), "{len}");
    }
    assert!(matches!(
        encoder.classify(&[0.0; 16]),
        Err(Error::Operation(twofour_transformer::Error::Length { expected: 80, found: 16, .. }))
    ));
    let sam = ImageEncoder::<f32>::load(directory("sam")).unwrap();
    assert_eq!(sam.classify(&[]).unwrap(), None);
}
