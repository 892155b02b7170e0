//! The suite `blocks` on a layer small enough for a test.

use crate::support::run;

const SMALL: [&str; 9] =
    ["blocks", "--shape", "128x64", "--threads", "1", "--seconds", "0.01", "--pattern", "block:16x16@0.5"];

#[test]
fn every_contender_is_timed_for_every_number_of_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let ran = run(dir.path(), &[&SMALL[..], &["--tokens", "1,64", "--json", "-o", "blocks.json"]].concat()).good();
    let answer = ran.json();
    assert_eq!(std::fs::read_to_string(dir.path().join("blocks.json")).unwrap(), ran.stdout);
    let command =
        "twofour-bench blocks --threads 1 --pattern block:16x16@0.5 --shape 128x64 --tokens 1,64 --seconds 0.01";
    assert_eq!(answer["command"], command);
    let rows = answer["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["tokens"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 64]);
    for row in rows {
        for contender in ["block_f32_us", "dense_f32_us", "block_bf16_us", "dense_bf16_us"] {
            assert!(row[contender].as_f64().unwrap() > 0.0, "{row}");
        }
    }
    let text = run(dir.path(), &[&SMALL[..], &["--tokens", "1"]].concat()).good().stdout;
    assert!(text.contains("128x64") && text.contains("Over: the dense time"), "{text}");
}

#[test]
fn another_pattern_than_blocks_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let message = run(dir.path(), &["blocks", "--pattern", "2:4"]).bad(2);
    assert!(message.contains("block:64x64@0.8"), "{message}");
}
