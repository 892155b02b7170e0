//! `prune` and `check` with every pattern.

use crate::support::{checkpoint, model, names, run};

const PATTERNS: [&str; 8] = [
    "5:16",
    "4:2:8",
    "block:8x8@0.5",
    "block:5x7@0.25",
    "rows@0.25",
    "columns@0.5",
    "unstructured@0.7",
    "unstructured-rows@0.3",
];

#[test]
fn every_pattern_is_pruned_to_and_checked() {
    let (dir, _) = model();
    let at = dir.path();
    for pattern in PATTERNS {
        let input = ["prune", "model.safetensors", "-o", "out.safetensors", "--force", "--pattern", pattern, "--json"];
        let answer = run(at, &input).good().json();
        assert_eq!(answer["pattern"], pattern);
        let pruned: Vec<_> = answer["tensors"].as_array().unwrap().iter().filter(|t| t["pruned"] == true).collect();
        assert!(pruned.len() == 2 && pruned.iter().all(|t| t["axis"] == "row"), "{answer}");
        let checked = run(at, &["check", "out.safetensors", "--pattern", pattern, "--json"]).good().json();
        assert!(checked["obeys"] == true && checked["pattern"] == pattern, "{checked}");
        // The dense model has no pattern, and the places are told.
        let dense = run(at, &["check", "model.safetensors", "--pattern", pattern, "--json", "--places", "2"]);
        assert_eq!(dense.code, Some(1), "{dense:?}");
        let first = &dense.json()["tensors"][0]["rows"]["violations"][0];
        assert!(first["nonzeros"].as_u64() > first["allowed"].as_u64(), "{first}");
        let text = run(at, &["check", "model.safetensors", "--pattern", pattern]);
        assert!(
            text.code == Some(1) && text.stdout.contains(pattern) && text.stdout.contains("layers.0.up"),
            "{text:?}"
        );
        let along = run(
            at,
            &["prune", "model.safetensors", "-o", "across.safetensors", "--force", "--axis", "column"]
                .into_iter()
                .chain(["--pattern", pattern])
                .collect::<Vec<_>>(),
        );
        along.good();
        run(at, &["check", "across.safetensors", "--pattern", pattern, "--axis", "column"]).good();
    }
    let told = run(at, &["check", "model.safetensors", "--pattern", "rows@0.25"]).stdout;
    assert!(told.contains("row 0: 32 non-zeros, of which 0 may be"), "{told}");
}

#[test]
fn calibrated_methods_prune_to_every_pattern_that_they_have_and_refuse_others_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let letters = b"acdefghiklmnoprstuvwyz";
    let text: String = (0..2000).map(|i| char::from(letters[i * i / 3 % letters.len()])).collect();
    std::fs::write(at.join("text.txt"), text).unwrap();
    for family in ["llama", "gpt2"] {
        let model = checkpoint(family);
        let calibration = ["--calibration", "text.txt", "--samples", "4", "--length", "16"];
        for (method, pattern, refit) in [
            ("wanda", "block:4x4@0.5", "10"),
            ("wanda", "4:2:8", "off"),
            ("ria", "rows@0.25", "off"),
            ("ria", "unstructured@0.6", "10"),
            ("sparsegpt", "unstructured-rows@0.5", "off"),
        ] {
            let out = format!("{family}-{method}-{refit}");
            let settings =
                ["--method", method, "--refit", refit, "--compensate", "off", "--pattern", pattern, "--force"];
            run(at, &[&["prune", &model, "-o", &out], &settings[..], &calibration].concat()).good();
            run(at, &["check", &out, "--pattern", pattern]).good();
        }
        let by_default = ["prune", &model, "-o", &format!("{family}-default"), "--pattern", "columns@0.25", "--json"];
        assert_eq!(run(at, &[&by_default[..], &calibration].concat()).good().json()["method"], "wanda");
    }
    let before = names(at);
    let (model, missing) = (checkpoint("llama"), ["--calibration", "missing.txt"]);
    for (more, expected) in [
        (["--method", "alps", "--pattern", "rows@0.25"], "alps"),
        (["--method", "sparsegpt", "--pattern", "block:4x4@0.5"], "sparsegpt"),
        (["--swaps", "3", "--pattern", "4:2:8"], "swaps"),
        (["--transposable", "optimal", "--pattern", "rows@0.5"], "reduction axis"),
        (["--refit", "off", "--pattern", "rows@1.5"], "from 0 to 1"),
        (["--refit", "off", "--pattern", "diagonal"], "block:64x64@0.8"),
    ] {
        let message = run(at, &[&["prune", &model, "-o", "no"], &more[..], &missing].concat()).bad(2);
        assert!(message.contains(expected) && !message.contains("missing.txt"), "{message}");
    }
    let message = run(at, &["prune", &model, "-o", "no", "--transposable", "optimal", "--pattern", "rows@0.5"]).bad(2);
    assert!(message.contains("--transposable"), "{message}");
    let quantize = ["--method", "sparsegpt", "--quantize", "int8", "--pattern", "unstructured@0.5"];
    let message = run(at, &[&["prune", &model, "-o", "no"], &quantize[..], &missing].concat()).bad(2);
    assert!(message.contains("2:4"), "{message}");
    assert_eq!(names(at), before);
}
