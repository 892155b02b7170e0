//! The tile instructions. Stable Rust has no intrinsics for them, so they are written as assembly.

use std::arch::asm;

use half::bf16;

use super::{super::engine::HasAmx, expand::Expand};

/// An element that tiles multiply.
pub(in super::super) trait TileElement: Expand {
    /// What its products add up to.
    type Sum: bytemuck::Pod + Send + Sync;

    /// Adds to four tiles of sums the products of two left and two right tiles, for each step of the depth:
    /// `sums[left][right]`.
    ///
    /// # Safety
    /// The CPU has AMX and the tiles are configured; `left` and `right` are valid for `depth` tiles, `sums` for one each.
    unsafe fn multiply(left: [*const u8; 2], right: [*const u8; 2], depth: usize, sums: [[*mut Self::Sum; 2]; 2]);

    /// Whether a product with it may be other than zero where the other factor is zero.
    fn is_special(self) -> bool;
}

macro_rules! tile_element {
    ($type:ty, $sum:ty, $instruction:literal, $special:expr) => {
        impl TileElement for $type {
            type Sum = $sum;

            #[inline(always)]
            unsafe fn multiply(
                left: [*const u8; 2],
                right: [*const u8; 2],
                depth: usize,
                sums: [[*mut $sum; 2]; 2],
            ) {
                if depth == 0 {
                    return;
                }
                // SAFETY: the CPU has AMX and `left`, `right` and `sums` are valid for what is read and written, as the trait requires. All registers that change are named.
                unsafe {
                    asm!(
                        "tileloadd tmm0, [{c00} + {line}*1]",
                        "tileloadd tmm1, [{c01} + {line}*1]",
                        "tileloadd tmm2, [{c10} + {line}*1]",
                        "tileloadd tmm3, [{c11} + {line}*1]",
                        "2:",
                        "tileloadd tmm4, [{l0} + {line}*1]",
                        "tileloadd tmm6, [{r0} + {line}*1]",
                        concat!($instruction, " tmm0, tmm4, tmm6"),
                        "tileloadd tmm7, [{r1} + {line}*1]",
                        concat!($instruction, " tmm1, tmm4, tmm7"),
                        "tileloadd tmm5, [{l1} + {line}*1]",
                        concat!($instruction, " tmm2, tmm5, tmm6"),
                        concat!($instruction, " tmm3, tmm5, tmm7"),
                        "add {l0}, 1024",
                        "add {l1}, 1024",
                        "add {r0}, 1024",
                        "add {r1}, 1024",
                        "dec {depth}",
                        "jnz 2b",
                        "tilestored [{c00} + {line}*1], tmm0",
                        "tilestored [{c01} + {line}*1], tmm1",
                        "tilestored [{c10} + {line}*1], tmm2",
                        "tilestored [{c11} + {line}*1], tmm3",
                        c00 = in(reg) sums[0][0],
                        c01 = in(reg) sums[0][1],
                        c10 = in(reg) sums[1][0],
                        c11 = in(reg) sums[1][1],
                        l0 = inout(reg) left[0] => _,
                        l1 = inout(reg) left[1] => _,
                        r0 = inout(reg) right[0] => _,
                        r1 = inout(reg) right[1] => _,
                        depth = inout(reg) depth => _,
                        line = in(reg) super::LINE,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            }

            #[inline(always)]
            fn is_special(self) -> bool {
                $special(self)
            }
        }
    };
}

tile_element!(bf16, f32, "tdpbf16ps", |v: bf16| !v.is_finite());
tile_element!(i8, i32, "tdpbssd", |_| false);

/// Palette 1, eight tiles of 16 rows of 64 bytes.
static CONFIGURATION: Configuration = {
    let mut bytes = [0; 64];
    bytes[0] = 1;
    let mut tile = 0;
    while tile < 8 {
        bytes[16 + 2 * tile] = 64;
        bytes[48 + tile] = 16;
        tile += 1;
    }
    Configuration(bytes)
};

#[repr(align(64))]
struct Configuration([u8; 64]);

/// Makes this thread's tiles ready.
pub(super) fn configure(_: HasAmx) {
    // SAFETY: a `HasAmx` exists only where detection found the instructions; the configuration is 64 bytes and valid. It also clears the tiles.
    unsafe {
        asm!(
            "ldtilecfg [{}]",
            in(reg) CONFIGURATION.0.as_ptr(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, readonly),
        )
    }
}

/// Frees this thread's tiles, so that the operating system need not save them.
pub(super) fn release(_: HasAmx) {
    // SAFETY: a `HasAmx` exists only where detection found the instructions. All tiles are cleared.
    unsafe {
        asm!(
            "tilerelease",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, nomem),
        )
    }
}
