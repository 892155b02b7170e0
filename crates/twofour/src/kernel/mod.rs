//! Multiplying with a 2:4 weight on a CPU: `y = act(x · Wᵀ + bias)` and `dx = dy · W`.
//!
//! A [`Compressed`](crate::Compressed) weight becomes a [`SparseWeight`], in strips of sixteen rows, for one
//! [`Engine`]; a dense one becomes a [`DenseWeight`], or is multiplied where it lies as a [`DenseRef`], whose loops are
//! written with the same care, so that comparing the two is fair. Activations are `[tokens, features]`, row-major.
//! [`Engine::best`] picks the instructions once; `TWOFOUR_ENGINE` forces one.
//!
//! # The layout
//!
//! A *strip* is sixteen rows of the weight: one for each lane. It is one stream of memory, a sequence of *blocks* of 32
//! columns. A block is a cache line of positions, and then its *lines*. A line holds what all sixteen rows keep of one
//! group of four columns (int8: of two groups).
//!
//! ```text
//! weight, 2:4                     strip 0: one stream
//! rows   columns                  ┌───────────┬────────┬────────┬─   ─┬────────┬───────────┬─
//!        0..3 4..7     28..31     │ positions │ line 0 │ line 1 │  …  │ line 7 │ positions │ …
//!      ┌────┬────┬─  ─┬────┬──    │  64 bytes │ 0..3   │ 4..7   │     │ 28..31 │           │
//!    0 │a·b·│    │    │    │      └───────────┴────────┴────────┴─   ─┴────────┴───────────┴─
//!    1 │·c·d│    │ …  │    │ …     └───────────── block 0 ───────────────────┘ └─ block 1 ─
//!    ⋮ │    │    │    │    │
//!   15 │·yz·│    │    │    │      line 0 (f32): a c … y   first values, a lane for each row
//!      ├────┼────┼─  ─┼────┼──                  b d … z   second values
//!   16 │    │ strip 1 │    │      its positions: 0 1 … 1   two bits for each row: a word
//!    ⋮                                          2 3 … 2   and a word for the second values
//! ```
//!
//! | format | a line | its values | its positions |
//! |---|---|---|---|
//! | f32, f16 | 1 group | the sixteen first values, then the sixteen second | a word for the first, one for the second; row `r` at bit `2r` |
//! | bf16 | 1 group | (first, second) of row 0, of row 1, … | as above |
//! | int8 | 2 groups | (first, second, first, second) of row 0, of row 1, … | four words: see `format/int8.rs` |
//! | int4 | 8 groups | as int8, two lines in a cache line, in the halves of its bytes | sixteen words, as int8 |
//!
//! A group of int4 columns with one scale has a header before its blocks: a cache line of scales, and of the rows'
//! sums.
//!
//! # How a product passes over it
//!
//! *Few tokens* (`few/`): memory is what limits, so each strip is read once and meets all tokens.
//!
//! ```text
//! for each strip (2 or 4 side by side, on several threads):
//!     sums[token][row] = 0                              one lane a row, in registers
//!     for each line:
//!         w1, w2 = the line's first and second values   widened to f32
//!         p1, p2 = the line's positions                 a shift by lane
//!         for each token:
//!             x = the group's four activations, in every 128 bits
//!             sums[token] += pick(x, p1) · w1           one shuffle, one multiplication
//!             sums[token] += pick(x, p2) · w2
//!     store sums                                        no addition across lanes
//! ```
//!
//! *Many tokens* (`many/`): arithmetic is what limits, so tokens are the lanes and the strip's values are listed. Each
//! kept value is broadcast and multiplied with the activations of many tokens at its column; what is pruned is never
//! touched. `dy · W` lists columns instead of rows. With *tiles* (`tile/`), strips are expanded to dense tiles, once
//! for all tokens.
//!
//! # A place for each addition
//!
//! | what | where |
//! |---|---|
//! | an instruction set | a file `vector/NAME.rs` with an `impl Vector`, and its `mod` line and row in the table of `vector/mod.rs` |
//! | one with tiles | also a file `tile/NAME.rs` with an `impl Tile` |
//! | a weight format | a file `format/NAME.rs` with an `impl Format` |
//!
//! Loops are generic over both, and are written once. The scalar engine is an instruction set of one lane. Work is
//! split among threads by [`share`].

mod aligned;
mod arguments;
mod block_sparse;
mod dense;
mod engine;
mod epilogue;
mod few;
mod format;
mod many;
mod packed;
mod quantize;
mod remask;
mod scratch;
mod share;
mod stores;
mod strips;
#[cfg(test)]
mod tests;
mod tile;
mod transposed_product;
mod vector;

pub(crate) use aligned::Aligned;
pub use block_sparse::{BlockSparse, BlockSparseRef, BlockSparseWeight};
pub use dense::{Dense, DenseRef, DenseWeight};
pub use engine::ENGINE_VARIABLE;
pub use epilogue::{Activation, Epilogue};
pub use format::{
    Format, KernelElement,
    int4::{SparseWeightInt4, SparseWeightInt4Ref, pack_int4, packed_bytes_int4},
    int8::{DenseWeightI8, SparseWeightI8, SparseWeightI8Ref, pack_i8},
};
pub use packed::{PACKED_ALIGNMENT, Packed, SparseWeight, SparseWeightMut, SparseWeightRef, packed_bytes};
pub use quantize::quantize;
pub(crate) use remask::Selection;
pub use share::{Executor, share, with_executor, with_threads};
pub(crate) use share::{MIN_PART, share_elements};
pub(crate) use transposed_product::transposed_product;
pub use vector::Engine;
