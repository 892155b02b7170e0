// What products of few tokens share whose warps have a ring of buffers each, which TMA fills on sm_90a. They are bound by reading W.
//
// A block takes 16 * HEIGHT rows of W and all tokens, and each of its warps a part of the columns, step by step. One of a warp's lanes asks for STAGES steps ahead.
// No warp waits for another until the end, when sums are added up, and no block for another at all.
//
// Defined outside: HEIGHT, WARPS, TOKENS, STAGES, BLOCKS (to a multiprocessor), SHARED_BYTES_ASKED, and what sparse_product.cuh wants.

constexpr u32 THREADS = WARPS * 32, ROWS = 16 * HEIGHT, EIGHTS = TOKENS / 8;
// Tiles of X: 128 bytes of all tokens, swizzled.
constexpr u32 ROW = 128, X_TILE_BYTES = TOKENS * ROW;
// In the end sums of all warps lie where the buffers were. Rows, a token each, are longer than they are used, for other banks.
constexpr u32 SUM_ROW = ROWS + 4, WARP_SUMS = TOKENS * SUM_ROW;

typedef Sum Sums[HEIGHT][EIGHTS][4];

// Where a lane finds its row of a product's part of X, for `load_matrices`: eight tokens of a tile whose half is the product's. Pieces of 16 bytes have changed places by
// the row.
__device__ __forceinline__ u32 x_at(u32 tile, u32 eight, u32 half, u32 lane) {
    return tile + (eight * 8 + lane % 8) * ROW + ((half * 4 + lane / 8) ^ lane % 8) * 16;
}

// Adds the products of all of a warp's steps. `Work` knows a step: COPIED_BYTES of a buffer, `ask(to, full, step)` for them, and `add(sums, buffer, lane)`; and its maps by
// number, null beyond the last.
template <class Work> __device__ __forceinline__ void multiply(Sums& sums, const Work& work, u32 shared, u32 steps) {
    constexpr u32 STAGE_BYTES = (Work::COPIED_BYTES + 1023) / 1024 * 1024, AT_BARRIERS = WARPS * STAGES * STAGE_BYTES;
    static_assert(WARPS * WARP_SUMS * 4 <= AT_BARRIERS, "there is room for sums");
    // The host asks for 1024 more, to round up the start.
    static_assert(AT_BARRIERS + WARPS * STAGES * 8 + 1024 == SHARED_BYTES_ASKED, "the host's sum of shared memory");
    const u32 warp = uniform(threadIdx.x / 32), lane = kept(threadIdx.x % 32);
    const u32 begin = steps * warp / WARPS, end = steps * (warp + 1) / WARPS;
    const u32 buffers = shared + warp * STAGES * STAGE_BYTES, barriers = shared + AT_BARRIERS + warp * STAGES * 8;
    // Asked for early, all at once: the first copies need them.
    if (warp == 0 && work.map(lane)) prefetch(work.map(lane));
    const auto ask = [&](u32 stage, u32 step) {
        if (!elected()) return;
        barrier_expect(barriers + 8 * stage, Work::COPIED_BYTES);
        work.ask(buffers + stage * STAGE_BYTES, barriers + 8 * stage, step);
    };
    if (elected()) {
        #pragma unroll
        for (u32 stage = 0; stage < STAGES; stage++) barrier_init(barriers + 8 * stage, 1);
        barriers_are_ready();
    }
    __syncwarp();
    #pragma unroll 1
    for (u32 stage = 0; stage < STAGES && begin + stage < end; stage++) ask(stage, begin + stage);
    u32 stage = 0, parity = 0;
    #pragma unroll 1
    for (u32 step = begin; step < end; step++) {
        barrier_wait(barriers + 8 * stage, parity);
        work.add(sums, buffers + stage * STAGE_BYTES, lane);
        // All lanes have read what is now overwritten.
        __syncwarp();
        if (step + STAGES < end) ask(stage, step + STAGES);
        next_stage<STAGES>(stage, parity);
    }
}

template <int KIND> __device__ __forceinline__ void store_all(const Output& to, u32 output, u32 features, u32 tokens, u32 shared, u32 feature) {
    #pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS / 4 * tokens; i += THREADS) {
        const u32 row = i % (ROWS / 4) * 4, t = i / (ROWS / 4), f = feature + row;
        if (f >= features) continue;
        Sum sums[4] = {};
        #pragma unroll
        for (u32 warp = 0; warp < WARPS; warp++) add_four(sums, shared + (warp * WARP_SUMS + t * SUM_ROW + row) * 4);
        store_neighbours<KIND>(to, output, sums, features, f, t);
    }
}

// Adds up the sums of all warps and stores the results of the rows from `feature` on.
__device__ __forceinline__ void finish(const Output& to, u32 output, u32 features, u32 tokens, const Sums& sums, u32 shared, u32 feature) {
    // As instructions leave them: rows r and r + 8, tokens 2t and 2t + 1 in a lane.
    const u32 lane = threadIdx.x % 32, mine = shared + (threadIdx.x / 32 * WARP_SUMS + lane % 4 * 2 * SUM_ROW + lane / 4) * 4;
    // Nobody reads from the buffers any more.
    __syncthreads();
    #pragma unroll
    for (u32 m = 0; m < HEIGHT; m++) {
        #pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) {
            #pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 at = mine + ((n * 8 + j % 2) * SUM_ROW + m * 16 + j / 2 * 8) * 4;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(bits_of(sums[m][n][j])) : "memory");
            }
        }
    }
    __syncthreads();
    by_kind(to, output, [&](auto kind) { store_all<decltype(kind)::value>(to, output, features, tokens, shared, feature); });
}
