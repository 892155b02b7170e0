// y = x Wᵀ + bias for a few tokens with a dense weight of integers, bound by HBM bandwidth: the weight goes from memory
// straight into the registers of `mma`. From sm_80 on.
//
// A CTA computes 16 rows of W, of which each warp takes every WARPS-th step, DEPTH steps ahead. A step is 64 bytes of a
// row; of these a lane loads 16 contiguous ones, whereas an instruction takes columns from every lane. So columns are
// permuted between W and the instructions, in x alike. Warps synchronize only at the end, to add their sums in their
// order.
//
// Defined outside: ELEMENT (of y), WARPS, DEPTH, and `Form`: the weight's and the input's.

typedef Bits<ELEMENT>::type Raw;

struct Dense {
    const u8* weight;           // [features, row_bytes]
    const void* scales;         // of the weight: f32 [features], or f16 [features, groups]
    const u8* x;                // [tokens, x_row_bytes]
    const float* token_scales;  // [tokens], of integers
    const Raw* bias;            // [features], or null
    Raw* y;                     // [tokens, features]
    u32 features, tokens, row_bytes, x_row_bytes;
};

constexpr u32 THREADS = 32 * WARPS, ROWS = 16, TOKENS = 8, STEP_BYTES = 64;

typedef Form::Sum Sum;
struct __align__(16) FourSums { Sum of[4]; };

// A lane's part of a step, of rows `lane / 4` and `lane / 4 + 8`.
struct Step {
    u32 values[2][4];
    u32 scales[2];
};

template <int TILES> __device__ __forceinline__ void multiply_all(const Dense& p) {
    __shared__ FourSums shared[WARPS][TILES][32];
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, feature = blockIdx.x * ROWS;
    const u32 steps = p.row_bytes / STEP_BYTES;
    const u8* values[2];
    const u16* scales[2];
    #pragma unroll
    for (u32 half = 0; half < 2; half++) {
        // Rows past the end are replaced by the last one: their results are not stored.
        const u32 row = min(feature + 8 * half + lane / 4, p.features - 1);
        values[half] = p.weight + (u64)row * p.row_bytes + lane % 4 * 16;
        scales[half] = (const u16*)p.scales + (u64)row * steps * Form::GROUPS;
    }
    const auto fetch = [&](Step& to, u32 step) {
        const bool there = step < steps;
        #pragma unroll
        for (u32 half = 0; half < 2; half++) {
            load(to.values[half], values[half] + (u64)step * STEP_BYTES, there);
            if constexpr (Form::GROUPS == 2) load(to.scales[half], scales[half] + (u64)step * 2, there);
        }
    };
    // The lane's part of x, of each tile's token `lane / 4`. Tokens past the end are replaced by the last one.
    const u8* x[TILES];
    #pragma unroll
    for (u32 tile = 0; tile < TILES; tile++)
        x[tile] = p.x + (u64)min(tile * TOKENS + lane / 4, p.tokens - 1) * p.x_row_bytes + lane % 4 * Form::X_BYTES;

    Step ahead[DEPTH];
    unrolled<DEPTH>([&](auto d) { fetch(ahead[d.value], warp + d.value * WARPS); });
    Sum sums[TILES][4] = {};
    #pragma unroll 1
    for (u32 first = warp; first < steps; first += DEPTH * WARPS) {
        unrolled<DEPTH>([&](auto d) {
            const u32 step = first + d.value * WARPS;
            if (step < steps) {
                const u8* at[TILES];
                unrolled<TILES>([&](auto tile) { at[tile.value] = x[tile.value] + (u64)step * Form::X_STEP_BYTES; });
                Form::add<TILES>(sums, ahead[d.value].values, ahead[d.value].scales, at);
            }
            fetch(ahead[d.value], step + DEPTH * WARPS);
        });
    }

    unrolled<TILES>([&](auto tile) {
        FourSums four;
        unrolled<4>([&](auto i) { four.of[i.value] = sums[tile.value][i.value]; });
        shared[warp][tile.value][lane] = four;
    });
    __syncthreads();
    for (u32 i = threadIdx.x; i < ROWS * TOKENS * TILES; i += THREADS) {
        const u32 row = i % ROWS, f = feature + row, t = i / ROWS;
        if (f >= p.features || t >= p.tokens) continue;
        // The layout of `mma`'s sums: a lane has rows r and r + 8 of tokens 2 c and 2 c + 1.
        const u32 of_lane = row % 8 * 4 + t % TOKENS / 2, which = row / 8 * 2 + t % 2;
        Sum sum = 0;
        for (u32 w = 0; w < WARPS; w++) sum += shared[w][t / TOKENS][of_lane].of[which];
        const float result = fmaf((float)sum, Form::scale(p, f, t), p.bias ? widen<ELEMENT>(p.bias[f]) : 0.0f);
        p.y[(u64)t * p.features + f] = narrow<ELEMENT>(result);
    }
}

// CTAs resident on an SM, as far as registers limit them. On Blackwell the same code takes more of them.
constexpr u32 FEW = Form::GROUPS ? 2 : 3, MANY = Form::GROUPS || __CUDA_ARCH__ >= 1000 ? 1 : 2;
extern "C" __global__ void __launch_bounds__(THREADS, FEW) dense_1(const __grid_constant__ Dense p) {
    multiply_all<1>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS, 2) dense_2(const __grid_constant__ Dense p) {
    multiply_all<2>(p);
}
extern "C" __global__ void __launch_bounds__(THREADS, MANY) dense_4(const __grid_constant__ Dense p) {
    multiply_all<4>(p);
}
