// Pruning to N:4: a weight [rows, cols] of f32, rounded to ELEMENT, with zeros in place of all but the largest
// magnitudes of every group of four in a row, as in crate twofour-nn's cpu/keep_of_four.rs.
//
// Defined outside: ELEMENT.

struct KeepOfFour {
    const float* weight;
    void* kept;
    u64 groups; // of all rows
    u32 cols, groups_of_row;
    u32 count;  // elements that a group keeps
};

// A thread prunes a group. Of equal magnitudes the lower index is kept; as bits, a NaN is above infinity.
extern "C" __global__ void __launch_bounds__(256) keep(const __grid_constant__ KeepOfFour p) {
    const u64 group = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (group >= p.groups) return;
    const u64 row = group / p.groups_of_row;
    const u32 col = 4 * (u32)(group - row * p.groups_of_row);
    const u64 at = row * p.cols + col;
    float w[4];
    u32 magnitude[4];
    unrolled<4>([&](auto i) {
        w[i.value] = col + i.value < p.cols ? p.weight[at + i.value] : 0.0f;
        magnitude[i.value] = __float_as_uint(w[i.value]) & 0x7FFFFFFFu;
    });
    unrolled<4>([&](auto i) {
        if (col + i.value >= p.cols) return;
        u32 rank = 0;
        unrolled<4>([&](auto j) {
            const bool is_larger = magnitude[j.value] > magnitude[i.value];
            rank += is_larger || (magnitude[j.value] == magnitude[i.value] && j.value < i.value);
        });
        ((Raw*)p.kept)[at + i.value] = narrow<ELEMENT>(rank < p.count ? w[i.value] : 0.0f);
    });
}
