// A weight [rows, cols] of f32 under a mask, rounded to ELEMENT: +0 in place of what the mask prunes, as in crate
// twofour-nn's cpu/masking.rs.
//
// Defined outside: ELEMENT.

struct Masking {
    const float* weight;
    const u32* mask; // [rows, words_of_row]: bit b of word j stands for column 32 j + b, 1 where the element is kept
    void* masked;    // may be the weight itself
    u64 groups;      // of four columns, of all rows
    u32 cols, groups_of_row, words_of_row;
};

// A thread masks four elements of a row, which it reads before it writes them.
extern "C" __global__ void __launch_bounds__(256) mask(const __grid_constant__ Masking p) {
    const u64 group = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (group >= p.groups) return;
    const u64 row = group / p.groups_of_row;
    const u32 col = 4 * (u32)(group - row * p.groups_of_row);
    const u64 at = row * p.cols + col;
    const u32 kept = p.mask[row * p.words_of_row + col / 32] >> (col % 32);
    float w[4];
    unrolled<4>([&](auto i) {
        const bool is_kept = col + i.value < p.cols && ((kept >> i.value) & 1);
        w[i.value] = is_kept ? p.weight[at + i.value] : 0.0f;
    });
    unrolled<4>([&](auto i) {
        if (col + i.value < p.cols) ((Raw*)p.masked)[at + i.value] = narrow<ELEMENT>(w[i.value]);
    });
}
