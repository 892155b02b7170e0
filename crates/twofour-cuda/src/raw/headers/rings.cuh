// Shared parts of GEMM kernels for small batches on sm_90a, whose warps have a circular buffer of stages each, filled by TMA. They are bound by HBM bandwidth.
//
// A CTA computes 16 * HEIGHT rows of W by all tokens, and each of its warps accumulates a part of the columns, step by step. One lane of a warp
// issues its copies, with a prefetch distance of STAGES steps. Warps synchronize only at the end, to add their partial sums, and CTAs do not
// synchronize at all.
//
// Defined outside: HEIGHT, WARPS, TOKENS, STAGES, BLOCKS (CTAs resident on an SM), SHARED_BYTES_ASKED, and what sparse_product.cuh requires.

constexpr u32 THREADS = WARPS * 32, ROWS = 16 * HEIGHT, EIGHTS = TOKENS / 8;
// Tiles of X: 128 bytes of all tokens, swizzled.
constexpr u32 ROW = 128, X_TILE_BYTES = TOKENS * ROW;
// After the main loop the accumulators of all warps use the stages' memory. A row is a token; rows are padded against bank conflicts.
constexpr u32 SUM_ROW = ROWS + 4, WARP_SUMS = TOKENS * SUM_ROW;

typedef Sum Sums[HEIGHT][EIGHTS][4];

// Returns the address of a lane's row for `load_matrices`: eight tokens of a tile of X, in the half of the row that the instruction reads. Pieces of
// 16 bytes are swizzled by the row.
__device__ __forceinline__ u32 x_at(u32 tile, u32 eight, u32 half, u32 lane) {
    return tile + (eight * 8 + lane % 8) * ROW + ((half * 4 + lane / 8) ^ lane % 8) * 16;
}

// Multiplies all steps of a warp. `Work` has the bytes of a stage (COPIED_BYTES), `ask(to, full, step)` that issues their copies, `add(sums, buffer,
// lane)` that multiplies a step, and `map(i)`, its tensor maps, null beyond the last.
template <class Work> __device__ __forceinline__ void multiply(Sums& sums, const Work& work, u32 shared, u32 steps) {
    constexpr u32 STAGE_BYTES = (Work::COPIED_BYTES + 1023) / 1024 * 1024, AT_BARRIERS = WARPS * STAGES * STAGE_BYTES;
    static_assert(WARPS * WARP_SUMS * 4 <= AT_BARRIERS, "there is room for sums");
    // The host adds 1024 bytes to align the start.
    static_assert(AT_BARRIERS + WARPS * STAGES * 8 + 1024 == SHARED_BYTES_ASKED, "the host's sum of shared memory");
    const u32 warp = uniform(threadIdx.x / 32), lane = kept(threadIdx.x % 32);
    const u32 begin = steps * warp / WARPS, end = steps * (warp + 1) / WARPS;
    const u32 buffers = shared + warp * STAGES * STAGE_BYTES, barriers = shared + AT_BARRIERS + warp * STAGES * 8;
    // Prefetches all tensor maps at once, because the first copies need them.
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
        // All lanes have read the stage before it is overwritten.
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

// Adds the partial sums of all warps and stores the results of the rows from `feature` on.
__device__ __forceinline__ void finish(const Output& to, u32 output, u32 features, u32 tokens, const Sums& sums, u32 shared, u32 feature) {
    // The accumulator layout of `mma`: a lane holds rows r and r + 8, tokens 2t and 2t + 1.
    const u32 lane = threadIdx.x % 32, mine = shared + (threadIdx.x / 32 * WARP_SUMS + lane % 4 * 2 * SUM_ROW + lane / 4) * 4;
    // No warp reads from the stages any more.
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
