//! Checkpoints of image encoders through the commands.

use crate::support::{self, run};

#[test]
fn image_encoders_are_pruned_compressed_and_quantized() {
    let fixtures = support::fixture("");
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
            let found = run(at, &["check", model, "--json"]).good().json();
            assert!(found["tensors"].as_array().is_some_and(|tensors| !tensors.is_empty()), "{kind} {model}: {found}");
        }
    }
}
