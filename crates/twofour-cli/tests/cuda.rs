//! The commands for GPUs, also where there is none.

use crate::support::{self, run};

/// Whether a device can be opened here.
fn has_device() -> bool {
    twofour_cuda::Device::open(0).is_ok()
}

#[test]
fn advise_on_a_gpu_compares_with_dense_or_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["advise", "--shape", "4096x4096", "--tokens", "1,2048", "--device", "cuda", "--json"];
    let ran = run(dir.path(), &args);
    if !has_device() {
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        assert!(ran.stderr.contains("driver") || ran.stderr.contains("no CUDA device"), "{}", ran.stderr);
        return;
    }
    let answer = ran.good().json();
    let timings = answer["shapes"][0]["timings"].as_array().unwrap();
    assert_eq!(timings.len(), 2, "{answer}");
    assert!(timings.iter().all(|t| t["dense_us"].as_f64().unwrap() > 0.0 && t["sparse_us"].as_f64().unwrap() > 0.0));
}

#[test]
fn advise_on_a_gpu_answers_or_says_why_not_for_any_shape() {
    let dir = tempfile::tempdir().unwrap();
    for (shape, tokens) in [("5x7", "1"), ("1x1", "3"), ("100x70", "1,77"), ("64x4194304", "65536")] {
        for dtype in ["bf16", "e4m3", "i8", "int4"] {
            let tokens = if dtype == "int4" { "1" } else { tokens };
            let args = ["advise", "--shape", shape, "--tokens", tokens, "--device", "cuda", "--dtype", dtype];
            let ran = run(dir.path(), &args);
            if ran.code != Some(0) {
                let error = ran.bad(1);
                let reasons = [
                    "driver",
                    "no CUDA device",
                    "multiple of",
                    "out of device memory",
                    "no cuBLASLt",
                    "nothing to compare",
                ];
                assert!(reasons.iter().any(|reason| error.contains(reason)), "{shape} {dtype}: {error}");
            }
        }
    }
}

#[test]
fn advise_on_a_gpu_knows_no_f32() {
    let dir = tempfile::tempdir().unwrap();
    let ran = run(dir.path(), &["advise", "--shape", "64x128", "--device", "cuda", "--dtype", "f32"]);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("bf16"), "{}", ran.stderr);
}

#[test]
fn advise_with_four_bits_compares_with_dense_or_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let advise =
        |more: &[&str]| run(dir.path(), &[&["advise", "--shape", "256x512", "--dtype", "int4"], more].concat());
    // A CPU answers, too: yes, no, or that it is too busy to tell.
    let on_a_cpu = advise(&["--tokens", "1", "--json"]);
    assert!(matches!(on_a_cpu.code, Some(0 | 1)), "{}", on_a_cpu.stderr);
    assert_eq!(on_a_cpu.json()["shapes"][0]["timings"].as_array().map(Vec::len), Some(1), "{}", on_a_cpu.stderr);
    let many = advise(&["--device", "cuda", "--tokens", "8,65"]);
    assert_eq!(many.code, Some(2), "{}", many.stderr);
    assert!(many.stderr.contains("65") && many.stderr.contains("64 at most"), "{}", many.stderr);
    let ran = advise(&["--device", "cuda", "--tokens", "1,64", "--json"]);
    if !has_device() {
        assert_eq!(ran.code, Some(1), "{}", ran.stderr);
        return;
    }
    let answer = ran.good().json();
    let timings = answer["shapes"][0]["timings"].as_array().unwrap();
    assert_eq!(timings.len(), 2, "{answer}");
    // A quarter of the bytes of bf16 and a little, each kept value's position and the scales among them.
    assert!(
        timings.iter().all(|t| t["sparse_bytes"] == 256 * 512 / 2 * 25 / 32 && t["sparse_us"].as_f64() > Some(0.0))
    );
}

#[test]
fn advise_takes_8_bit_floats_on_a_gpu_only() {
    let dir = tempfile::tempdir().unwrap();
    for dtype in ["e4m3", "e5m2"] {
        let advise =
            |more: &[&str]| run(dir.path(), &[&["advise", "--shape", "256x512", "--dtype", dtype], more].concat());
        let on_a_cpu = advise(&[]);
        assert_eq!(on_a_cpu.code, Some(2), "{}", on_a_cpu.stderr);
        assert!(on_a_cpu.stderr.contains(dtype) && on_a_cpu.stderr.contains("--device cuda"), "{}", on_a_cpu.stderr);
        let ran = advise(&["--device", "cuda", "--tokens", "1,512", "--json"]);
        if !has_device() {
            assert_eq!(ran.code, Some(1), "{}", ran.stderr);
            continue;
        }
        let answer = ran.good().json();
        let timings = answer["shapes"][0]["timings"].as_array().unwrap();
        assert_eq!(timings.len(), 2, "{answer}");
        assert!(timings.iter().all(|t| t["sparse_bytes"] == 256 * 512 * 5 / 8 && t["dense_us"].as_f64() > Some(0.0)));
    }
}

#[test]
fn an_unknown_architecture_is_asked_wrongly() {
    let dir = tempfile::tempdir().unwrap();
    let ran = run(dir.path(), &["kernels", "--arch", "sm_75"]);
    assert_eq!(ran.code, Some(2), "{}", ran.stderr);
    assert!(ran.stderr.contains("sm_75") && ran.stderr.contains("sm_90a"), "{}", ran.stderr);
}

#[test]
fn prune_on_a_gpu_leaves_the_errors_that_it_leaves_on_a_cpu_or_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let fixtures = support::fixture("");
    std::fs::write(dir.path().join("text.txt"), support::letters(4000)).unwrap();
    let prune = |family: &str, out: &str, device: &str| {
        let model = fixtures.join(family);
        let arguments = ["prune", model.to_str().unwrap(), "-o", out, "--calibration", "text.txt", "--json"];
        let sampling = ["--samples", "12", "--length", "24", "--device", device];
        run(dir.path(), &[&arguments[..], &sampling].concat())
    };
    let on_a_gpu = prune("bert", "gpu", "cuda");
    if !has_device() {
        let error = on_a_gpu.bad(1);
        assert!(error.contains("driver") || error.contains("no CUDA device"), "{error}");
        assert!(!dir.path().join("gpu").exists());
        return;
    }
    // Heads that the GPU's kernels do not have.
    assert!(prune("llama", "llama", "cuda").bad(1).contains("heads of 4 elements"));
    let (found, expected) = (on_a_gpu.good().json(), prune("bert", "cpu", "cpu").good().json());
    assert_eq!((found["device"].as_str(), expected["device"].as_str()), (Some("cuda:0"), Some("cpu")));
    let errors = |answer: &serde_json::Value| -> Vec<f64> {
        answer["tensors"].as_array().unwrap().iter().filter_map(|tensor| tensor["relative_error"].as_f64()).collect()
    };
    let (found, expected) = (errors(&found), errors(&expected));
    assert!(found.len() == expected.len() && !found.is_empty());
    let (found, expected) = (found.iter().sum::<f64>(), expected.iter().sum::<f64>());
    assert!((found / expected - 1.0).abs() < 0.1, "{found} {expected}");
    prune("bert", "again", "cuda").good();
    let weights = |out: &str| std::fs::read(dir.path().join(out).join("model.safetensors")).unwrap();
    assert_eq!(weights("gpu"), weights("again"));
}
