// Shared parts of GEMM kernels for small batches on sm_90a, whose warps have a circular buffer of stages each, filled
// by TMA. They are bound by HBM bandwidth.
//
// A CTA computes 16 * HEIGHT rows of W by all tokens, and each of its warps accumulates a part of the columns, step by
// step. One lane of a warp issues its copies, with a prefetch distance of STAGES steps. Warps synchronize only at the
// end, to add their partial sums, and CTAs do not synchronize at all.
//
// Defined outside: HEIGHT, WARPS, TOKENS, STAGES, BLOCKS (CTAs resident on an SM), SHARED_BYTES_ASKED, and what
// sparse_product.cuh requires.

constexpr u32 THREADS = WARPS * 32, ROWS = 16 * HEIGHT, TOKEN_FRAGMENTS = TOKENS / 8;
// Tiles of X: 128 bytes of all tokens, swizzled.
constexpr u32 ROW = 128, X_TILE_BYTES = TOKENS * ROW;
// After the main loop the accumulators of all warps use the stages' memory. A row is a token; rows are padded against
// bank conflicts.
constexpr u32 SUM_ROW = ROWS + 4, WARP_SUMS = TOKENS * SUM_ROW;

typedef Sum Sums[HEIGHT][TOKEN_FRAGMENTS][4];

// Returns the address of a lane's row for `load_matrices`: eight tokens of a tile of X, in the half of the row that the
// instruction reads. Pieces of 16 bytes are swizzled by the row.
__device__ __forceinline__ u32 x_at(u32 tile, u32 eight, u32 half, u32 lane) {
    return tile + (eight * 8 + lane % 8) * ROW + ((half * 4 + lane / 8) ^ lane % 8) * 16;
}

// Multiplies all steps of a warp. `Work` has the bytes of a stage (COPIED_BYTES), `ask(to, full, step)` that issues
// their copies, `add(sums, buffer, lane)` that multiplies a step, and `map(i)`, its tensor maps, null beyond the last.
template <class Work> __device__ __forceinline__ void multiply(Sums& sums, const Work& work, u32 shared, u32 steps) {
    constexpr u32 STAGE_BYTES = (Work::COPIED_BYTES + 1023) / 1024 * 1024, AT_BARRIERS = WARPS * STAGES * STAGE_BYTES;
    static_assert(
        WARPS * WARP_SUMS * 4 + (ROWS + TOKENS) * 8 <= AT_BARRIERS, "there is room for sums, scales and biases");
    // The host adds 1024 bytes to align the start.
    static_assert(AT_BARRIERS + WARPS * STAGES * 8 + 1024 == SHARED_BYTES_ASKED, "the host's sum of shared memory");
    const u32 warp = uniform(threadIdx.x / 32), lane = pinned(threadIdx.x % 32);
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

// Scales and biases of a CTA's rows and tokens, in shared memory behind the accumulators.
constexpr u32 AT_FACTORS = WARPS * WARP_SUMS * 4, FACTORS = ROWS + TOKENS;

__device__ __forceinline__ Factors factors_at(u32 shared, u32 which) {
    Factors of;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
        : "=f"(of.scale), "=f"(of.bias)
        : "r"(shared + AT_FACTORS + which * 8)
        : "memory");
    return of;
}

template <int KIND> __device__ __forceinline__ void store_all(
    const Output& to, u32 output, u32 features, u32 tokens, u32 shared, u32 feature) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS / 4 * tokens; i += THREADS) {
        const u32 row = i % (ROWS / 4) * 4, t = i / (ROWS / 4), f = feature + row;
        if (f >= features) continue;
        Sum sums[4] = {};
        #pragma unroll
        for (u32 warp = 0; warp < WARPS; warp++) add_four(sums, shared + (warp * WARP_SUMS + t * SUM_ROW + row) * 4);
        if constexpr (is_biased(KIND) || is_finished(KIND)) {
            const Factors token = is_biased(KIND) ? Factors{1.0f, 0.0f} : factors_at(shared, ROWS + t);
            float results[4];
            #pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const Factors of = factors_at(shared, row + j);
                results[j] = is_biased(KIND) ? (float)sums[j] + of.bias
                                             : activated<F16>(to.activation, scaled((float)sums[j], of, token));
            }
            *(uint2*)((u16*)to.data + f + t * to.stride_token) =
                make_uint2(narrow_two<KIND>(results[0], results[1]), narrow_two<KIND>(results[2], results[3]));
        } else {
            store_neighbours<KIND>(to, output, sums, features, f, t);
        }
    }
}

// Returns what the epilogue does with the thread's row, and with the thread's token: threads take rows first, then
// tokens.
__device__ __forceinline__ Factors factors_of_thread(
    const Output& to, u32 output, u32 features, u32 tokens, u32 feature, u32 which) {
    Factors of = {1.0f, 0.0f};
    if (!is_finished_in_vectors(to, output)) return of;
    if (which < ROWS) {
        of = output == F16 ? factors_of_feature<FINISHED_F16>(to, features, feature + which)
                           : factors_of_feature<FINISHED_BF16>(to, features, feature + which);
    } else if (which < FACTORS) {
        of = output == F16 ? factors_of_token<FINISHED_F16>(to, tokens, which - ROWS)
                           : factors_of_token<FINISHED_BF16>(to, tokens, which - ROWS);
    }
    return of;
}

// Adds the partial sums of all warps and stores the results of the rows from `feature` on.
__device__ __forceinline__ void finish(
    const Output& to, u32 output, u32 features, u32 tokens, const Sums& sums, u32 shared, u32 feature) {
    // The accumulator layout of `mma`: a lane holds rows r and r + 8, tokens 2t and 2t + 1.
    const u32 lane = threadIdx.x % 32,
              mine = shared + (threadIdx.x / 32 * WARP_SUMS + lane % 4 * 2 * SUM_ROW + lane / 4) * 4;
    constexpr u32 TURNS = (FACTORS + THREADS - 1) / THREADS;
    Factors of[TURNS];
    #pragma unroll
    for (u32 i = 0; i < TURNS; i++)
        of[i] = factors_of_thread(to, output, features, tokens, feature, threadIdx.x + i * THREADS);
    // No warp reads from the stages any more.
    __syncthreads();
    #pragma unroll
    for (u32 i = 0; i < TURNS; i++) {
        const u32 at = shared + AT_FACTORS + (threadIdx.x + i * THREADS) * 8;
        if (is_finished_in_vectors(to, output) && threadIdx.x + i * THREADS < FACTORS)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(of[i].scale), "f"(of[i].bias) : "memory");
    }
    #pragma unroll
    for (u32 m = 0; m < HEIGHT; m++) {
        #pragma unroll
        for (u32 n = 0; n < TOKEN_FRAGMENTS; n++) {
            #pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 at = mine + ((n * 8 + j % 2) * SUM_ROW + m * 16 + j / 2 * 8) * 4;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(bits_of(sums[m][n][j])) : "memory");
            }
        }
    }
    __syncthreads();
    by_kind(to, output,
        [&](auto kind) { store_all<decltype(kind)::value>(to, output, features, tokens, shared, feature); });
}
