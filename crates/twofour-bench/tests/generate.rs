//! The suite `generate` with a model small enough for a test, beside another program.

use crate::support::run;

const SMALL: [&str; 11] =
    ["generate", "--layers", "1", "--vocabulary", "512", "--prompt", "20", "--length", "2", "--rounds", "2"];

/// A contender that answers every task with the same times.
const OTHER: &str = r#"echo '{"contender": "other", "version": "1", "weight_bytes": 12}'
while read task; do echo '{"prefill_s": 0.5, "decode_s": 0.25}'; done
"#;

#[test]
fn programs_are_interleaved_and_all_rounds_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("other.sh"), OTHER).unwrap();
    let options =
        ["--weights", "2:4-int8,2:4-int4", "--threads", "1", "--llama-cpp", "sh ./other.sh", "--json", "-o", "g.json"];
    let ran = run(dir.path(), &[&SMALL[..], &options].concat()).good();
    assert_eq!(std::fs::read_to_string(dir.path().join("g.json")).unwrap(), ran.stdout);
    let answer = ran.json();
    let command = "twofour-bench generate --model llama-3.2-1b --layers 1 --vocabulary 512 --weights 2:4-int8,2:4-int4 \
                   --prompt 20 --length 2 --threads 1 --rounds 2 \
                   --llama-cpp 'sh other.sh'";
    assert_eq!(answer["command"], command);
    assert_eq!((&answer["model"]["layers"], &answer["prompt"], &answer["length"]), (&1.into(), &20.into(), &2.into()));
    assert_eq!(answer["load_average"].as_array().unwrap().len(), 2);
    let rows = answer["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|row| row["contender"].as_str().unwrap()).collect();
    assert_eq!(names, ["twofour 2:4-int8", "twofour 2:4-int4", "other"]);
    for row in rows {
        assert!(row["decode_s"].as_array().unwrap().len() == 2 && row["prefill_s"].as_array().unwrap().len() == 2);
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"));
        assert!(number("best_decode_tokens_per_s") >= number("decode_tokens_per_s"), "{row}");
        assert!(!cfg!(target_os = "linux") || number("peak_memory_bytes") > 1e5, "{row}");
    }
    assert_eq!(
        (rows[2]["decode_tokens_per_s"].as_f64(), rows[2]["prefill_tokens_per_s"].as_f64()),
        (Some(8.0), Some(40.0))
    );
    assert!(rows[1]["weight_bytes"].as_u64() < rows[0]["weight_bytes"].as_u64());
}

#[test]
fn what_cannot_be_measured_is_said_before_anything_is_loaded() {
    let dir = tempfile::tempdir().unwrap();
    let with = |options: &[&str]| run(dir.path(), &[&SMALL[..], options].concat());
    assert!(with(&["--model", "llama-9"]).bad(2).contains("llama-3.2-1b"));
    assert!(with(&["--weights", "stored"]).bad(2).contains("directory"));
    assert!(with(&["--threads", "4000"]).bad(2).contains("hardware thread"));
    let error = with(&["--weights", "2:4-int4", "--llama-cpp", "sh -c 'exit 3'"]).bad(1);
    assert!(error.contains("exit 3") && error.contains("ended early"), "{error}");
    let long = ["generate", "--model", "llama-2-7b", "--prompt", "4096"];
    assert!(run(dir.path(), &long).bad(2).contains("4096"));
}
