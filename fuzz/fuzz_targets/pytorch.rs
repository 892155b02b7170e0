//! A whole archive from a stranger, of torch.save or of numpy: pickle or headers, and every tensor.

#![no_main]

use libfuzzer_sys::fuzz_target;
use twofour::{Error, file::Reader};

fuzz_target!(init: {
    // One thread, this one: otherwise a crash is not attributed to its input.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
}, |rest: &[u8]| {
    let Ok(reader) = Reader::from_bytes("input", [b"PK\x03\x04", rest].concat()) else { return };
    for info in reader.tensors() {
        // Strides of 0 make a tensor of any length out of one element.
        if info.bytes > 1 << 20 {
            continue;
        }
        match reader.tensor(&info.name).expect("a listed tensor").bytes() {
            Ok(elements) => assert_eq!(elements.len(), info.bytes),
            // Of a compressed array that is damaged.
            Err(error) => assert!(matches!(error, Error::Io { .. }), "{error}"),
        }
    }
});
