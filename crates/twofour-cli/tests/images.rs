//! Checkpoints of image encoders through the commands.

mod support;

use std::path::Path;

use support::run;

#[test]
fn image_encoders_are_pruned_compressed_quantized_and_measured() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../twofour-nn/tests/fixtures/checkpoints");
    for kind in ["vit", "dinov2", "sam"] {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        let dense = fixtures.join(kind);
        let dense = dense.to_string_lossy();
        run(at, &["prune", &dense, "-o", "pruned"]).good();
        run(at, &["check", "pruned"]).good();
        run(at, &["compress", "pruned", "-o", "compressed"]).good();
        run(at, &["quantize", "pruned", "-o", "int8", "--dtype", "int8"]).good();
        for model in ["pruned", "compressed", "int8"] {
            let ran = run(at, &["bench", "encoder", model, "--batch", "1,3", "--rounds", "2", "--json"]).good();
            let found = ran.json();
            let rows = found["rows"].as_array().unwrap();
            let names: Vec<_> = rows.iter().map(|row| (row["weights"].as_str().unwrap(), &row["batch"])).collect();
            let expected = [("dense", 1), ("as stored", 1), ("dense", 3), ("as stored", 3)];
            assert!(
                names.iter().zip(expected).all(|(found, (name, batch))| found.0 == name && *found.1 == batch),
                "{found}"
            );
            assert!(rows[1]["weight_bytes"].as_u64() < rows[0]["weight_bytes"].as_u64(), "{kind} {model}: {found}");
            for row in rows {
                assert!(row["images_per_s"].as_f64() > Some(0.0) && row["allocated_bytes"].is_null(), "{found}");
                assert_eq!(row["seconds"].as_array().unwrap().len(), 2);
            }
        }
        assert!(run(at, &["bench", "encoder", &dense]).bad(2).contains("nothing to compare"));
        assert!(run(at, &["bench", "encoder", "pruned", "--length", "8"]).bad(2).contains("--length"));
    }
}
