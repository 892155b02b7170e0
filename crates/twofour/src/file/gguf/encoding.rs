//! The encodings of elements: blocks of so many elements in so many bytes, each with its own scales.
//!
//! They are those of ggml (`ggml-quants.c`), little-endian. A block of the older types is 32 elements with one scale
//! `d` (and a minimum `m`); a block of a K type is 256 elements in sub-blocks, whose scales are integers that multiply
//! the scale of the block.

use half::{bf16, f16};

/// How the elements of a tensor are stored.
#[derive(Debug)]
pub(super) struct Encoding {
    /// Its number in the file.
    number: u32,
    /// Its name in llama.cpp.
    pub(super) name: &'static str,
    /// Elements of a block.
    pub(super) elements: usize,
    /// Bytes of a block.
    pub(super) bytes: usize,
    /// Decodes one block.
    pub(super) decode: fn(&[u8], &mut [f32]),
}

/// Those that are read.
static ENCODINGS: [Encoding; 13] = [
    encoding(0, "F32", 1, 4, |block, out| out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
    encoding(1, "F16", 1, 2, |block, out| out[0] = half(block, 0)),
    encoding(30, "BF16", 1, 2, |block, out| out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32()),
    encoding(2, "Q4_0", 32, 18, |block, out| {
        let d = half(block, 0);
        fill(out, |i| d * (nibble(&block[2..], i, 16) as f32 - 8.0));
    }),
    encoding(3, "Q4_1", 32, 20, |block, out| {
        let (d, m) = (half(block, 0), half(block, 2));
        fill(out, |i| d * nibble(&block[4..], i, 16) as f32 + m);
    }),
    encoding(6, "Q5_0", 32, 22, |block, out| {
        let d = half(block, 0);
        fill(out, |i| d * ((nibble(&block[6..], i, 16) | bit(&block[2..], i) << 4) as f32 - 16.0));
    }),
    encoding(7, "Q5_1", 32, 24, |block, out| {
        let (d, m) = (half(block, 0), half(block, 2));
        fill(out, |i| d * (nibble(&block[8..], i, 16) | bit(&block[4..], i) << 4) as f32 + m);
    }),
    encoding(8, "Q8_0", 32, 34, |block, out| {
        let d = half(block, 0);
        fill(out, |i| d * f32::from(block[2 + i] as i8));
    }),
    encoding(10, "Q2_K", 256, 84, |block, out| {
        let (scales, quants) = (&block[..16], &block[16..80]);
        let (d, minimum) = (half(block, 80), half(block, 82));
        fill(out, |i| {
            let scale = scales[i / 16];
            d * f32::from(scale & 15) * f32::from(pair(quants, i)) - minimum * f32::from(scale >> 4)
        });
    }),
    encoding(11, "Q3_K", 256, 110, |block, out| {
        let (high, quants, scales, d) = (&block[..32], &block[32..96], &block[96..108], half(block, 108));
        fill(out, |i| {
            let group = i / 16;
            let low = scales[group % 8] >> (4 * (group / 8)) & 15;
            let scale = low | (scales[8 + group % 4] >> (2 * (group / 4)) & 3) << 4;
            // The offset is there where the bit is not.
            let q = pair(quants, i) as i8 - if high[i % 32] >> (i / 32) & 1 == 0 { 4 } else { 0 };
            d * f32::from(scale as i8 - 32) * f32::from(q)
        });
    }),
    encoding(12, "Q4_K", 256, 144, |block, out| {
        let (d, minimum) = (half(block, 0), half(block, 2));
        let (scales, quants) = (&block[4..16], &block[16..]);
        fill(out, |i| {
            let (scale, least) = scale_and_minimum(scales, i / 32);
            d * scale * nibble(&quants[i / 64 * 32..], i % 64, 32) as f32 - minimum * least
        });
    }),
    encoding(13, "Q5_K", 256, 176, |block, out| {
        let (d, minimum) = (half(block, 0), half(block, 2));
        let (scales, high, quants) = (&block[4..16], &block[16..48], &block[48..]);
        fill(out, |i| {
            let (scale, least) = scale_and_minimum(scales, i / 32);
            let fifth = u32::from(high[i % 32] >> (i / 32) & 1);
            d * scale * (nibble(&quants[i / 64 * 32..], i % 64, 32) | fifth << 4) as f32 - minimum * least
        });
    }),
    encoding(14, "Q6_K", 256, 210, |block, out| {
        let (low, high, scales, d) = (&block[..128], &block[128..192], &block[192..208], half(block, 208));
        fill(out, |i| {
            let upper = u32::from(high[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3);
            let q = nibble(&low[i / 128 * 64..], i % 128, 64) | upper << 4;
            d * f32::from(scales[i / 16] as i8) * (q as f32 - 32.0)
        });
    }),
];

/// The numbers and names of the others, for what is said of them.
const OTHERS: [(u32, &str); 17] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (26, "I32"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

const fn encoding(
    number: u32,
    name: &'static str,
    elements: usize,
    bytes: usize,
    decode: fn(&[u8], &mut [f32]),
) -> Encoding {
    Encoding { number, name, elements, bytes, decode }
}

impl Encoding {
    /// The encoding of that number in a file.
    ///
    /// # Errors
    /// A text that names it and those that are read.
    pub(super) fn numbered(number: u32) -> Result<&'static Self, String> {
        ENCODINGS.iter().find(|encoding| encoding.number == number).ok_or_else(|| {
            let name = OTHERS.iter().find(|(other, _)| *other == number).map_or("unknown", |(_, name)| name);
            let known: Vec<&str> = ENCODINGS.iter().map(|encoding| encoding.name).collect();
            format!("type {number} ({name}) is not supported; supported are {}", known.join(", "))
        })
    }
}

fn fill(out: &mut [f32], value: impl Fn(usize) -> f32) {
    out.iter_mut().enumerate().for_each(|(i, out)| *out = value(i));
}

/// The f16 that begins at that byte.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Four bits of `2 * bytes` elements: the first half of them in the lower bits of the bytes.
fn nibble(quants: &[u8], i: usize, bytes: usize) -> u32 {
    u32::from(quants[i % bytes] >> (4 * (i / bytes)) & 15)
}

/// One bit for each element.
fn bit(bits: &[u8], i: usize) -> u32 {
    u32::from(bits[i / 8] >> (i % 8) & 1)
}

/// Two bits for each of 256 elements: 128 of them in 32 bytes.
fn pair(quants: &[u8], i: usize) -> u8 {
    quants[i / 128 * 32 + i % 32] >> (2 * (i % 128 / 32)) & 3
}

/// Scale and minimum, of six bits each, of one of eight sub-blocks in twelve bytes: those of the first four in the
/// lower bits of bytes 0 to 3 and 4 to 7; of the others four bits in bytes 8 to 11 and two in the upper bits of the
/// first eight.
fn scale_and_minimum(scales: &[u8], block: usize) -> (f32, f32) {
    let (scale, minimum) = match block {
        0..4 => (scales[block] & 63, scales[block + 4] & 63),
        _ => (scales[block + 4] & 15 | scales[block - 4] >> 6 << 4, scales[block + 4] >> 4 | scales[block] >> 6 << 4),
    };
    (f32::from(scale), f32::from(minimum))
}
