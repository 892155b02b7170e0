// Products with a weight in square blocks, of which only those with a nonzero are stored.
//
// Defined outside: ELEMENT, f16 or bf16; UNIT, the columns of a block that are read at a time: 16, 32 or 64.

struct BlockProduct {
    const long long* crow; // [rows / block, rounded up, + 1], where each row of blocks begins
    const long long* col;  // [blocks], the column of each block, in blocks
    const u16* values;     // [blocks, block, block]
    const u16* x;          // [tokens, cols]
    u16* y;                // [tokens, rows]
    u32 blocks;
    u32 block;             // rows and columns of a block, a multiple of UNIT
    u32 rows;
    u32 cols;              // a multiple of 8
    u32 tokens;
};

constexpr int STAGES = 3;
constexpr int CHUNKS = UNIT / 8; // 16-byte chunks of a row of a tile

extern __shared__ __align__(128) unsigned char memory[];

// Returns where a chunk of a tile's row lies, in bytes: chunks of 128 bytes of rows are permuted, so that the eight
// rows which a matrix is loaded from lie in all banks.
__device__ __forceinline__ u32 place(u32 row, u32 chunk) {
    constexpr u32 SHARING = 8 / CHUNKS; // rows of 128 bytes
    return (row * CHUNKS + (chunk ^ (row / SHARING % CHUNKS))) * 16;
}

// A CTA multiplies TOKENS tokens with FEATURES rows of a row of blocks. Of its 4 warps WARPS_T share the tokens and
// WARPS_F the rows; the others take units of columns in turn, and their sums are added at the end.
template <int TOKENS, int FEATURES, int WARPS_T, int WARPS_F> __device__ __forceinline__ void product(
    const BlockProduct& p) {
    constexpr int WARPS_K = 4 / (WARPS_T * WARPS_F);
    constexpr int T = TOKENS / WARPS_T / 16, F = FEATURES / WARPS_F / 8; // a warp's tiles of 16 tokens and of 8 rows
    constexpr u32 WEIGHT_BYTES = FEATURES * UNIT * 2, PART_BYTES = WEIGHT_BYTES + TOKENS * UNIT * 2;
    const u32 thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const u32 wk = warp % WARPS_K, wf = warp / WARPS_K % WARPS_F, wt = warp / WARPS_K / WARPS_F;
    const u32 feature = blockIdx.x * FEATURES, token = blockIdx.y * TOKENS;
    const u32 block_row = feature / p.block, row = feature % p.block, units = p.block / UNIT;
    // Indices out of range read no memory that is not the weight's.
    const long long begin = min(max(p.crow[block_row], 0ll), (long long)p.blocks);
    const long long end = min(max(p.crow[block_row + 1], begin), (long long)p.blocks);
    const u32 all = (u32)(end - begin) * units, steps = (all + WARPS_K - 1) / WARPS_K;
    const u32 base = shared_address(memory);

    // A thread copies the same 16-byte chunk of several rows of a tile.
    constexpr u32 ROWS = 128 / CHUNKS; // rows that the CTA copies at a time
    const u32 own_row = thread / CHUNKS, own_chunk = thread % CHUNKS;
    const u16* const x_rows = p.x + (u64)(token + own_row) * p.cols + 8 * own_chunk;
    const u16* const weight_rows = p.values + (u64)(row + own_row) * p.block + 8 * own_chunk;
    const u64 x_stride = (u64)ROWS * p.cols, weight_stride = (u64)ROWS * p.block;

    // The columns that a step reads, or -1: loaded a step before they are needed.
    long long columns[WARPS_K];
    auto look_up = [&](u32 step) {
        unrolled<WARPS_K>([&](auto part) {
            const u32 number = step * WARPS_K + part.value;
            columns[part.value] = number < all ? p.col[begin + number / units] * p.block + number % units * UNIT : -1;
        });
    };
    auto load = [&](u32 step) {
        const u32 stage = base + step % STAGES * (WARPS_K * PART_BYTES);
        unrolled<WARPS_K>([&](auto part) {
            const u32 number = step * WARPS_K + part.value, to = stage + part.value * PART_BYTES;
            const bool is_there = number < all;
            const long long column = columns[part.value];
            const bool reads = column >= 0 && column + 8 * own_chunk < p.cols;
            const u16* weights = p.values;
            if (is_there)
                weights = weight_rows + (u64)(begin + number / units) * p.block * p.block + number % units * UNIT;
            const u16* x = reads ? x_rows + column : p.x;
            unrolled<(FEATURES + ROWS - 1) / ROWS>([&](auto i) {
                const u32 of = own_row + ROWS * i.value;
                if (FEATURES % ROWS != 0 && of >= FEATURES) return;
                copy_16(to + place(of, own_chunk), is_there ? weights + i.value * weight_stride : p.values, is_there);
            });
            unrolled<(TOKENS + ROWS - 1) / ROWS>([&](auto i) {
                const u32 of = own_row + ROWS * i.value;
                if (TOKENS % ROWS != 0 && of >= TOKENS) return;
                const bool is_read = reads && token + of < p.tokens;
                copy_16(to + WEIGHT_BYTES + place(of, own_chunk), is_read ? x + i.value * x_stride : p.x, is_read);
            });
        });
    };

    float sums[T][F][4] = {};
    for (u32 step = 0; step < STAGES - 1; step++) {
        look_up(step);
        if (step < steps) load(step);
        commit_copies();
    }
    look_up(STAGES - 1);
    for (u32 step = 0; step < steps; step++) {
        await_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) load(step + STAGES - 1);
        commit_copies();
        look_up(step + STAGES);
        const u32 weight = base + step % STAGES * (WARPS_K * PART_BYTES) + wk * PART_BYTES;
        const u32 x = weight + WEIGHT_BYTES;
        unrolled<UNIT / 16>([&](auto k) {
            u32 a[T][4], b[F / 2][4];
            unrolled<T>([&](auto t) {
                const u32 of = wt * (16 * T) + 16 * t.value + lane % 16;
                load_matrices(a[t.value], x + place(of, 2 * k.value + lane / 16));
            });
            unrolled<F / 2>([&](auto f) {
                const u32 of = wf * (8 * F) + 16 * f.value + lane / 16 * 8 + lane % 8;
                load_matrices(b[f.value], weight + place(of, 2 * k.value + lane / 8 % 2));
            });
            unrolled<T>([&](auto t) {
                unrolled<F>([&](auto f) {
                    constexpr int I = decltype(f)::value;
                    multiply<ELEMENT>(sums[t.value][I], a[t.value], b[I / 2][I % 2 * 2], b[I / 2][I % 2 * 2 + 1]);
                });
            });
        });
    }

    if constexpr (WARPS_K > 1) {
        float* parts = (float*)memory;
        constexpr int EACH = T * F * 4;
        await_copies<0>();
        __syncthreads();
        if (wk > 0) {
            float* to = parts + (((wk - 1) * (4 / WARPS_K) + warp / WARPS_K) * EACH) * 32 + lane;
            unrolled<EACH>([&](auto i) { to[32 * i.value] = sums[i.value / 4 / F][i.value / 4 % F][i.value % 4]; });
        }
        __syncthreads();
        if (wk > 0) return;
        for (u32 k = 0; k < WARPS_K - 1; k++) {
            const float* from = parts + ((k * (4 / WARPS_K) + warp / WARPS_K) * EACH) * 32 + lane;
            unrolled<EACH>([&](auto i) { sums[i.value / 4 / F][i.value / 4 % F][i.value % 4] += from[32 * i.value]; });
        }
    }
    unrolled<T>([&](auto t) {
        unrolled<F>([&](auto f) {
            unrolled<2>([&](auto half) {
                const u32 to = token + wt * (16 * T) + 16 * t.value + 8 * half.value + lane / 4;
                const u32 of = feature + wf * (8 * F) + 8 * f.value + lane % 4 * 2;
                if (to >= p.tokens || of >= p.rows) return;
                const float* pair = &sums[t.value][f.value][2 * half.value];
                u16* y = p.y + (u64)to * p.rows + of;
                if (p.rows % 2 == 0) *(u32*)y = narrow_pair<ELEMENT>(pair[0], pair[1]);
                else {
                    y[0] = narrow<ELEMENT>(pair[0]);
                    if (of + 1 < p.rows) y[1] = narrow<ELEMENT>(pair[1]);
                }
            });
        });
    });
}

// Few tokens: the warps of a CTA share the columns.
extern "C" __global__ void __launch_bounds__(128) few(const __grid_constant__ BlockProduct p) {
    product<16, 16, 1, 1>(p);
}

constexpr int WARPS_FOR_FEATURES = UNIT == 64 ? 2 : 1;

extern "C" __global__ void __launch_bounds__(128) some(const __grid_constant__ BlockProduct p) {
    product<64, UNIT, 4 / WARPS_FOR_FEATURES, WARPS_FOR_FEATURES>(p);
}

extern "C" __global__ void __launch_bounds__(128) many(const __grid_constant__ BlockProduct p) {
    product<128, UNIT, 4 / WARPS_FOR_FEATURES, WARPS_FOR_FEATURES>(p);
}
