//! The suites `cuda grid` and `draw`, also where there is no GPU.

use std::fs;

use crate::support::{names, run};
use serde_json::{Value, json};

fn has_device() -> bool {
    twofour_cuda::Device::open(0).is_ok()
}

/// Results as the suite writes them: two data types, weights of two groups, one cell without cuSPARSELt, one name that
/// XML has to escape.
fn results() -> Value {
    let mut rows = Vec::new();
    for (dtype, tokens) in [("bf16", [1, 77, 16384]), ("e4m3", [1, 64, 8192])] {
        for (out, inputs, layer, speedup) in
            [(28672, 4096, "Llama 3 8B gate+up", 1.5), (768, 768, "a <b> & \"c\"", 0.75)]
        {
            for (place, tokens) in tokens.into_iter().enumerate() {
                let row = |contender: &str, us: f64| {
                    json!({
                        "dtype": dtype, "output": "bf16", "shape": [tokens, inputs, out],
                        "contender": contender, "kernel": "k", "us": us,
                        "min_us": us, "max_us": us, "tflops": 1.0, "gb_per_s": 1.0, "layers": [layer],
                    })
                };
                rows.extend([row("cublaslt", 10.0 * speedup), row("twofour", 10.0)]);
                if place > 0 {
                    rows.push(row("cusparselt", 12.5));
                }
            }
        }
    }
    let machine =
        json!({"gpu": "a GPU", "architecture": "sm_90a", "multiprocessors": 132, "driver": "13.0", "nvrtc": null});
    json!({
        "machine": machine, "libraries": {"cublaslt": "13.1.0", "cusparselt": "0.8.0"}, "kernels": "0", "command": "c",
        "unsupported": [], "faults": [], "rows": rows,
    })
}

/// Checks that a document is well-formed as far as this project writes XML: tags nest, attributes are quoted, and text
/// is escaped. Returns its texts.
fn expect_xml(document: &str) -> Vec<String> {
    let mut open: Vec<String> = Vec::new();
    let mut texts = Vec::new();
    let mut rest = document;
    while let Some(start) = rest.find('<') {
        let text = &rest[..start];
        assert!(!text.contains('>'), "{text}");
        for entity in text.split('&').skip(1) {
            assert!(["amp;", "lt;", "gt;", "quot;"].iter().any(|known| entity.starts_with(known)), "&{entity}");
        }
        if open.last().is_some_and(|tag| tag == "text") {
            texts.push(text.to_owned());
        }
        let end = start + rest[start..].find('>').expect("a tag ends");
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(name));
            continue;
        }
        let (inner, is_empty) = tag.strip_suffix('/').map_or((tag, false), |inner| (inner, true));
        assert_eq!(inner.matches('"').count() % 2, 0, "{inner}");
        let name = inner.split_whitespace().next().expect("a tag has a name");
        assert!(name.chars().all(|c| c.is_ascii_alphabetic()), "{name}");
        let outside: String = inner.split('"').step_by(2).collect();
        assert!(!outside.contains('&') && !outside.contains('<'), "{outside}");
        if !is_empty {
            open.push(name.to_owned());
        }
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?} {rest}");
    assert!(document.chars().all(|c| !c.is_control() || c == '\n'));
    texts
}

#[test]
fn a_heat_map_is_drawn_from_the_json() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("grid.json"), results().to_string()).unwrap();
    run(dir.path(), &["draw", "grid.json"]).good();
    let svg = fs::read_to_string(dir.path().join("grid.svg")).unwrap();
    assert_eq!(names(dir.path()), ["grid.json", "grid.svg"]);
    let texts = expect_xml(&svg);
    let has = |text: &str| texts.iter().any(|found| found == text);
    for text in [
        "bf16, over dense (cuBLASLt)",
        "e4m3, over cuSPARSELt",
        "16384",
        "8192",
        "1.50",
        "0.75",
        "1.25",
        "\u{2013}",
        "[28672, 4096]  Llama 3 8B gate+up",
        "[768, 768]  a &lt;b&gt; &amp; &quot;c&quot;",
        "worst 1.50 ([28672, 4096], 1 token), mean 1.50 of 3",
        "worst 0.75 ([768, 768], 1 token), mean 0.75 of 3",
        "worst 1.25 ([768, 768], 77 tokens), mean 1.25 of 2",
        "16 M elements or more",
        "less than 1 M elements",
    ] {
        assert!(has(text), "{text}: {texts:#?}");
    }
    assert!(svg.contains("prefers-color-scheme:dark"));
    assert!(texts.iter().any(|text| text.starts_with("2:4 GEMM by layer")), "{texts:#?}");
    // Every cell has its figure: two data types, two weights, three token counts; cuSPARSELt has no kernel for one
    // token.
    assert_eq!(texts.iter().filter(|text| *text == "1.25").count(), 2 * 2 * 2);
    assert_eq!(texts.iter().filter(|text| *text == "\u{2013}").count(), 2 * 2);
}

#[test]
fn a_heat_map_says_what_epilogue_its_gemms_have() {
    let dir = tempfile::tempdir().unwrap();
    for (epilogue, title) in
        [("bias", "with a bias by"), ("bias-gelu", "with a bias and GELU by"), ("scales", "with scales and a bias by")]
    {
        let mut results = results();
        results["epilogue"] = json!(epilogue);
        fs::write(dir.path().join("grid.json"), results.to_string()).unwrap();
        run(dir.path(), &["draw", "grid.json", "--force"]).good();
        let svg = fs::read_to_string(dir.path().join("grid.svg")).unwrap();
        assert!(expect_xml(&svg).iter().any(|text| text.contains(title)), "{epilogue}");
    }
}

#[test]
fn a_picture_is_replaced_only_by_force() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("grid.json"), results().to_string()).unwrap();
    fs::write(dir.path().join("map.svg"), "mine").unwrap();
    let draw = |more: &[&str]| run(dir.path(), &[&["draw", "grid.json"], more].concat());
    assert!(draw(&["-o", "map.svg"]).bad(2).contains("--force"));
    assert_eq!(fs::read_to_string(dir.path().join("map.svg")).unwrap(), "mine");
    draw(&["-o", "map.svg", "--force"]).good();
    assert!(fs::read_to_string(dir.path().join("map.svg")).unwrap().starts_with("<svg"));
    assert!(draw(&["-o", "grid.json", "--force"]).bad(2).contains("another picture"));
    fs::write(dir.path().join("grid.json"), "{\"rows\": 1}").unwrap();
    assert!(draw(&["--force"]).bad(2).contains("not the JSON of `twofour-bench cuda grid`"));
    assert!(run(dir.path(), &["draw", "none.json"]).bad(1).contains("none.json"));
    assert_eq!(names(dir.path()), ["grid.json", "map.svg"]);
}

#[test]
fn what_cannot_be_measured_is_said_before_a_device_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let grid = |more: &[&str]| run(dir.path(), &[&["cuda", "grid"], more].concat());
    fs::write(dir.path().join("shapes"), "# name\n4096 4096 q\n4096\n").unwrap();
    let error = grid(&["--shapes", "shapes", "-o", "grid.json"]).bad(2);
    assert!(error.contains("shapes: line 3") && error.contains("OUT IN"), "{error}");
    fs::write(dir.path().join("shapes.json"), "[\n  [64, 64],\n  [64, 0]\n]").unwrap();
    assert!(grid(&["--shapes", "shapes.json"]).bad(2).contains("line 3"));
    assert!(grid(&["--shapes", "none"]).bad(2).contains("none"));
    assert!(grid(&["-o", "grid.svg"]).bad(2).contains("name the JSON"));
    assert!(grid(&["-o", "."]).bad(2).contains("directory"));
    fs::write(dir.path().join("grid.svg"), "mine").unwrap();
    assert!(grid(&["-o", "grid.json"]).bad(2).contains("grid.svg exists"));
    for (option, value) in [("--shapes", "shapes"), ("--epilogue", "bias"), ("--limit", "5")] {
        let error = run(dir.path(), &["cuda", "gemm", option, value]).bad(2);
        assert!(error.contains(option), "{error}");
    }
    assert!(grid(&["--limit", "0"]).bad(2).contains("--limit"));
    assert_eq!(names(dir.path()), ["grid.svg", "shapes", "shapes.json"]);
}

#[test]
fn without_a_gpu_no_file_is_written() {
    if has_device() {
        eprintln!("skipped: this machine has a GPU");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let error = run(dir.path(), &["cuda", "grid", "-o", "grid.json"]).bad(1);
    assert!(error.contains("driver") || error.contains("no CUDA device"), "{error}");
    assert_eq!(names(dir.path()), [""; 0]);
    // What is there stays.
    fs::write(dir.path().join("grid.json"), "earlier").unwrap();
    run(dir.path(), &["cuda", "grid", "-o", "grid.json", "--force"]).bad(1);
    assert_eq!(fs::read_to_string(dir.path().join("grid.json")).unwrap(), "earlier");
}

#[test]
fn with_a_gpu_cells_are_measured_once_and_continued() {
    if !has_device() {
        assert!(std::env::var_os("TWOFOUR_REQUIRE_GPU").is_none(), "TWOFOUR_REQUIRE_GPU is set, and there is no GPU");
        eprintln!("skipped: no GPU");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("shapes"), "1024 1024 a square\n").unwrap();
    let grid = ["cuda", "grid", "--shapes", "shapes", "-o", "grid.json", "--json"];
    let first = run(dir.path(), &[&grid[..], &["--limit", "2"]].concat());
    if first.stderr.contains("no cu") {
        eprintln!("skipped: {}", first.stderr);
        return;
    }
    let before = first.good().json()["rows"].as_array().unwrap().clone();
    let answer = run(dir.path(), &grid).good().json();
    let rows = answer["rows"].as_array().unwrap();
    assert_eq!(rows[..before.len()], before, "cells of the first run are not measured again");
    let of = |contender: &str| rows.iter().filter(|row| row["contender"] == contender).count();
    assert_eq!([of("twofour"), of("cublaslt"), of("dispatch")], [21 + 3 * 11; 3]);
    for row in rows {
        assert!(row["us"].as_f64() > Some(0.0) && row["min_us"].as_f64() <= row["us"].as_f64(), "{row}");
        assert_eq!(row["layers"], json!(["a square"]));
        if row["contender"] == "twofour" {
            assert!(row["unmeasured"]["over_best"].as_f64() >= Some(1.0), "{row}");
        }
    }
    let kept: Value = serde_json::from_str(&fs::read_to_string(dir.path().join("grid.json")).unwrap()).unwrap();
    assert_eq!(kept["rows"], answer["rows"]);
    expect_xml(&fs::read_to_string(dir.path().join("grid.svg")).unwrap());
}
