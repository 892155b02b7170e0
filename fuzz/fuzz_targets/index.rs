//! The index of a sharded model from a stranger: what is accepted stays in its directory and round-trips.

#![no_main]

use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use twofour::file::Index;

fuzz_target!(|bytes: &[u8]| {
    let path = Path::new("model.safetensors.index.json");
    let Ok(index) = Index::parse(path, bytes) else { return };
    for shard in index.shards() {
        let components: Vec<_> = Path::new(shard).components().collect();
        assert!(matches!(components.as_slice(), [Component::Normal(_)]), "{shard:?}");
    }
    let again = Index::parse(path, index.to_json().as_bytes()).expect("our own text is accepted");
    assert_eq!(again.weight_map, index.weight_map);
});
