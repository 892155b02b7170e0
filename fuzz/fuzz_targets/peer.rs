//! A file in a format of another tool, from a stranger: what is translated is a model of this library.

#![no_main]

use libfuzzer_sys::fuzz_target;
use twofour::{
    Element, Result,
    file::{CompressedInfo, Reader, ValueFormat},
    match_element,
};

fn expect_sound<T: Element>(reader: &Reader, info: &CompressedInfo) -> Result<()> {
    let weight = reader.compressed::<T>(&info.name).expect("it was made by this library");
    assert_eq!(weight.to_dense().len(), info.rows * info.cols);
    Ok(())
}

fuzz_target!(init: {
    // One thread, this one: otherwise a crash is not attributed to its input.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
}, |bytes: &[u8]| {
    let Ok(reader) = Reader::from_bytes("input", bytes.to_vec()) else { return };
    let before: usize = reader.compressed_weights().count();
    let Ok(reader) = reader.translated() else { return };
    let made: usize = reader.translation().weights.values().sum();
    if made == 0 || before > 0 {
        return;
    }
    for info in reader.tensors() {
        let view = reader.tensor(&info.name).expect("a listed tensor can be read");
        assert_eq!(view.bytes().expect("it was read once").len(), info.bytes);
    }
    assert!(reader.compressed_weights().count() <= made);
    for info in reader.compressed_weights() {
        match info.format {
            ValueFormat::Int4(_) => drop(reader.int4(&info.name).expect("it was made by this library").dequantize()),
            ValueFormat::ScaledI8 | ValueFormat::GroupedI8(_) => {
                drop(reader.int8(&info.name).expect("it was made by this library").dequantize());
            }
            ValueFormat::Plain(dtype) => {
                match_element!(dtype, |T| expect_sound::<T>(&reader, info)).expect("a type of weights");
            }
            other => panic!("{other:?}"),
        }
    }
});
