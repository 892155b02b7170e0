//! The cases that PyTorch's own tests hold its 2:4 support to, with torch on a CPU as the oracle
//! (`fixtures/peers/make.py`).

use std::path::PathBuf;

use half::{bf16, f16};
use twofour::{
    Axis, Compressed, Element, Error, Mask, MatrixRef, Pattern,
    compressed::code,
    file::{Reader, StoredElement},
    layout::{bitmask, sm80},
    select::{self, Transposable},
};

fn oracle() -> Reader {
    Reader::open(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/peers/torch.safetensors")).unwrap()
}

fn read<T: StoredElement>(reader: &Reader, key: &str) -> Vec<T> {
    reader.tensor(key).unwrap().elements().unwrap().into_owned()
}

const SHAPES: [(usize, usize); 4] = [(32, 128), (32, 256), (64, 128), (64, 256)];

/// R1: values and metadata in CUTLASS's order, bit for bit, and the way back.
fn r1_16_bit<T: Element + StoredElement>(name: &str) {
    let reader = oracle();
    for (rows, cols) in SHAPES {
        let key = |part| format!("r1.{name}.{rows}x{cols}.{part}");
        let dense = read::<T>(&reader, &key("dense"));
        let weight = Compressed::from_dense(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
        assert_eq!(weight.values(), read::<T>(&reader, &key("values")), "{}", key("values"));
        let meta: Vec<u16> = read::<i16>(&reader, &key("meta")).into_iter().map(|w| w as u16).collect();
        assert_eq!(sm80::encode_16(&weight).unwrap(), meta, "{}", key("meta"));
        let canonical = sm80::decode_16(rows, cols, &meta).unwrap();
        let back = Compressed::from_parts(rows, cols, read::<T>(&reader, &key("values")), canonical).unwrap();
        assert_eq!(back.to_dense(), dense);
    }
}

#[test]
fn r1_conversions_are_torchs_bit_for_bit() {
    r1_16_bit::<f16>("f16");
    r1_16_bit::<bf16>("bf16");
    let reader = oracle();
    for (rows, cols) in SHAPES {
        let key = |part| format!("r1.i8.{rows}x{cols}.{part}");
        let dense = read::<i8>(&reader, &key("dense"));
        let weight = Compressed::from_dense(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
        assert_eq!(weight.values(), read::<i8>(&reader, &key("values")));
        let meta: Vec<u32> = read::<i32>(&reader, &key("meta")).into_iter().map(|w| w as u32).collect();
        assert_eq!(sm80::encode_8(&weight).unwrap(), meta);
        assert_eq!(sm80::decode_8(rows, cols, &meta).unwrap(), weight.meta());
    }
}

/// R1 in f32: torch's pattern is 1:2 there (an f32 stands for two 16-bit elements that go together). Our general N:M
/// selection prunes to it; a 1:2 weight is 2:4 too, so our compressed values are torch's, and the 2:4 mask of the
/// halves has torch's metadata.
#[test]
fn r1_f32_is_one_of_two() {
    let reader = oracle();
    for (rows, cols) in SHAPES {
        let key = |part| format!("r1.f32.{rows}x{cols}.{part}");
        let dense = read::<f32>(&reader, &key("dense"));
        let dense = MatrixRef::new(rows, cols, &dense).unwrap();
        let mask = select::magnitude(dense, Pattern::new(1, 2).unwrap(), Axis::Row).unwrap();
        let weight = Compressed::from_masked(dense, &mask).unwrap();
        assert_eq!(weight.values(), read::<f32>(&reader, &key("values")), "{}", key("values"));

        let halves = Mask::from_fn(rows, 2 * cols, |row, half| mask.is_kept(row, half / 2));
        let ones = vec![f16::ONE; rows * 2 * cols];
        let halves = Compressed::from_masked(MatrixRef::new(rows, 2 * cols, &ones).unwrap(), &halves).unwrap();
        let meta: Vec<u16> = read::<i16>(&reader, &key("meta")).into_iter().map(|w| w as u16).collect();
        assert_eq!(sm80::encode_16(&halves).unwrap(), meta, "{}", key("meta"));
        assert_eq!(sm80::decode_16(rows, 2 * cols, &meta).unwrap(), halves.meta());
    }
}

/// R2: what becomes of each of the 16 masks of a group. torch coerces the five with more than two elements and drops
/// values by position; here they are errors. torch gives groups with fewer than two elements other codes than we do;
/// the dense values are the same.
#[test]
fn r2_all_sixteen_patterns() {
    // Columns 0 to 3 of the mask, and torch's code.
    let torchs = [
        ([1, 1, 0, 0], 0x4),
        ([1, 0, 1, 0], 0x8),
        ([0, 1, 1, 0], 0x9),
        ([1, 0, 0, 1], 0xC),
        ([0, 1, 0, 1], 0xD),
        ([0, 0, 1, 1], 0xE),
    ];
    for kept in 0..16u8 {
        let row: Vec<f16> = (0..128)
            .map(|i| if kept >> (i % 4) & 1 == 1 { f16::from_f32(i as f32 + 1.0) } else { f16::ZERO })
            .collect();
        let data = row.repeat(32);
        let matrix = MatrixRef::new(32, 128, &data).unwrap();
        match Compressed::from_dense(matrix) {
            Err(Error::TooManyKept { line: 0, group: 0, kept: found, .. }) => {
                assert!(kept.count_ones() > 2 && found == kept.count_ones() as usize);
            }
            Err(other) => panic!("{other}"),
            Ok(weight) => {
                assert!(kept.count_ones() <= 2);
                assert_eq!(weight.to_dense(), data);
                for (mask, code) in torchs {
                    if mask.iter().enumerate().fold(0, |bits, (i, m)| bits | m << i) == kept {
                        assert_eq!(weight.code(0, 0), code);
                    }
                }
                assert!(code::is_legal(weight.code(31, 31)));
            }
        }
    }
}

/// R3: greedy selection by signed value. torch's CPU reference breaks ties by position and its kernels by their
/// network, as we do, so the comparison is on data without ties; the network's ties are in the fixtures beside the
/// selector.
#[test]
fn r3_greedy_masks_are_torchs() {
    let reader = oracle();
    let (dense, pruned) = (read::<f32>(&reader, "r3.0.dense"), read::<f32>(&reader, "r3.0.pruned"));
    let dense = MatrixRef::new(32, 64, &dense).unwrap();
    let mask = select::transposable(dense, Transposable::GreedySigned).unwrap();
    assert_eq!(mask.apply(dense).unwrap(), pruned);
}

/// R4: the bitmask's bytes.
#[test]
fn r4_bitmasks_are_torchs() {
    let reader = oracle();
    for i in 0..2 {
        let pruned = read::<f32>(&reader, &format!("r3.{i}.pruned"));
        let bytes = read::<u8>(&reader, &format!("r4.{i}.bitmask"));
        let mask = Mask::of_nonzeros(MatrixRef::new(32, 64, &pruned).unwrap());
        assert_eq!(bitmask::encode(&mask).unwrap(), bytes);
        assert_eq!(bitmask::decode(32, 64, &bytes).unwrap(), mask);
    }
}

/// R5: one mask compresses a weight and its transpose, and applies to other data.
#[test]
fn r5_packing_both_ways() {
    let n = 512;
    let w: Vec<f32> = (0..n * n).map(|i| ((i * 7919 + i / n * 31) % 2003) as f32 - 1001.5).collect();
    let matrix = MatrixRef::new(n, n, &w).unwrap();
    let transposed = matrix.transposed();
    let transposed = MatrixRef::new(n, n, &transposed).unwrap();
    for rule in Transposable::ALL {
        let mask = select::transposable(matrix, rule).unwrap();
        let packed = Compressed::from_masked(matrix, &mask).unwrap();
        let packed_t = Compressed::from_masked(transposed, &mask.transposed()).unwrap();
        let sum = |values: &[f32]| values.iter().map(|v| f64::from(*v)).sum::<f64>();
        assert_eq!(sum(packed.values()), sum(packed_t.values()));
        let masked = mask.apply(matrix).unwrap();
        assert_eq!(packed.to_dense(), masked);
        assert_eq!(packed_t.to_dense(), MatrixRef::new(n, n, &masked).unwrap().transposed());
        // The same mask on other data.
        let other: Vec<f32> = w.iter().map(|v| v * 0.5 + 3.25).collect();
        let other = MatrixRef::new(n, n, &other).unwrap();
        assert_eq!(Compressed::from_masked(other, &mask).unwrap().to_dense(), mask.apply(other).unwrap());
        assert!(
            mask.verify(Pattern::TWO_FOUR, Axis::Row).is_ok() && mask.verify(Pattern::TWO_FOUR, Axis::Column).is_ok()
        );
    }
    // A tile of which seven elements are kept: the lone one of its first row and column comes first, a zero second.
    let mut edge = vec![0f32; 32 * 64];
    let tile = [2., -1., -2., -3., -1., 8., -1., 6., -1., -1., 4., 5., -1., 3., 7., -1.];
    for (i, v) in tile.into_iter().enumerate() {
        edge[i / 4 * 64 + i % 4] = v;
    }
    let edge = MatrixRef::new(32, 64, &edge).unwrap();
    let mask = select::transposable(edge, Transposable::GreedySigned).unwrap();
    let transposed = edge.transposed();
    let transposed = MatrixRef::new(64, 32, &transposed).unwrap();
    assert_eq!(Compressed::from_masked(edge, &mask).unwrap().values()[..2], [2.0, 0.0]);
    assert_eq!(Compressed::from_masked(transposed, &mask.transposed()).unwrap().values()[..2], [2.0, 0.0]);
}
