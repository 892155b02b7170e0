//! Metadata in the orders of the GPUs, from a stranger: what decodes to legal metadata encodes to the same words.

#![no_main]

use half::bf16;
use libfuzzer_sys::fuzz_target;
use twofour::{
    Compressed, Element,
    int4::Granularity,
    layout::{
        bitmask,
        lanes::{self, Lanes},
        sm80,
        sm90::{self, TileK},
    },
};

/// A weight with that metadata whose values are all zero, where every code is legal.
fn weight<T: Element>(rows: usize, cols: usize, meta: Vec<u32>) -> Option<Compressed<T>> {
    let values = vec![T::ZERO; rows * cols / 2];
    Compressed::from_parts(rows, cols, values, meta).ok()
}

/// The words in the bytes, as many as the shape requires where there are enough.
fn words<W: bytemuck::Pod>(bytes: &[u8], wanted: usize) -> Vec<W> {
    let length = (bytes.len() / size_of::<W>()).min(wanted) * size_of::<W>();
    bytemuck::allocation::pod_collect_to_vec(&bytes[..length])
}

fuzz_target!(init: {
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
}, |bytes: &[u8]| {
    let Some((&[order, large], bytes)) = bytes.split_first_chunk::<2>() else { return };
    let (rows, cols, bytes) = if large % 16 == 0 {
        let Some((dims, rest)) = bytes.split_first_chunk::<16>() else { return };
        let dim = |b: &[u8]| u64::from_le_bytes(b.try_into().expect("eight bytes")) as usize;
        (dim(&dims[..8]), dim(&dims[8..]), rest)
    } else {
        let Some((&[rows, cols], rest)) = bytes.split_first_chunk::<2>() else { return };
        (usize::from(rows % 9) * 8 * usize::from(large % 16), usize::from(cols % 9) * 32, rest)
    };
    let elements = rows.saturating_mul(cols);
    let tile = TileK::ALL[usize::from(order / 8) % TileK::ALL.len()];
    match order % 6 {
        0 => {
            let words = words::<u16>(bytes, elements / 16);
            let Ok(meta) = sm80::decode_16(rows, cols, &words) else { return };
            let Some(weight) = weight::<bf16>(rows, cols, meta) else { return };
            assert_eq!(sm80::encode_16(&weight).expect("it decoded"), words);
        }
        1 => {
            let words = words::<u32>(bytes, elements / 32);
            let Ok(meta) = sm80::decode_8(rows, cols, &words) else { return };
            let Some(weight) = weight::<i8>(rows, cols, meta) else { return };
            assert_eq!(sm80::encode_8(&weight).expect("it decoded"), words);
        }
        2 => {
            let words = words::<u16>(bytes, elements / 16);
            let Ok(meta) = sm90::decode_16(rows, cols, tile, &words) else { return };
            let Some(weight) = weight::<bf16>(rows, cols, meta) else { return };
            assert_eq!(sm90::encode_16(&weight, tile).expect("it decoded"), words);
        }
        3 => {
            let words = words::<u32>(bytes, elements / 32);
            let Ok(meta) = sm90::decode_8(rows, cols, tile, &words) else { return };
            let Some(weight) = weight::<i8>(rows, cols, meta) else { return };
            assert_eq!(sm90::encode_8(&weight, tile).expect("it decoded"), words);
        }
        4 => {
            let bytes = words::<u8>(bytes, elements / 8);
            let Ok(mask) = bitmask::decode(rows, cols, &bytes) else { return };
            assert_eq!(bitmask::encode(&mask).expect("it decoded"), bytes);
        }
        _ => {
            let granularity = if order & 8 == 0 { Granularity::Row } else { Granularity::Group };
            let scales = rows.saturating_mul(granularity.scales_per_row(cols)) / 2;
            let (values, meta) = bytes.split_at(bytes.len().min(elements / 4));
            let (meta, rest) = meta.split_at(meta.len().min(elements / 8));
            let lanes =
                Lanes { values: words(values, usize::MAX / 4), meta: words(meta, usize::MAX / 4), scales: words(rest, scales) };
            let Ok(weight) = lanes::decode(rows, cols, granularity, &lanes) else { return };
            assert_eq!(lanes::encode(&weight).expect("it decoded"), lanes);
        }
    }
});
