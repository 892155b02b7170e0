//! Generates wrappers of `wgmma.sp`, whose inline assembly names every accumulator register and so depends on the tile.

use super::XOrder;
use crate::{DataType, source::File};

/// Where `wgmma.sp` reads compressed weights from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Weights {
    /// Shared memory, by a matrix descriptor (`u64`).
    Shared,
    /// Four registers, `u32[4]`.
    Registers,
}

/// Returns a header with the type `Sum` of an accumulator and two functions. Each multiplies 64 rows of compressed
/// weights by `tokens` rows of X, for the `k` extent of one instruction. `first_product<SELECTOR>(sums, w, x, codes)`
/// overwrites the accumulators, and `product` adds to them.
/// `elements` are the data types of W and of X.
pub(super) fn products(elements: (DataType, DataType), tokens: u32, x: XOrder, weights: Weights) -> File {
    let sum = if elements.0 == DataType::I8 { "int" } else { "float" };
    let [first, product] = [true, false].map(|first| product(elements, tokens, x, weights, first));
    File::generated("products", format!("typedef {sum} Sum;\n{first}{product}"))
}

fn product(
    (element, x_element): (DataType, DataType),
    tokens: u32,
    x: XOrder,
    weights: Weights,
    first: bool,
) -> String {
    let registers = tokens / 2;
    let constraint = if element == DataType::I8 { "r" } else { "f" };
    // The last immediate is X's transpose bit (1: MN-major). The one before it is W's, which exists only for W in
    // shared memory.
    let flags_of_16_bit = match (weights, x) {
        (Weights::Shared, XOrder::TokensFirst) => ", 1, 1, 0, 0",
        (Weights::Shared, XOrder::ReductionFirst) => ", 1, 1, 0, 1",
        (Weights::Registers, XOrder::TokensFirst) => ", 1, 1, 0",
        (Weights::Registers, XOrder::ReductionFirst) => ", 1, 1, 1",
    };
    let (depth, types, tail) = match element {
        DataType::F16 | DataType::BF16 => (32, format!("f32.{element}.{x_element}"), flags_of_16_bit),
        DataType::E4M3 | DataType::E5M2 => (64, format!("f32.{element}.{x_element}"), ", 1, 1"),
        _ => (64, "s32.s8.s8".to_string(), ""),
    };
    // Write-only operands: the compiler may use the accumulators' registers for other values before `first_product`.
    let (name, access) = if first { ("first_product", '=') } else { ("product", '+') };
    let list = |of: &dyn Fn(u32) -> String| (0..registers).map(of).collect::<Vec<_>>().join(", ");
    let places = list(&|i| format!("%{i}"));
    let outputs = list(&|i| format!("\"{access}{constraint}\"(sums[{i}])"));
    let accumulate = u32::from(!first);
    let after = |i: usize| registers as usize + i;
    let (parameter, w, inputs, next) = match weights {
        Weights::Shared => ("u64 w", format!("%{}", after(0)), "\"l\"(w)".to_string(), after(1)),
        Weights::Registers => {
            let names = [0, 1, 2, 3].map(|i| format!("%{}", after(i))).join(", ");
            let inputs = [0, 1, 2, 3].map(|i| format!("\"r\"(w[{i}])")).join(", ");
            ("const u32 (&w)[4]", format!("{{{names}}}"), inputs, after(4))
        }
    };
    let [x, codes, selector]: [usize; 3] = std::array::from_fn(|i| next + i);
    format!(
        "template <int SELECTOR> __device__ __forceinline__ void {name}(Sum (&sums)[{registers}], {parameter}, u64 x, \
         u32 codes) {{
    asm volatile(\"{{.reg .pred p; setp.ne.b32 p, {accumulate}, 0;\\n\"
                 \"wgmma.mma_async.sp.sync.aligned.m64n{tokens}k{depth}.{types} {{{places}}}, {w}, %{x}, %{codes}, \
                 %{selector}, p{tail};}}\\n\"
                 : {outputs}
                 : {inputs}, \"l\"(x), \"r\"(codes), \"n\"(SELECTOR));
}}
"
    )
}
