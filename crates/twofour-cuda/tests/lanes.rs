//! Where a thread of the Hopper kernels looks for its metadata, against the orders that weights are compressed to:
//! without a GPU.
//!
//! The formulas are those of `gemm_sm90.cu`, `stream_sm90.cu` and `direct.cu`; which rows and columns a lane of
//! `wgmma.sp` holds codes of is the instruction's.

use half::bf16;
use twofour::{Compressed, Element, F8E4M3, layout::sm90};

/// A weight of one atom's shape whose groups all keep their first two elements, but for one, which keeps its last two.
fn weight<T: Element>(cols: usize, one: T, odd: Option<(usize, usize)>) -> Compressed<T> {
    let mut meta = vec![0x4444_4444u32; 64 * cols / 32];
    if let Some((row, group)) = odd {
        meta[row * cols / 32 + group / 8] ^= 0xA << (4 * (group % 8));
    }
    Compressed::from_parts(64, cols, vec![one; 64 * cols / 2], meta).unwrap()
}

/// The words of an atom of 16-bit elements.
fn words_of_16(odd: Option<(usize, usize)>) -> Vec<u32> {
    let halves = sm90::encode_16(&weight(64, bf16::ONE, odd), sm90::TileK::K64).unwrap();
    halves.chunks(2).map(|pair| u32::from(pair[0]) | u32::from(pair[1]) << 16).collect()
}

/// The word that differs, and the nibble in it.
fn difference(a: &[u32], b: &[u32]) -> (usize, usize) {
    let differing: Vec<usize> = (0..a.len()).filter(|i| a[*i] != b[*i]).collect();
    let [word] = differing.as_slice() else { panic!("one word should differ: {differing:?}") };
    let nibbles: Vec<usize> = (0..8).filter(|n| (a[*word] ^ b[*word]) >> (4 * n) & 15 != 0).collect();
    let [nibble] = nibbles.as_slice() else { panic!("one nibble should differ: {nibbles:?}") };
    (*word, *nibble)
}

#[test]
fn sixteen_bit_elements() {
    let even = words_of_16(None);
    for row in 0..64 {
        for group in 0..16 {
            let k = 4 * group;
            // Of a product's 32 columns, a lane holds 16 of the rows r and r + 8; the selector tells the product.
            let (warp, high, product) = (row / 16, row % 16 / 8, k / 32);
            let lane = row % 8 * 4 + product * 2 + k % 32 / 16;
            let word = 2 * (warp * 16 + lane % 2 * 8 + lane / 4) + lane / 2 % 2;
            assert_eq!(
                difference(&even, &words_of_16(Some((row, group)))),
                (word, 4 * high + k % 16 / 4),
                "{row}, {group}"
            );
        }
    }
}

#[test]
fn eight_bit_elements() {
    let words = |odd| sm90::encode_8(&weight(128, F8E4M3(0x38), odd), sm90::TileK::K128).unwrap();
    let even = words(None);
    for row in 0..64 {
        for group in 0..32 {
            let k = 4 * group;
            // Of a product's 64 columns, a lane holds 32 of one row.
            let (warp, product) = (row / 16, k / 64);
            let lane = row % 8 * 4 + k % 64 / 32 * 2 + row % 16 / 8;
            let word = 4 * (warp * 16 + lane / 4 + lane % 2 * 8) + lane / 2 % 2 + 2 * product;
            assert_eq!(difference(&even, &words(Some((row, group)))), (word, k % 32 / 4), "{row}, {group}");
        }
    }
}

/// `direct.cu` gives groups other places in a step's two products than in W: each lane reads 16 contiguous bytes of a
/// row. Where its values, codes and activations come from, lane by lane, against what the instruction multiplies.
#[test]
fn groups_that_change_places() {
    // What a lane makes of the words of its row and that row and 8: see `product_codes`.
    let codes = |words: &[u32], warp: usize, lane: usize| -> u32 {
        (0..4).fold(0, |codes, j| {
            let word = words[2 * (warp * 16 + j % 2 * 8 + lane / 4) + j / 2];
            codes | word.rotate_right((4 * (lane as i32 % 4 - j as i32)).rem_euclid(32) as u32) & 0x000F_000F << (4 * j)
        })
    };
    let even = words_of_16(None);
    let mut places = std::collections::HashSet::new();
    for group in 0..16 {
        // The lane of four that reads the group's values, the product it passes them to, and as which of its eight
        // groups: lane t's registers 0 and 1 are the product's group t, 2 and 3 its group t + 4.
        let (t, which, second) = (group / 4, group % 4 / 2, group % 2);
        let of_product = 4 * second + t;
        assert!(places.insert((which, of_product)), "{group}: the place is taken");
        // X: lane t of four holds columns 8 i + 2 t and the next of the product in register i, which are half of a
        // group.
        for column in [0, 2] {
            let (i, t) = ((4 * of_product + column) / 8, (4 * of_product + column) % 8 / 2);
            let byte = t / 2 * 32 + t % 2 * 4 + which * 16 + i % 2 * 64 + i / 2 * 8;
            assert_eq!(byte, (4 * group + column) * 2, "X of group {group}");
        }
        // Codes: of a product's groups 0 to 3 (4 to 7), lane 2 `which` (and 1) of four holds those of rows r and r + 8.
        for row in 0..64 {
            let lane = row % 8 * 4 + which * 2 + of_product / 4;
            let change = codes(&even, row / 16, lane) ^ codes(&words_of_16(Some((row, group))), row / 16, lane);
            assert_eq!(change, 0xA << (4 * (row % 16 / 8 * 4 + of_product % 4)), "codes of row {row}, group {group}");
        }
    }
}
