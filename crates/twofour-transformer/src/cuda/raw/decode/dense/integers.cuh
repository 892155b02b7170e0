// 8-bit integers times tokens of 8-bit integers with a scale for each token: exact sums. A lane's words 2 i and 2 i + 1
// are its columns of instruction i.

struct Form {
    typedef int Sum;
    static constexpr u32 GROUPS = 0, X_BYTES = 16, X_STEP_BYTES = 64;

    // Adds a step's products; `x` has the lane's address of each tile's step.
    template <int TILES> static __device__ __forceinline__ void add(
        int (&sums)[TILES][4], const u32 (&w)[2][4], const u32 (&)[2], const u8* const (&at)[TILES]) {
        unrolled<TILES>([&](auto tile) {
            const uint4 four = load_x(at[tile.value]);
            product(sums[tile.value], w[0][0], w[1][0], w[0][1], w[1][1], four.x, four.y);
            product(sums[tile.value], w[0][2], w[1][2], w[0][3], w[1][3], four.z, four.w);
        });
    }

    static __device__ __forceinline__ void product(int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }

    // As the epilogue after cuBLASLt's GEMM has it.
    template <class P> static __device__ __forceinline__ float scale(const P& p, u32 feature, u32 token) {
        return ((const float*)p.scales)[feature] * p.token_scales[token];
    }
};
