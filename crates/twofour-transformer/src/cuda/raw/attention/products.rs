//! Generates wrappers of dense `wgmma`, whose inline assembly names every accumulator register and so depends on the
//! tile.

use std::collections::BTreeSet;

use twofour_cuda::{DataType, source::File};

/// Returns a header with three overloads of `product` for each number of columns, over 16 elements. Two are of 64 rows,
/// in shared memory (K-major) or in registers, by columns (K-major), where the last argument tells whether sums are
/// added to. One is of 64 rows in registers by a tile of 16 rows (MN-major), and adds.
pub(super) fn products(element: DataType, columns: &[u32]) -> File {
    let sizes: BTreeSet<u32> = columns.iter().copied().collect();
    let text = sizes.into_iter().map(|columns| all(element, columns)).collect();
    File::generated("products", text)
}

fn all(element: DataType, columns: u32) -> String {
    let registers = columns / 2;
    let list = |of: &dyn Fn(u32) -> String| (0..registers).map(of).collect::<Vec<_>>().join(", ");
    let places = list(&|i| format!("%{i}"));
    let sums = list(&|i| format!("\"+f\"(sums[{}][{}])", i / 4, i % 4));
    let [a, b, adds] = [0, 1, 2].map(|i| registers + i);
    let [a0, a1, a2, a3, held_b, held_adds] = [0, 1, 2, 3, 4, 5].map(|i| registers + i);
    let instruction = format!("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element}");
    let held = "\"r\"(rows[0]), \"r\"(rows[1]), \"r\"(rows[2]), \"r\"(rows[3]), \"l\"(columns)";
    let tiles = columns / 8;
    format!(
        "__device__ __forceinline__ void product(float (&sums)[{tiles}][4], u64 rows, u64 columns, u32 adds) {{
    asm volatile(\"{{.reg .pred p; setp.ne.b32 p, %{adds}, 0;\\n\"
                 \"{instruction} {{{places}}}, %{a}, %{b}, p, 1, 1, 0, 0;}}\\n\"
                 : {sums}
                 : \"l\"(rows), \"l\"(columns), \"r\"(adds));
}}
__device__ __forceinline__ void product(float (&sums)[{tiles}][4], const u32 (&rows)[4], u64 columns, u32 adds) {{
    asm volatile(\"{{.reg .pred p; setp.ne.b32 p, %{held_adds}, 0;\\n\"
                 \"{instruction} {{{places}}}, {{%{a0}, %{a1}, %{a2}, %{a3}}}, %{held_b}, p, 1, 1, 0;}}\\n\"
                 : {sums}
                 : {held}, \"r\"(adds));
}}
__device__ __forceinline__ void product(float (&sums)[{tiles}][4], const u32 (&rows)[4], u64 columns) {{
    asm volatile(\"{{.reg .pred p; setp.ne.b32 p, 1, 0;\\n\"
                 \"{instruction} {{{places}}}, {{%{a0}, %{a1}, %{a2}, %{a3}}}, %{held_b}, p, 1, 1, 1;}}\\n\"
                 : {sums}
                 : {held});
}}
"
    )
}
