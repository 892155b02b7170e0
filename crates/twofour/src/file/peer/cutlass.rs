//! Weights that torch compressed for CUTLASS (`torch.sparse.to_sparse_semi_structured`), of files of `torch.save`: kept
//! values `[rows, cols / 2]` and metadata in the order of [`crate::layout::sm80`].

use half::{bf16, f16};

use super::{Decoded, PeerFormat, tensors::Parts};
use crate::{
    Compressed, DataType, Element, Error, MatrixRef, Result,
    layout::sm80::{decode_8, decode_16},
    memory,
};

#[derive(Debug)]
pub(super) struct Cutlass;

impl PeerFormat for Cutlass {
    fn name(&self) -> &'static str {
        "torch's semi-structured (CUTLASS)"
    }

    fn required(&self) -> &'static [&'static str] {
        &["packed", "meta"]
    }

    fn weight(&self, module: &str) -> String {
        module.to_owned()
    }

    fn decode(&self, parts: &Parts<'_>) -> Result<Decoded> {
        let [rows, kept] = parts.matrix("packed")?;
        let cols = kept.checked_mul(2).ok_or_else(|| Error::TooLarge { shape: vec![rows, kept] })?;
        let words = || -> Result<Vec<u16>> { Ok(bytemuck::cast_slice(&parts.elements::<i16>("meta")?).to_vec()) };
        match parts.expect("packed")?.dtype.element() {
            Some(DataType::F16) => dense::<f16>(parts, [rows, cols], &decode_16(rows, cols, &words()?)?),
            Some(DataType::BF16) => dense::<bf16>(parts, [rows, cols], &decode_16(rows, cols, &words()?)?),
            Some(DataType::I8) => {
                let words: Vec<i32> = parts.elements("meta")?;
                dense::<i8>(parts, [rows, cols], &decode_8(rows, cols, bytemuck::cast_slice(&words))?)
            }
            _ => Err(parts.fault(format!(
                "its kept values are {}; torch keeps two of four in f16, bf16 and int8, and one of two in f32",
                parts.expect("packed")?.dtype
            ))),
        }
    }
}

/// The weight of kept values and codes.
///
/// Where torch compresses both ways, a group that keeps one element may have a code that names its place twice, the
/// second time with a zero.
fn dense<T: Element>(parts: &Parts<'_>, [rows, cols]: [usize; 2], meta: &[u32]) -> Result<Decoded> {
    let (kept, words) = (parts.elements::<T>("packed")?, (cols / 4).div_ceil(8));
    let mut dense: Vec<T> = memory::zeroed(rows * cols)?;
    for (at, pair) in kept.as_chunks::<2>().0.iter().enumerate() {
        let (row, group) = (at / (cols / 4), at % (cols / 4));
        let code = (meta[row * words + group / 8] >> (group % 8 * 4) & 15) as u8;
        let four = &mut dense[row * cols + 4 * group..][..4];
        let [first, second] = [code & 3, code >> 2].map(usize::from);
        if first == second && !pair[1].is_zero() {
            return Err(Error::IllegalCode { row, group, code });
        }
        four[second] = pair[1];
        four[first] = pair[0];
    }
    Decoded::compressed(parts.weight(), &Compressed::from_dense(MatrixRef::new(rows, cols, &dense)?)?)
}
