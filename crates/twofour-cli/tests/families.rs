//! Families of models by the command: text as transformers writes it, pruned by calibration; and those that are not
//! run.

use std::{collections::BTreeMap, fs, path::Path};

use crate::support::{Floats, checkpoint, letters, random, read_json, run, write};

const CALIBRATION: [&str; 6] = ["--calibration", "text.txt", "--samples", "8", "--length", "24"];

/// The tokens that a model continues the fixtures' prompt with.
fn continued(at: &Path, model: &str) -> serde_json::Value {
    let prompt = ["--prompt", "two of every four", "--length", "12", "--temperature", "0", "--dtype", "f32"];
    run(at, &[&["generate", model, "--json"], &prompt[..]].concat()).good().json()["token_ids"].clone()
}

#[test]
fn text_is_that_of_transformers_and_what_calibration_pruned_is_checked_compressed_and_run() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(3000)).unwrap();
    for (family, language) in [
        ("phi3", "*"),
        ("opt", "*"),
        ("gpt_neox", "*"),
        ("falcon_grouped", "*"),
        ("mixtral", "*"),
        ("qwen2_moe", "*"),
        ("qwen3_moe", "*"),
        ("gpt_oss", "*"),
        ("deepseek_v2_lite", "*"),
        ("deepseek_v2", "*"),
        ("deepseek_v3", "*"),
        ("smollm3", "*"),
        ("phi3_long", "*"),
        ("bloom", "*"),
        ("falcon_alibi", "*"),
        ("opt_projected", "*"),
        ("granite", "*"),
        ("phi2", "*"),
        ("mixtral_joined", "*"),
        ("llava", "language_model.*"),
        ("qwen2_5_vl", "model.*"),
    ] {
        let model = checkpoint(family);
        let expected = read_json(Path::new(&model).join("expected.json"));
        // A text ends where transformers was told to go on.
        let greedy: Vec<u64> = expected["greedy"].as_array().unwrap().iter().filter_map(|t| t.as_u64()).collect();
        let text = greedy.split(|token| *token == 0).next().unwrap_or_default();
        assert_eq!(continued(at, &model), serde_json::json!(text), "{family}");
        let out = format!("{family}-24");
        let prune = [&["prune", &model, "-o", &out, "--json"], &CALIBRATION[..]].concat();
        let answer = run(at, &prune).good().json();
        let outcomes = answer["tensors"].as_array().unwrap().iter();
        let outcomes: BTreeMap<_, _> = outcomes.map(|t| (t["name"].as_str().unwrap(), t["pruned"] == true)).collect();
        let is_expert =
            |name: &str| name.contains("expert") && !name.contains("expert_gate") && !name.ends_with("bias");
        assert!(outcomes.iter().filter(|(name, _)| is_expert(name)).all(|(_, pruned)| *pruned), "{outcomes:?}");
        let is_vision = |name: &str| name.contains("vis") || name.contains("projector");
        assert!(!outcomes.iter().any(|(name, pruned)| is_vision(name) && *pruned), "{outcomes:?}");
        let router =
            outcomes.iter().find(|(name, _)| name.ends_with(".gate.weight") || name.ends_with("router.weight"));
        assert!(router.is_none_or(|(_, pruned)| !*pruned), "{outcomes:?}");
        let chosen = if family == "qwen2_5_vl" { "model.layers.*proj.weight" } else { language };
        let include: &[&str] = if chosen == "*" { &[] } else { &["--include", "*layers.*proj.weight"] };
        let exclude: &[&str] = if chosen == "*" { &[] } else { &["--exclude", "vis*"] };
        run(at, &[&["check", &out], include, exclude].concat()).good();
        let small = format!("{family}-small");
        run(at, &[&["compress", &out, "-o", &small], include, exclude].concat()).good();
        if ["gpt_oss", "mixtral_joined"].contains(&family) {
            assert!(outcomes.keys().any(|name| name.ends_with("layers.1.mlp.experts.2.gate_up_proj.weight")));
            let dense = format!("{family}-dense");
            run(at, &["decompress", &small, "-o", &dense]).good();
            let [pruned, dense] = [&out, &dense].map(|of| fs::read(at.join(of).join("model.safetensors")).unwrap());
            assert!(pruned == dense, "{family}");
            run(at, &["check", &small]).good();
            run(at, &["inspect", &small]).good();
            run(at, &["quantize", &small, "-o", &format!("{family}-int8"), "--dtype", "int8"]).good();
            assert!(!continued(at, &format!("{family}-int8")).as_array().unwrap().is_empty());
        }
        let narrow = ["qwen3_moe", "deepseek_v2", "smollm3", "falcon_grouped", "phi3", "qwen2_5_vl", "mixtral_joined"];
        if expected["perplexity"].is_array() && !narrow.contains(&family) {
            // Stored as f32, and so multiplied.
            assert_eq!(continued(at, &small), continued(at, &out), "{family}");
        }
    }
}

#[test]
fn experts_are_pruned_by_every_method_and_each_of_them_by_its_own_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(3000)).unwrap();
    // Of DeepSeek also the layers around latents.
    let deepseek = [("experts.", (8 + 1) * 3), ("self_attn.", 2 * 5)];
    for (family, parts) in [("mixtral", &[("experts.", 2 * 4 * 3)][..]), ("deepseek_v3", &deepseek)] {
        let mut errors = vec![vec![]; parts.len()];
        for method in ["wanda", "ria", "sparsegpt", "alps"] {
            let (model, out) = (checkpoint(family), format!("{family}-{method}"));
            let options = ["--method", method, "--refit", "off", "--compensate", "off", "--permute", "off"];
            let prune = [&["prune", &model, "-o", &out, "--json"], &options[..], &CALIBRATION].concat();
            let answer = run(at, &prune).good().json();
            for ((part, count), errors) in parts.iter().zip(&mut errors) {
                let own = answer["tensors"].as_array().unwrap().iter();
                let own = own.filter(|t| t["name"].as_str().unwrap().contains(part) && t["pruned"] == true);
                let own: Vec<f64> = own.map(|t| t["relative_error"].as_f64().unwrap()).collect();
                assert_eq!(own.len(), *count, "{family}, {part}");
                errors.push(own.iter().sum::<f64>());
            }
            run(at, &["check", &out]).good();
        }
        for errors in errors {
            let is_in_order = errors[2] < errors[0] && errors[3] < errors[2];
            assert!(is_in_order, "{family}: Wanda, RIA, SparseGPT, ALPS: {errors:?}");
        }
    }
    let model = checkpoint("mixtral");
    let quantize = ["--method", "sparsegpt", "--quantize", "int8", "-o", "int8"];
    run(at, &[&["prune", &model], &quantize[..], &CALIBRATION].concat()).good();
    assert!(!continued(at, "int8").as_array().unwrap().is_empty());
    let measured =
        [&["sensitivity", &model, "-o", "plan.json", "--budget", "sparse=0.5", "--json"], &CALIBRATION[..]].concat();
    let measured = run(at, &measured);
    assert_eq!(measured.code, Some(0), "{measured:?}");
    let tuned = [&["prune", &model, "-o", "tuned", "--tune", "1"], &CALIBRATION[..]].concat();
    let message = run(at, &tuned).bad(1);
    assert!(message.contains("does not support experts"), "{message}");
    assert!(!at.join("tuned").exists());
}

/// Experts in tensors of three dimensions: each is measured, planned and pruned by its own tokens.
#[test]
fn experts_in_one_tensor_are_calibrated_one_by_one() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(3000)).unwrap();
    let model = checkpoint("gpt_oss");
    let mut errors = vec![];
    for method in ["wanda", "sparsegpt", "alps"] {
        let prune = ["prune", &model, "-o", method, "--json", "--method", method, "--refit", "off"];
        let answer = run(at, &[&prune[..], &["--compensate", "off", "--permute", "off"], &CALIBRATION].concat()).good();
        let answer = answer.json();
        let of_experts = answer["tensors"].as_array().unwrap().iter();
        let of_experts = of_experts.filter(|t| t["name"].as_str().unwrap().contains("experts.") && t["pruned"] == true);
        let of_experts: Vec<f64> = of_experts.map(|t| t["relative_error"].as_f64().unwrap()).collect();
        assert_eq!(of_experts.len(), 2 * 4 * 2);
        run(at, &["check", method]).good();
        errors.push(of_experts.iter().sum::<f64>());
    }
    assert!(errors[1] < errors[0] && errors[2] < errors[0], "Wanda, SparseGPT, ALPS: {errors:?}");
    let measured = ["sensitivity", &model, "-o", "plan.json", "--budget", "sparse=0.5", "--json"];
    run(at, &[&measured[..], &CALIBRATION].concat());
    let planned = ["prune", &model, "-o", "planned", "--plan", "plan.json", "--json"];
    let answer = run(at, &[&planned[..], &CALIBRATION].concat()).good().json();
    let pruned = answer["tensors"].as_array().unwrap().iter().filter(|t| t["pruned"] == true).count();
    assert!((1..2 * (4 + 4 * 2)).contains(&pruned), "{answer}");
    assert!(!continued(at, "planned").as_array().unwrap().is_empty());
    let quantize = ["--method", "sparsegpt", "--quantize", "int8", "-o", "int8"];
    run(at, &[&["prune", &model], &quantize[..], &CALIBRATION].concat()).good();
    assert!(!continued(at, "int8").as_array().unwrap().is_empty());
    let tuned = [&["prune", &model, "-o", "tuned", "--tune", "1"], &CALIBRATION[..]].concat();
    assert!(run(at, &tuned).bad(1).contains("does not support experts"));
}

/// What is not run is pruned by magnitude, and the message says so.
#[test]
fn models_that_are_not_run_are_pruned_by_magnitude_and_the_message_says_that_this_works() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    fs::write(at.join("text.txt"), letters(3000)).unwrap();
    let t5: &[(&str, &[usize])] = &[
        ("shared.weight", &[64, 16]),
        ("encoder.block.0.layer.0.SelfAttention.q.weight", &[16, 16]),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", &[32, 4]),
        ("encoder.block.0.layer.0.layer_norm.weight", &[16]),
        ("encoder.block.0.layer.1.DenseReluDense.wi.weight", &[64, 16]),
        ("decoder.block.0.layer.1.EncDecAttention.k.weight", &[16, 16]),
        ("decoder.block.0.layer.2.DenseReluDense.wo.weight", &[16, 64]),
        ("lm_head.weight", &[64, 16]),
    ];
    let whisper: &[(&str, &[usize])] = &[
        ("model.encoder.conv1.weight", &[16, 80, 3]),
        ("model.encoder.embed_positions.weight", &[32, 16]),
        ("model.encoder.layers.0.self_attn.q_proj.weight", &[16, 16]),
        ("model.encoder.layers.0.fc1.weight", &[64, 16]),
        ("model.decoder.embed_tokens.weight", &[64, 16]),
        ("model.decoder.layers.0.encoder_attn.v_proj.weight", &[16, 16]),
        ("model.decoder.layers.0.fc2.weight", &[16, 64]),
        ("proj_out.weight", &[64, 16]),
    ];
    for (name, tensors, pruned) in [("t5", t5, 4), ("whisper", whisper, 4)] {
        fs::create_dir(at.join(name)).unwrap();
        fs::write(at.join(name).join("config.json"), format!(r#"{{"model_type": "{name}"}}"#)).unwrap();
        let tensors: Vec<(&str, Floats)> = tensors.iter().map(|(name, shape)| (*name, random(shape))).collect();
        write(&at.join(name).join("model.safetensors"), &tensors);
        let out = format!("{name}-24");
        let message = run(at, &[&["prune", name, "-o", &out], &CALIBRATION[..]].concat()).bad(1);
        assert!(message.contains(&format!("`{name}`")) && message.contains("leave out --calibration"), "{message}");
        assert!(!at.join(&out).exists());
        let answer = run(at, &["prune", name, "-o", &out, "--json"]).good().json();
        let count = answer["tensors"].as_array().unwrap().iter().filter(|t| t["pruned"] == true).count();
        assert_eq!(count, pruned, "{answer}");
        run(at, &["check", &out]).good();
    }
}
