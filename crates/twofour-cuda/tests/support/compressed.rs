//! What compressed weights are made from and of, as bytes on the device, for tests.

use bytemuck::Pod;
use cudarc::driver::DeviceRepr;
use half::{bf16, f16};
use twofour::{Arithmetic, Compressed, F8E4M3, F8E5M2, Mask, layout::sm90};
use twofour_cuda::{DataType, prune::MetaOrder};

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

fn halves<T: twofour::Element>(weight: &Compressed<T>, tile: sm90::TileK) -> Vec<u8> {
    sm90::encode_16(weight, tile).unwrap().iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn words<T: twofour::Element>(weight: &Compressed<T>, tile: sm90::TileK) -> Vec<u8> {
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
    let tile =
        |r: usize, c: usize| (0..16).fold(0, |t, i| t | u16::from(mask.is_kept(4 * r + i / 4, 4 * c + i % 4)) << i);
    (0..mask.rows() / 4).flat_map(|r| (0..mask.cols() / 4).map(move |c| (r, c))).map(|(r, c)| tile(r, c)).collect()
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
