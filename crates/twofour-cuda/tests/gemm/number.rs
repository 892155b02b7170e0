//! The element types that kernels multiply, random weights, and results as bytes.

use half::{bf16, f16};
use twofour::{Compressed, Element as _, F8E4M3, F8E5M2, layout::sm90};
use twofour_cuda::DataType;

use crate::support::{
    compressed::{halves, words},
    numbers::Random,
};

/// An element type that the kernels multiply.
pub(crate) trait Number: twofour::Element {
    const ELEMENT: DataType;
    fn of(value: f32) -> Self;
    fn value(self) -> f64;
    fn bytes(self) -> Vec<u8>;
    fn meta(weight: &Compressed<Self>) -> Vec<u8>;
}

fn meta_16<T: twofour::Element>(weight: &Compressed<T>) -> Vec<u8> {
    halves(weight, sm90::TileK::K64)
}

fn meta_8<T: twofour::Element>(weight: &Compressed<T>) -> Vec<u8> {
    words(weight, sm90::TileK::K128)
}

macro_rules! number {
    ($type:ty, $element:ident, $meta:ident, $of:expr, $value:expr, $bytes:expr) => {
        impl Number for $type {
            const ELEMENT: DataType = DataType::$element;
            fn of(value: f32) -> Self {
                $of(value)
            }
            fn value(self) -> f64 {
                $value(self)
            }
            fn bytes(self) -> Vec<u8> {
                $bytes(self)
            }
            fn meta(weight: &Compressed<Self>) -> Vec<u8> {
                $meta(weight)
            }
        }
    };
}

number!(f16, F16, meta_16, f16::from_f32, f16::to_f64, |v: f16| v.to_le_bytes().to_vec());
number!(bf16, BF16, meta_16, bf16::from_f32, bf16::to_f64, |v: bf16| v.to_le_bytes().to_vec());
number!(i8, I8, meta_8, |v: f32| (v * 20.0) as i8, f64::from, |v: i8| v.to_le_bytes().to_vec());
// Any bits but those of NaN and infinity will do for 8-bit floats; small exponents keep sums tame.
number!(
    F8E4M3,
    E4M3,
    meta_8,
    |v: f32| F8E4M3(if v < 0.0 { 0x80 } else { 0 } | ((v.abs() * 32.0) as u8 + 0x20) & 0x7F),
    |v: F8E4M3| f64::from(v.to_f32()),
    |v: F8E4M3| vec![v.0]
);
number!(
    F8E5M2,
    E5M2,
    meta_8,
    |v: f32| F8E5M2(if v < 0.0 { 0x80 } else { 0 } | ((v.abs() * 16.0) as u8 + 0x30) & 0x7F),
    |v: F8E5M2| f64::from(v.to_f32()),
    |v: F8E5M2| vec![v.0]
);

/// A weight with random values and codes.
pub(crate) fn weight<T: Number>(random: &mut Random, rows: usize, cols: usize) -> Compressed<T> {
    let values = (0..rows * cols / 2).map(|_| T::of(random.number())).collect();
    let meta = (0..rows * cols / 32).map(|_| random.codes()).collect();
    Compressed::from_parts(rows, cols, values, meta).unwrap()
}

pub(crate) fn bytes_of<T: Number>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(|v| v.bytes()).collect()
}

/// The bytes of a result.
pub(crate) fn result_bytes(output: DataType, value: f64) -> Vec<u8> {
    match output {
        DataType::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
        DataType::BF16 => bf16::from_f64(value).to_le_bytes().to_vec(),
        DataType::F32 => (value as f32).to_le_bytes().to_vec(),
        _ => (value as i32).to_le_bytes().to_vec(),
    }
}
