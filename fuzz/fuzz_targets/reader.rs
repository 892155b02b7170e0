//! A whole file from a stranger: header, manifest, every tensor, every compressed weight.

#![no_main]

use half::{bf16, f16};
use libfuzzer_sys::fuzz_target;
use twofour::{
    DType, Element, F8E4M3, F8E5M2,
    file::{CompressedInfo, Reader},
};

fn decompress<T: Element>(reader: &Reader, info: &CompressedInfo) {
    if let Ok(weight) = reader.compressed::<T>(&info.name) {
        let dense = weight.to_dense();
        assert_eq!(dense.len(), info.rows * info.cols);
        assert_eq!(size_of_val(dense.as_slice()), info.dense_bytes());
        assert!(weight.mask().count() <= info.rows * info.cols);
    }
}

fuzz_target!(init: {
    // One thread, this one: otherwise a crash is not attributed to its input.
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
}, |bytes: &[u8]| {
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
        match info.dtype {
            DType::F32 => decompress::<f32>(&reader, info),
            DType::F16 => decompress::<f16>(&reader, info),
            DType::BF16 => decompress::<bf16>(&reader, info),
            DType::I8 => decompress::<i8>(&reader, info),
            DType::F8E4M3 => decompress::<F8E4M3>(&reader, info),
            DType::F8E5M2 => decompress::<F8E5M2>(&reader, info),
        }
    }
});
