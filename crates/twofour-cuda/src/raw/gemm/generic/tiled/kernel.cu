// act(alpha * scales * W X^T + bias) with a 2:4 W on the tensor cores of sm_80 and everything after (`mma.sp`).
//
// A CTA computes a tile of FEATURES rows of W and TOKENS rows of X; its four warps compute a quarter each, two by two.
// `cp.async` fills STAGES stages of shared memory. A step of 128 bytes of X's rows (K_STEP elements) is two
// instructions deep. It needs 64 bytes of W's rows, and an atom of metadata for every 64 features in the order of
// `wgmma.sp`: a lane's word of metadata is the same for `mma.sp`.
//
// Apart from the instruction, data types differ only in their bytes. Rows of both tiles are swizzled in pieces of 16
// bytes, so that pieces of one column of eight rows lie in different banks.
//
// Defined outside: ELEMENT, FEATURES, TOKENS, STAGES, and what sparse_product.cuh requires.

constexpr int THREADS = 128;
constexpr int WARP_FEATURES = FEATURES / 2, WARP_TOKENS = TOKENS / 2;
constexpr int M_TILES = WARP_FEATURES / 16, N_TILES = WARP_TOKENS / 8;
constexpr int ELEMENT_BYTES = sizeof(Bits<ELEMENT>::type);
constexpr int K_STEP = 128 / ELEMENT_BYTES;
constexpr int W_ROW = 64, X_ROW = 128;
constexpr int ATOM_BYTES = 64 * K_STEP / 8;
constexpr int META_BYTES = FEATURES / 64 * ATOM_BYTES;
constexpr int AT_X = FEATURES * W_ROW, AT_META = AT_X + TOKENS * X_ROW, STAGE_BYTES = AT_META + META_BYTES;
static_assert(FEATURES % 64 == 0 && TOKENS % 16 == 0, "whole atoms, and whole products for each warp");

struct Parameters {
    const u8* values;
    const u8* meta;
    const u8* x;
    Output to;
    u32 output;
    // Rows of W, padding included: a multiple of 64.
    u32 rows, tokens, steps;
    Rasterization rasterization;
    u32 features;
};

__device__ __forceinline__ void ask(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the last `LEFT` groups of this thread's copies.
template <int LEFT> __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Returns the offset of a piece of a row in its tile.
__device__ __forceinline__ u32 w_at(u32 row, u32 piece) { return row * W_ROW + ((piece ^ row / 2 % 4) * 16); }
__device__ __forceinline__ u32 x_at(u32 row, u32 piece) { return row * X_ROW + ((piece ^ row % 8) * 16); }

// Issues the copies of a step. Rows past the end are replaced by the last one: their results are not stored.
__device__ __forceinline__ void ask_step(const Parameters& p, u32 stage, u32 feature, u32 token, u32 step) {
    const u64 row_bytes = (u64)p.steps * X_ROW;
    #pragma unroll
    for (u32 i = threadIdx.x; i < FEATURES * (W_ROW / 16); i += THREADS) {
        const u32 row = i / 4, piece = i % 4;
        ask(stage + w_at(row, piece),
            p.values + min(feature + row, p.rows - 1) * (row_bytes / 2) + step * W_ROW + piece * 16);
    }
    #pragma unroll
    for (u32 i = threadIdx.x; i < TOKENS * (X_ROW / 16); i += THREADS) {
        const u32 row = i / 8, piece = i % 8;
        ask(stage + AT_X + x_at(row, piece),
            p.x + min(token + row, p.tokens - 1) * row_bytes + step * X_ROW + piece * 16);
    }
    const u32 atoms = p.rows / 64;
    #pragma unroll
    for (u32 i = threadIdx.x; i < META_BYTES / 16; i += THREADS) {
        const u32 atom = min(feature / 64 + i / (ATOM_BYTES / 16), atoms - 1);
        ask(stage + AT_META + i * 16, p.meta + ((u64)step * atoms + atom) * ATOM_BYTES + i % (ATOM_BYTES / 16) * 16);
    }
}

// Multiplies a step.
__device__ __forceinline__ void add_step(
    Sum (&sums)[M_TILES][N_TILES][4], u32 stage, u32 warp_feature, u32 warp_token) {
    const u32 lane = threadIdx.x % 32;
    u32 codes[M_TILES][CODE_WORDS];
    #pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
        const u32 fragment = stage + AT_META + (warp_feature / 16 + m) * (ATOM_BYTES / 4);
        #pragma unroll
        for (u32 i = 0; i < CODE_WORDS; i++)
            asm volatile("ld.shared.u32 %0, [%1];"
                : "=r"(codes[m][i])
                : "r"(fragment + 4 * code_word(lane) + 8 * i)
                : "memory");
    }
    unrolled<2>([&](auto which) {
        constexpr int SECOND = decltype(which)::value;
        u32 w[M_TILES][4];
        #pragma unroll
        for (u32 m = 0; m < M_TILES; m++)
            load_matrices(stage + w_at(warp_feature + m * 16 + lane % 16, SECOND * 2 + lane / 16), w[m]);
#pragma unroll
        for (u32 n = 0; n < N_TILES; n++) {
            u32 x[4];
            load_matrices(stage + AT_X + x_at(warp_token + n * 8 + lane % 8, SECOND * 4 + lane / 8), x);
            #pragma unroll
            for (u32 m = 0; m < M_TILES; m++)
                sparse_product<CODE_WORDS == 1 ? SECOND : 0>(sums[m][n], w[m], x, codes[m][SECOND % CODE_WORDS]);
        }
    });
}

// Stores four neighbouring results, of which `count` exist.
template <int E> __device__ __forceinline__ void store_four(
    const Output& output, u64 at, const Sum (&sums)[4], const float (&values)[4], u32 count) {
    typedef typename Result<E>::Type Out;
    struct __align__(4 * sizeof(Out)) Four { Out of[4]; } four;
    #pragma unroll
    for (int i = 0; i < 4; i++) four.of[i] = Result<E>::of(sums[i], values[i]);
    Out* to = (Out*)output.data + at;
    if (count == 4 && (u64)to % sizeof(Four) == 0 && !output.accumulate) {
        *(Four*)to = four;
        return;
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        if (i < count) put<E>(output, at + i, four.of[i]);
    }
}

// Applies the epilogue to a tile. Accumulators go through shared memory, so that neighbouring results are stored
// together.
__device__ __forceinline__ void finish(const Parameters& p, const Sum (&sums)[M_TILES][N_TILES][4], Sum* exchange,
    u32 feature, u32 token, u32 warp_feature, u32 warp_token) {
    const u32 lane = threadIdx.x % 32;
    const bool features_together = p.to.stride_feature == 1;
    // The lengths of the axis that is contiguous in the result, and of the other one.
    const u32 length = features_together ? FEATURES : TOKENS, rows = features_together ? TOKENS : FEATURES;
    const u32 row_of = length + 4;
    __syncthreads();
    #pragma unroll
    for (u32 m = 0; m < M_TILES; m++) {
        #pragma unroll
        for (u32 n = 0; n < N_TILES; n++) {
            #pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 f = warp_feature + m * 16 + lane / 4 + i / 2 * 8,
                          t = warp_token + n * 8 + lane % 4 * 2 + i % 2;
                exchange[features_together ? t * row_of + f : f * row_of + t] = sums[m][n][i];
            }
        }
    }
    __syncthreads();
    #pragma unroll 1
    for (u32 i = threadIdx.x; i < rows * (length / 4); i += THREADS) {
        const u32 row = i / (length / 4), along = i % (length / 4) * 4;
        const u32 f = feature + (features_together ? along : row), t = token + (features_together ? row : along);
        if (f >= p.features || t >= p.tokens) continue;
        const u32 count = min(4u, features_together ? p.features - f : p.tokens - t);
        Sum four[4];
        float values[4];
        #pragma unroll
        for (u32 j = 0; j < 4; j++) {
            four[j] = exchange[row * row_of + along + j];
            const u32 of_f = features_together ? f + j : f, of_t = features_together ? t : t + j;
            const bool there = j < count;
            values[j] =
                there ? activated<F32>(p.to.activation, scaled(p.to, p.output, (float)four[j], of_f, of_t)) : 0.0f;
        }
        const u64 at = f * p.to.stride_feature + t * p.to.stride_token;
        if (p.output == F16) store_four<F16>(p.to, at, four, values, count);
        else if (p.output == BF16) store_four<BF16>(p.to, at, four, values, count);
        else if (p.output == I32) store_four<I32>(p.to, at, four, values, count);
        else store_four<F32>(p.to, at, four, values, count);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 shared = (u32)__cvta_generic_to_shared(memory);
    const Tile tile = p.rasterization.tile(blockIdx.x);
    const u32 feature = tile.feature * FEATURES, token = tile.token * TOKENS, warp = threadIdx.x / 32;
    const u32 warp_feature = warp / 2 * WARP_FEATURES, warp_token = warp % 2 * WARP_TOKENS;
    Sum sums[M_TILES][N_TILES][4] = {};
    #pragma unroll 1
    for (u32 step = 0; step < STAGES - 1; step++) {
        if (step < p.steps) ask_step(p, shared + step * STAGE_BYTES, feature, token, step);
        asked();
    }
    u32 stage = 0, ahead = STAGES - 1;
    #pragma unroll 1
    for (u32 step = 0; step < p.steps; step++) {
        wait<STAGES - 2>();
        // This thread's copies are complete. After the barrier all threads' copies are, and no thread reads the stage
        // before this one any more.
        __syncthreads();
        if (step + STAGES - 1 < p.steps) ask_step(p, shared + ahead * STAGE_BYTES, feature, token, step + STAGES - 1);
        asked();
        add_step(sums, shared + stage * STAGE_BYTES, warp_feature, warp_token);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
    }
    wait<0>();
    finish(p, sums, (Sum*)memory, feature, token, warp_feature, warp_token);
}
