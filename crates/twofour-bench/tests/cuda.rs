//! The suites of a GPU's kernels, also where there is none.

use std::path::Path;

use crate::support::run;

/// Whether a device can be opened here.
fn has_device() -> bool {
    twofour_cuda::Device::open(0).is_ok()
}

#[test]
fn without_a_gpu_a_suite_says_so() {
    let dir = tempfile::tempdir().unwrap();
    if has_device() {
        eprintln!("skipped: this machine has a GPU");
        return;
    }
    for suite in ["prune", "gemm", "decode", "layer", "attention", "step", "generate", "grid"] {
        let error = run(dir.path(), &["cuda", suite]).bad(1);
        assert!(error.contains("driver") || error.contains("no CUDA device"), "{suite}: {error}");
    }
}

#[test]
fn each_suite_is_listed_with_what_it_measures() {
    let help = run(Path::new("."), &["cuda", "--help"]).good().stdout;
    for (suite, words) in [
        ("prune", "compressing"),
        ("gemm", "GEMMs of many tokens"),
        ("decode", "memory-bound GEMMs of small batches"),
        ("attention", "attention"),
        ("generate", "decoding"),
    ] {
        let line = help.lines().find(|line| line.trim_start().starts_with(&format!("{suite} "))).unwrap();
        assert!(line.contains(words), "{line}");
    }
}

#[test]
fn options_that_name_nothing_are_refused_before_a_device_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, word) in [
        (&["step", "--model", "bert"][..], "vit-l"),
        (&["step", "--shape", "96x65"], "65"),
        (&["generate", "--model", "gpt"], "llama-3-8b"),
        (&["generate", "--weights", "int3"], "2:4-int4"),
        (&["generate", "--prompt", "492"], "no 16 steps of --context 512"),
        (&["prune", "--device", "cpu"], "twofour-bench cpu"),
        (&["grid", "-o", "."], "directory"),
    ] {
        let error = run(dir.path(), &[&["cuda"], arguments].concat()).bad(2);
        assert!(error.contains(word), "{error}");
    }
    // Each suite knows its own options.
    run(dir.path(), &["cuda", "prune", "--tokens", "8"]).bad(2);
    run(dir.path(), &["cuda", "gemm", "--batch", "8"]).bad(2);
}

#[test]
fn with_a_gpu_every_baseline_has_a_time() {
    let dir = tempfile::tempdir().unwrap();
    if !has_device() {
        assert!(std::env::var_os("TWOFOUR_REQUIRE_GPU").is_none(), "TWOFOUR_REQUIRE_GPU is set, and there is no GPU");
        eprintln!("skipped: no GPU");
        return;
    }
    let ran = run(dir.path(), &["cuda", "prune", "--rounds", "5", "--json", "-o", "prune.json"]).good();
    assert_eq!(std::fs::read_to_string(dir.path().join("prune.json")).unwrap(), ran.stdout);
    let answer = ran.json();
    let rows = answer["rows"].as_array().unwrap();
    // Of each of five weights a copy, and three rules from two types; 8-bit floats where the GPU has them.
    assert!([5 * 7, 5 * 8].contains(&rows.len()), "{answer}");
    assert!(
        rows.iter().all(|row| row["us"].as_f64().unwrap() > 0.0 && row["min_us"].as_f64() <= row["us"].as_f64()),
        "{answer}"
    );
}
