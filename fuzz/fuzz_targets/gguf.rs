//! A whole GGUF file from a stranger: header, every tensor, and the files of a directory that follow from its metadata.

#![no_main]

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use twofour::file::Reader;

fuzz_target!(init: {
    // One thread, this one: otherwise a crash is not attributed to its input.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
}, |rest: &[u8]| {
    let bytes = [b"GGUF", rest].concat();
    let length = bytes.len();
    let Ok(reader) = Reader::from_bytes("input", bytes) else { return };
    for info in reader.tensors() {
        // Two bits an element at least, and four bytes of it at most.
        assert!(info.bytes <= 16 * length, "{info:?}");
        if let Ok(elements) = reader.tensor(&info.name).expect("a listed tensor can be read").bytes() {
            assert_eq!(elements.len(), info.bytes);
        }
    }
    for name in reader.described() {
        if let Ok(Some(text)) = reader.beside(name) {
            assert!(matches!(serde_json::from_slice(&text), Ok(Value::Object(_))));
        }
    }
});
