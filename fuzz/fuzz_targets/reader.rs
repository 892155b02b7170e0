//! A whole file from a stranger: header, manifest, every tensor, every compressed weight.

#![no_main]

use libfuzzer_sys::fuzz_target;
use twofour::{
    Element, Result,
    file::{CompressedInfo, Part, Reader, ValueFormat},
    int4::Granularity,
    match_element,
};

fn decompress<T: Element>(reader: &Reader, info: &CompressedInfo) -> Result<()> {
    if let Ok(weight) = reader.compressed::<T>(&info.name) {
        let dense = weight.to_dense();
        assert_eq!(dense.len(), info.rows * info.cols);
        assert_eq!(size_of_val(dense.as_slice()), info.dense_bytes());
        assert!(weight.mask().count() <= info.rows * info.cols);
    }
    Ok(())
}

fn int4(reader: &Reader, info: &CompressedInfo, granularity: Granularity) {
    if let Ok(weight) = reader.int4(&info.name) {
        assert_eq!(weight.granularity(), granularity);
        assert_eq!(weight.packed_values().len(), reader.tensor(&Part::Values.key(&info.name)).unwrap().info.bytes);
        let dense = weight.dequantize().to_dense();
        assert_eq!(size_of_val(dense.as_slice()), info.dense_bytes());
        assert!(dense.iter().all(|value| value.is_finite()));
    }
}

fn int8(reader: &Reader, info: &CompressedInfo, granularity: Granularity) {
    if let Ok(weight) = reader.int8(&info.name) {
        assert_eq!(weight.granularity(), granularity);
        let dense = weight.dequantize().to_dense();
        assert_eq!(dense.len(), info.rows * info.cols);
        assert!(granularity == Granularity::Row || dense.iter().all(|value| value.is_finite()));
    }
}

fuzz_target!(init: {
    // One thread, this one: otherwise a crash is not attributed to its input.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
}, |bytes: &[u8]| {
    // The target `gguf` has the other format.
    if bytes.starts_with(b"GGUF") {
        return;
    }
    let Ok(reader) = Reader::from_bytes("input", bytes.to_vec()) else { return };
    let mut total = 0;
    for info in reader.tensors() {
        let view = reader.tensor(&info.name).expect("a listed tensor can be read");
        assert_eq!(view.bytes().expect("its place was checked").len(), info.bytes);
        total += info.bytes;
        let _ = view.elements::<f32>();
    }
    assert!(total + 8 <= bytes.len());
    for info in reader.compressed_weights() {
        let _ = reader.scales(&info.name).expect("its shape was checked");
        if let ValueFormat::Int4(granularity) = info.format {
            int4(&reader, info, granularity);
            continue;
        }
        if let ValueFormat::GroupedI8(granularity) = info.format {
            int8(&reader, info, granularity);
            continue;
        }
        if info.format == ValueFormat::ScaledI8 {
            int8(&reader, info, Granularity::Row);
        }
        let dtype = info.format.dense();
        match_element!(dtype, |T| decompress::<T>(&reader, info)).expect("the manifest names types of weights");
    }
});
