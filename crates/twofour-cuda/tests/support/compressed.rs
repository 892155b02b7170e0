//! What compressed weights are made from and of, as bytes on the device, for tests.

use bytemuck::Pod;
use cudarc::driver::{CudaSlice, DeviceRepr};
use half::{bf16, f16};
use twofour::{Arithmetic, Compressed, F8E4M3, F8E5M2, Mask, layout::sm90};
use twofour_cuda::{DataType, raw::MetaOrder};

use super::Bench;

/// An element type that is pruned or compressed.
pub(crate) trait Input: Arithmetic + DeviceRepr + Pod {
    const ELEMENT: DataType;
}

/// An element type of compressed values.
pub(crate) trait Output: Arithmetic + Pod {
    const ELEMENT: DataType;
    /// Metadata in a product's order, as bytes.
    fn ordered(weight: &Compressed<Self>, tile: sm90::TileK) -> Vec<u8>;
}

/// Metadata of 16-bit elements in a product's order, as bytes.
pub(crate) fn halves<T: twofour::Element>(weight: &Compressed<T>, tile: sm90::TileK) -> Vec<u8> {
    sm90::encode_16(weight, tile).unwrap().iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Metadata of 8-bit elements in a product's order, as bytes.
pub(crate) fn words<T: twofour::Element>(weight: &Compressed<T>, tile: sm90::TileK) -> Vec<u8> {
    sm90::encode_8(weight, tile).unwrap().iter().flat_map(|word| word.to_le_bytes()).collect()
}

macro_rules! types {
    ($($input:ty: $element:ident),*; $($output:ty: $of:ident, $meta:ident),*) => {
        $(impl Input for $input { const ELEMENT: DataType = DataType::$element; })*
        $(impl Output for $output {
            const ELEMENT: DataType = DataType::$of;
            fn ordered(weight: &Compressed<Self>, tile: sm90::TileK) -> Vec<u8> { $meta(weight, tile) }
        })*
    };
}
types!(f32: F32, f16: F16, bf16: BF16; f16: F16, halves, bf16: BF16, halves, F8E4M3: E4M3, words, F8E5M2: E5M2, words);

/// Values as bytes.
pub(crate) fn values<O: Output>(weight: &Compressed<O>) -> &[u8] {
    bytemuck::cast_slice(weight.values())
}

/// Metadata in that order, as bytes.
pub(crate) fn meta<O: Output>(weight: &Compressed<O>, order: MetaOrder) -> Vec<u8> {
    match order {
        MetaOrder::Canonical => weight.meta().iter().flat_map(|word| word.to_le_bytes()).collect(),
        MetaOrder::Sm90(tile) => O::ordered(weight, tile),
    }
}

/// A mask's tiles, as the kernels have them.
pub(crate) fn tiles(mask: &Mask) -> Vec<u16> {
    let kept = |r: usize, c: usize| r < mask.rows() && c < mask.cols() && mask.is_kept(r, c);
    let tile = |r: usize, c: usize| (0..16).fold(0, |t, i| t | u16::from(kept(4 * r + i / 4, 4 * c + i % 4)) << i);
    let (rows, cols) = (mask.rows().div_ceil(4), mask.cols().div_ceil(4));
    (0..rows).flat_map(|r| (0..cols).map(move |c| (r, c))).map(|(r, c)| tile(r, c)).collect()
}

/// A compressed weight with the padding of an order: rows and columns of zeros.
pub(crate) fn padded<O: Output>(weight: &Compressed<O>, order: MetaOrder) -> Compressed<O> {
    if order == MetaOrder::Canonical {
        return weight.clone();
    }
    let (rows, cols) = order.padded(weight.rows(), weight.cols());
    let (mut values, mut meta) = (Vec::new(), Vec::new());
    for row in 0..weight.rows() {
        values.extend_from_slice(weight.values_row(row));
        values.resize((row + 1) * cols / 2, O::ZERO);
        meta.extend_from_slice(weight.meta_row(row));
        // Groups of the last word that are not there have no code yet.
        let groups = weight.cols().div_ceil(4);
        if let Some(last) = meta.last_mut().filter(|_| !groups.is_multiple_of(8)) {
            *last |= 0x4444_4444 << (groups % 8 * 4);
        }
        meta.resize((row + 1) * cols / 32, 0x4444_4444);
    }
    values.resize(rows * cols / 2, O::ZERO);
    meta.resize(rows * cols / 32, 0x4444_4444);
    Compressed::from_parts(rows, cols, values, meta).unwrap()
}

/// Memory on the device of which only a part may be written: so many bytes, between guards.
pub(crate) struct Guarded {
    memory: CudaSlice<u8>,
    len: usize,
}

impl Guarded {
    const GUARD: usize = 64;
    /// A byte of no value: -0.0 in 8 bits, its upper half in 16.
    const POISON: u8 = 0x80;

    pub(crate) fn new(bench: &Bench, len: usize) -> Self {
        Self { memory: bench.poisoned(len + 2 * Self::GUARD, Self::POISON), len }
    }

    pub(crate) fn at(&self, bench: &Bench) -> u64 {
        bench.at(&self.memory) + Self::GUARD as u64
    }

    /// What was written; panics where a guard was.
    pub(crate) fn found(&self, bench: &Bench, what: &str) -> Vec<u8> {
        let all = bench.down(&self.memory);
        let (before, rest) = all.split_at(Self::GUARD);
        let (found, after) = rest.split_at(self.len);
        assert!(before.iter().all(|byte| *byte == Self::POISON), "{what}: written before the start");
        assert!(after.iter().all(|byte| *byte == Self::POISON), "{what}: written beyond the end");
        found.to_vec()
    }
}

pub(crate) fn transposed<T: Copy>(rows: usize, cols: usize, data: &[T]) -> Vec<T> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| data[r * cols + c])).collect()
}

/// Panics at the first byte that is not as expected.
pub(crate) fn same(what: &str, found: &[u8], expected: &[u8]) {
    if let Some(at) = (0..expected.len()).find(|i| found[*i] != expected[*i]) {
        panic!("{what}: byte {at} is {:#x}, expected {:#x}", found[at], expected[at]);
    }
}
