//! Values and metadata from a stranger: what `from_parts` accepts decompresses to a 2:4 matrix, whose own compression
//! decompresses to the same bytes.

#![no_main]

use half::bf16;
use libfuzzer_sys::fuzz_target;
use twofour::{Axis, Compressed, Element, F8E4M3, MatrixRef, Pattern};

fn inspect<T: Element>(rows: usize, cols: usize, bytes: &[u8]) {
    // As many values as the shape asks for where there are enough bytes, so that the checks behind the lengths are
    // reached.
    let groups = cols.div_ceil(4);
    let wanted = rows.saturating_mul(groups).saturating_mul(2 * size_of::<T>());
    let (values, meta) = bytes.split_at(wanted.min(bytes.len()) / size_of::<T>() * size_of::<T>());
    let values: Vec<T> = bytemuck::allocation::pod_collect_to_vec(values);
    let meta: Vec<u32> = bytemuck::allocation::pod_collect_to_vec(&meta[..meta.len() / 4 * 4]);
    let Ok(weight) = Compressed::from_parts(rows, cols, values, meta) else { return };
    let dense = weight.to_dense();
    let matrix = MatrixRef::new(rows, cols, &dense).expect("to_dense has the shape");
    assert!(weight.mask().verify(Pattern::TWO_FOUR, Axis::Row).is_ok());
    let again = Compressed::from_dense(matrix).expect("what was compressed is 2:4");
    assert_eq!(bytemuck::cast_slice::<T, u8>(&again.to_dense()), bytemuck::cast_slice::<T, u8>(&dense));
    let _ = Compressed::from_pruned(matrix);
}

fuzz_target!(init: {
    let _ = rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build_global();
}, |bytes: &[u8]| {
    let Some((&[dtype, large], bytes)) = bytes.split_first_chunk::<2>() else { return };
    let (rows, cols, bytes) = if large % 8 == 0 {
        let Some((dims, rest)) = bytes.split_first_chunk::<16>() else { return };
        let (rows, cols) = dims.split_at(8);
        let dim = |b: &[u8]| usize::try_from(u64::from_le_bytes(b.try_into().expect("eight bytes"))).unwrap_or(usize::MAX);
        (dim(rows), dim(cols), rest)
    } else {
        let Some((&[rows, cols], rest)) = bytes.split_first_chunk::<2>() else { return };
        (usize::from(rows % 16), usize::from(cols), rest)
    };
    match dtype % 4 {
        0 => inspect::<f32>(rows, cols, bytes),
        1 => inspect::<bf16>(rows, cols, bytes),
        2 => inspect::<i8>(rows, cols, bytes),
        _ => inspect::<F8E4M3>(rows, cols, bytes),
    }
});
