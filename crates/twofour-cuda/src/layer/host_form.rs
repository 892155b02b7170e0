//! The packed form of a weight in host memory: its bijection with the canonical form.

use twofour::{
    Compressed, Element, compressed,
    layout::sm90::{decode_8, decode_16, encode_8, encode_16},
};

use crate::{
    DataType, Error, Result,
    raw::gemm::{packed_bytes, tile_k},
};

/// Returns the bytes of values and of metadata of a weight in the GEMM kernels' order, with its padding.
///
/// # Errors
/// [`Error::Core`] with [`twofour::Error::TooLarge`].
pub(super) fn encode<T: Element>(weight: &Compressed<T>) -> Result<(Vec<u8>, Vec<u8>)> {
    let dtype: DataType = T::DTYPE;
    let tile = tile_k(dtype);
    let weight = padded(weight, weight.rows().next_multiple_of(64), weight.cols().next_multiple_of(tile.columns()))?;
    let meta: Vec<u8> = match dtype.bytes() {
        2 => bytemuck::cast_slice(&encode_16(&weight, tile)?).to_vec(),
        _ => bytemuck::cast_slice(&encode_8(&weight, tile)?).to_vec(),
    };
    Ok((bytemuck::cast_slice(weight.values()).to_vec(), meta))
}

/// Returns the canonical form of a `[rows, cols]` weight from the bytes of its values and metadata, which may be longer
/// than needed.
///
/// # Errors
/// [`Error::Length`] for fewer bytes, [`Error::Core`] for metadata that is none.
pub(super) fn decode<T: Element>(values: &[u8], meta: &[u8], rows: usize, cols: usize) -> Result<Compressed<T>> {
    let dtype: DataType = T::DTYPE;
    let (bytes, tile) = (packed_bytes(dtype, rows, cols), tile_k(dtype));
    let part = |what, from: &[u8], expected: usize| -> Result<()> {
        if from.len() < expected { Err(Error::Length { what, expected, found: from.len() }) } else { Ok(()) }
    };
    part("the packed values", values, bytes.values)?;
    part("the packed metadata", meta, bytes.meta)?;
    let (padded_rows, padded_cols) = (rows.next_multiple_of(64), cols.next_multiple_of(tile.columns()));
    let meta = &meta[..bytes.meta];
    let words = if dtype.bytes() == 2 {
        decode_16(padded_rows, padded_cols, tile, &bytemuck::pod_collect_to_vec::<u8, u16>(meta))?
    } else {
        decode_8(padded_rows, padded_cols, tile, &bytemuck::pod_collect_to_vec::<u8, u32>(meta))?
    };
    cropped(&bytemuck::pod_collect_to_vec::<u8, T>(&values[..bytes.values]), &words, padded_cols, rows, cols)
}

/// Returns the weight `[rows, cols]` whose values and metadata are padded to more rows and to `padded_cols` columns, a
/// multiple of 32.
///
/// # Errors
/// [`Error::Core`] for metadata that is none.
pub(super) fn cropped<T: Element>(
    values: &[T],
    words: &[u32],
    padded_cols: usize,
    rows: usize,
    cols: usize,
) -> Result<Compressed<T>> {
    let (groups, words_per_row) = (cols.div_ceil(4), cols.div_ceil(32));
    let values = values.chunks_exact(padded_cols / 2).take(rows).flat_map(|row| &row[..2 * groups]).copied().collect();
    let mut kept = Vec::with_capacity(rows * words_per_row);
    for row in words.chunks_exact(padded_cols / 32).take(rows) {
        kept.extend_from_slice(&row[..words_per_row]);
        if let (Some(last), 1..) = (kept.last_mut(), groups % 8) {
            *last &= (1 << (4 * (groups % 8))) - 1;
        }
    }
    Ok(Compressed::from_parts(rows, cols, values, kept)?)
}

/// Returns the weight padded to a larger shape by groups and rows of zeros.
pub(super) fn padded<T: Element>(weight: &Compressed<T>, rows: usize, cols: usize) -> Result<Compressed<T>> {
    let (values_len, meta_len) = compressed::lengths(rows, cols)?;
    let (mut values, mut meta) = (vec![T::ZERO; values_len], vec![0u32; meta_len]);
    let (groups, words) = (cols / 4, cols.div_ceil(32));
    // A group without nonzeros stores its first two elements.
    const EMPTY: u32 = 0x4;
    for row in 0..rows {
        for group in 0..groups {
            let code =
                if row < weight.rows() && group < weight.groups() { weight.code(row, group).into() } else { EMPTY };
            meta[row * words + group / 8] |= code << (4 * (group % 8));
        }
        if row < weight.rows() {
            let from = weight.values_row(row);
            values[row * 2 * groups..][..from.len()].copy_from_slice(from);
        }
    }
    Ok(Compressed::from_parts(rows, cols, values, meta)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use twofour::MatrixRef;

    #[test]
    fn padding_adds_groups_of_zeros() {
        let dense: Vec<f32> = (0..3 * 6).map(|i| if i % 6 % 4 < 2 { i as f32 + 1.0 } else { 0.0 }).collect();
        let weight = Compressed::from_dense(MatrixRef::new(3, 6, &dense).unwrap()).unwrap();
        let found = padded(&weight, 64, 128).unwrap();
        let wide = found.to_dense();
        for row in 0..64 {
            for col in 0..128 {
                let expected = if row < 3 && col < 6 { dense[row * 6 + col] } else { 0.0 };
                assert_eq!(wide[row * 128 + col], expected, "{row}, {col}");
            }
        }
    }
}
