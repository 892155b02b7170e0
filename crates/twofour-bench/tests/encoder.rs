//! The suite `encoder` on pruned and compressed checkpoints.

use std::{fs, path::Path};

use crate::support::run;
use twofour::{
    Selector,
    file::{Compress, Convert, NotSparse, Prune},
};

/// Makes `dense`, `pruned` and `compressed` of a checkpoint of the fixtures.
fn models(kind: &str, at: &Path) {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../twofour-nn/tests/fixtures/checkpoints");
    for folder in ["dense", "pruned", "compressed"] {
        fs::create_dir(at.join(folder)).unwrap();
        for entry in fs::read_dir(fixtures.join(kind)).unwrap() {
            let file = entry.unwrap().path();
            let name = file.file_name().unwrap();
            if folder == "dense" || file.extension() == Some("json".as_ref()) {
                fs::copy(&file, at.join(folder).join(name)).unwrap();
            }
        }
    }
    let file = |folder: &str| at.join(folder).join("model.safetensors");
    let choose = |tensor: &twofour::file::TensorInfo| {
        let is_layer = tensor.shape.len() == 2 && tensor.name.contains("layer") && tensor.name.ends_with("weight");
        is_layer.then_some(Selector::TWO_FOUR)
    };
    Convert::open(file("dense")).unwrap().run(file("pruned"), Prune::new(&choose)).unwrap();
    let options = Compress { not_sparse: NotSparse::KeepDense, ..Compress::default() };
    Convert::open(file("pruned")).unwrap().run(file("compressed"), options).unwrap();
}

#[test]
fn sequences_are_encoded_dense_and_sparse() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    models("bert", at);
    for model in ["pruned", "compressed"] {
        let arguments = ["encoder", model, "--batch", "1,3", "--length", "8", "--rounds", "2", "--json"];
        let found = run(at, &arguments).good().json();
        assert_eq!((found["rows"].as_array().unwrap().len(), &found["length"]), (2, &8.into()));
        assert!(found["sparse_weight_bytes"].as_u64() < found["dense_weight_bytes"].as_u64(), "{found}");
        let row = &found["rows"][1];
        assert!(
            row["batch"] == 3 && row["dense_s"].as_array().unwrap().len() == 2 && row["speedup"].as_f64() > Some(0.0)
        );
    }
    assert!(run(at, &["encoder", "dense", "--length", "8"]).bad(2).contains("nothing to compare"));
    assert!(run(at, &["encoder", "pruned", "--length", "6000"]).bad(2).contains("tokens"));
}

#[test]
fn images_are_encoded_dense_and_sparse() {
    for kind in ["vit", "dinov2", "sam"] {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path();
        models(kind, at);
        for model in ["pruned", "compressed"] {
            let found = run(at, &["encoder", model, "--batch", "1,3", "--rounds", "2", "--json"]).good().json();
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
        assert!(run(at, &["encoder", "dense"]).bad(2).contains("nothing to compare"));
        assert!(run(at, &["encoder", "pruned", "--length", "8"]).bad(2).contains("--length"));
    }
}
