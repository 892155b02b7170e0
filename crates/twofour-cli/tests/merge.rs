//! `twofour merge`: adapters of peft in a model's weights.

use std::{fs, path::Path};

use crate::support::{Floats, random, run, write};
use safetensors::SafeTensors;

const UP: &str = "model.layers.0.mlp.up.weight";
const DOWN: &str = "model.layers.0.mlp.down.weight";

/// Two weights, of which the first becomes 2:4, and a bias.
fn model(at: &Path) {
    let tensors: [(&str, &[usize]); 3] = [(UP, &[8, 12]), (DOWN, &[12, 8]), ("model.layers.0.mlp.up.bias", &[8])];
    write(&at.join("dense.safetensors"), &tensors.map(|(name, shape)| (name, random(shape))));
    run(at, &["prune", "dense.safetensors", "-o", "base.safetensors", "--include", UP]).good();
}

fn adapter(at: &Path, config: &str, tensors: &[(&str, Floats)]) {
    fs::create_dir_all(at.join("adapter")).unwrap();
    fs::write(at.join("adapter/adapter_config.json"), config).unwrap();
    let named = |(name, floats): &(&str, Floats)| (format!("base_model.model.{name}"), floats.clone());
    let named: Vec<(String, Floats)> = tensors.iter().map(named).collect();
    let named: Vec<(&str, Floats)> = named.iter().map(|(name, floats)| (name.as_str(), floats.clone())).collect();
    write(&at.join("adapter/adapter_model.safetensors"), &named);
}

fn lora(at: &Path, config: &str) {
    let of = |module: &str, rank: usize, [out, inputs]: [usize; 2]| {
        [(format!("{module}.lora_A.weight"), [rank, inputs]), (format!("{module}.lora_B.weight"), [out, rank])]
    };
    let parts = [of("model.layers.0.mlp.up", 2, [8, 12]), of("model.layers.0.mlp.down", 3, [12, 8])].concat();
    let parts: Vec<(&str, Floats)> = parts.iter().map(|(name, shape)| (name.as_str(), random(shape))).collect();
    adapter(at, config, &parts);
}

fn floats(path: &Path, name: &str) -> Vec<f32> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensor(name).unwrap().data().as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// `W + s · B A`, and zeros where `W` is zero and keeps them.
fn expected(at: &Path, name: &str, [rank, inputs]: [usize; 2], scale: f32, keeps_zeros: bool) -> Vec<f32> {
    let module = name.strip_suffix(".weight").unwrap();
    let part =
        |part| floats(&at.join("adapter/adapter_model.safetensors"), &format!("base_model.model.{module}.{part}"));
    let (a, b) = (part("lora_A.weight"), part("lora_B.weight"));
    let sum = |(index, weight): (usize, &f32)| {
        let (row, col) = (index / inputs, index % inputs);
        let update: f32 = (0..rank).map(|k| b[row * rank + k] * a[k * inputs + col]).sum();
        if keeps_zeros && *weight == 0.0 { 0.0 } else { weight + scale * update }
    };
    floats(&at.join("base.safetensors"), name).iter().enumerate().map(sum).collect()
}

fn is_near(found: &[f32], expected: &[f32]) -> bool {
    found.len() == expected.len() && found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5)
}

#[test]
fn an_update_is_added_under_the_zeros_of_a_sparse_weight_and_to_all_of_a_dense_one() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    model(at);
    lora(at, r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 3, "alpha_pattern": {"mlp.down": 9}}"#);
    let ran = run(at, &["merge", "base.safetensors", "adapter", "-o", "out.safetensors", "--json"]).good().json();
    let out = at.join("out.safetensors");
    assert!(is_near(&floats(&out, UP), &expected(at, UP, [2, 12], 1.5, true)));
    assert!(is_near(&floats(&out, DOWN), &expected(at, DOWN, [3, 8], 3.0, false)));
    let bias = "model.layers.0.mlp.up.bias";
    assert_eq!(floats(&out, bias), floats(&at.join("base.safetensors"), bias));
    let weights = ran["weights"].as_array().unwrap();
    let of = |name: &str| weights.iter().find(|w| w["name"] == name).unwrap();
    assert_eq!((&of(DOWN)["lost"], &of(DOWN)["keeps_zeros"]), (&0.0.into(), &false.into()));
    let lost = of(UP)["lost"].as_f64().unwrap();
    assert!((0.4..0.95).contains(&lost) && of(UP)["keeps_zeros"] == true, "{ran}");
    run(at, &["check", "out.safetensors", "--include", UP]).good();

    // A compressed weight stays compressed, with the same elements.
    run(at, &["compress", "base.safetensors", "-o", "small.safetensors", "--include", UP]).good();
    run(at, &["merge", "small.safetensors", "adapter", "-o", "merged.safetensors"]).good();
    run(at, &["decompress", "merged.safetensors", "-o", "again.safetensors"]).good();
    for name in [UP, DOWN] {
        assert_eq!(floats(&at.join("again.safetensors"), name), floats(&out, name));
    }
    lora(at, r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": true}"#);
    run(at, &["merge", "base.safetensors", "adapter", "-o", "out.safetensors", "--force"]).good();
    assert!(is_near(&floats(&out, DOWN), &expected(at, DOWN, [3, 8], 4.0 / 3f32.sqrt(), false)));
}

#[test]
fn an_adapter_of_spp_multiplies_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    model(at);
    let (a, b) = (random(&[4, 12]), random(&[8, 1]));
    let parts =
        [("model.layers.0.mlp.up.lora_A.weight", a.clone()), ("model.layers.0.mlp.up.lora_A.weight_col", b.clone())];
    adapter(at, r#"{"peft_type": "LORA", "r": 8, "lora_alpha": 16}"#, &parts);
    let ran = run(at, &["merge", "base.safetensors", "adapter", "-o", "out.safetensors", "--json"]).good().json();
    assert_eq!((&ran["weights"][0]["lost"], &ran["weights"][0]["kind"]), (&0.0.into(), &"SPP".into()));
    let weight = floats(&at.join("base.safetensors"), UP);
    let of =
        |(index, weight): (usize, &f32)| weight * (1.0 + 2.0 * a.1[index / 24 * 12 + index % 12] * b.1[index / 12]);
    let expected: Vec<f32> = weight.iter().enumerate().map(of).collect();
    assert!(is_near(&floats(&at.join("out.safetensors"), UP), &expected));
}

#[test]
fn what_cannot_be_merged_right_is_an_error_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    model(at);
    let bad = |says: &str| {
        let message = run(at, &["merge", "base.safetensors", "adapter", "-o", "out.safetensors"]).bad(1);
        assert!(message.contains(says), "{message}");
        assert!(!at.join("out.safetensors").exists());
    };
    bad("adapter_config.json");
    for (config, says) in [
        ("{", "is no JSON"),
        (r#"{"peft_type": "IA3"}"#, "type IA3"),
        (r#"{"r": 2, "lora_alpha": 2, "use_dora": true}"#, "`use_dora`"),
        (r#"{"r": 2, "lora_alpha": 2, "init_lora_weights": "pissa_niter_4"}"#, "changed the model's own weights"),
        (r#"{"r": 2}"#, "`lora_alpha` is no number"),
        (r#"{"r": 2, "lora_alpha": 2, "alpha_pattern": {".*up": 3}}"#, "expected names of modules"),
    ] {
        lora(at, config);
        bad(says);
    }
    let good = r#"{"r": 2, "lora_alpha": 2}"#;
    for (part, shape, says) in [
        ("model.layers.0.mlp.up.lora_B.weight", [8, 3], "do not fit together"),
        ("model.layers.0.mlp.up.lora_B.weight", [12, 2], "expected shape [8, 12]"),
        ("model.layers.9.mlp.up.lora_B.weight", [8, 2], "is not whole"),
        ("model.layers.0.mlp.up.lora_magnitude_vector", [8, 1], "no part of a low-rank update"),
    ] {
        adapter(at, good, &[("model.layers.0.mlp.up.lora_A.weight", random(&[2, 12])), (part, random(&shape))]);
        bad(says);
    }
    let of = |module: &'static str| {
        [(format!("{module}.lora_A.weight"), random(&[2, 12])), (format!("{module}.lora_B.weight"), random(&[8, 2]))]
    };
    let other = of("model.layers.7.mlp.up");
    adapter(at, good, &other.each_ref().map(|(name, floats)| (name.as_str(), floats.clone())));
    bad("belongs to another model");
    run(at, &["quantize", "base.safetensors", "-o", "int8.safetensors", "--dtype", "int8", "--include", UP]).good();
    let own = of("model.layers.0.mlp.up");
    adapter(at, good, &own.each_ref().map(|(name, floats)| (name.as_str(), floats.clone())));
    let message = run(at, &["merge", "int8.safetensors", "adapter", "-o", "out.safetensors"]).bad(1);
    assert!(message.contains("of integers"), "{message}");
}
