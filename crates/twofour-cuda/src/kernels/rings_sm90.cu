// act(alpha * scales * W X^T + bias) with a 2:4 W and few tokens on sm_90a: bound by reading W, each byte of it once.
//
// A block takes 16 * HEIGHT rows of W and all tokens, and each of its warps a part of the columns. A warp has a ring of STAGES buffers of its own, which it asks the
// copy engine to fill and multiplies from: no warp waits for another until the end, when sums are added up, and no block for another at all.
//
// A step of 128 bytes of W's rows needs 256 bytes of X's rows, as two tiles of 128, and the metadata of both halves, in the order that the products of many tokens
// want too (gemm_sm90.cu).
//
// Defined outside: HEIGHT, WARPS, TOKENS, STAGES, BLOCKS (to a multiprocessor), and what sparse_product.cuh wants.

constexpr u32 THREADS = WARPS * 32, ROWS = 16 * HEIGHT, EIGHTS = TOKENS / 8;
constexpr u32 ELEMENT_BYTES = sizeof(Bits<ELEMENT>::type), K_STEP = 256 / ELEMENT_BYTES;
constexpr u32 ROW = 128, W_BYTES = ROWS * ROW, X_TILE_BYTES = TOKENS * ROW;
// Codes of sixteen rows in half a step, and of all rows.
constexpr u32 SIXTEEN_CODES = 16 * K_STEP / 2 / 8, META_TILE_BYTES = HEIGHT * SIXTEEN_CODES;
constexpr u32 AT_X = W_BYTES, AT_META = AT_X + 2 * X_TILE_BYTES, COPIED_BYTES = AT_META + 2 * META_TILE_BYTES;
constexpr u32 STAGE_BYTES = (COPIED_BYTES + 1023) / 1024 * 1024;
constexpr u32 AT_BARRIERS = WARPS * STAGES * STAGE_BYTES;
// In the end sums of all warps lie where the buffers were. Rows, a token each, are longer than they are used, for other banks.
constexpr u32 SUM_ROW = ROWS + 4, WARP_SUMS = TOKENS * SUM_ROW;
static_assert(WARPS * WARP_SUMS * 4 <= AT_BARRIERS, "there is room for sums");
// The host asks for 1024 more, to round up the start.
static_assert(AT_BARRIERS + WARPS * STAGES * 8 + 1024 == SHARED_BYTES_ASKED, "the host's sum of shared memory");

struct Parameters {
    TensorMap weight, x, meta;
    Output to;
    u32 output;
    u32 features, tokens, steps;
};

// A warp's ring.
struct Ring {
    u32 buffers, barriers;

    __device__ __forceinline__ Ring(u32 shared) {
        const u32 warp = threadIdx.x / 32;
        buffers = shared + warp * STAGES * STAGE_BYTES;
        barriers = shared + AT_BARRIERS + warp * STAGES * 8;
    }
    // Asks for a step: one lane does.
    __device__ __forceinline__ void ask(const Parameters& p, u32 feature, u32 stage, u32 step) const {
        const u32 to = buffers + stage * STAGE_BYTES, full = barriers + 8 * stage;
        barrier_expect(full, COPIED_BYTES);
        copy_tile(to, &p.weight, step * (K_STEP / 2), feature, full);
        copy_tile(to + AT_META, &p.meta, feature / 16 * (SIXTEEN_CODES / 8), step * 2, full);
        copy_tile(to + AT_X, &p.x, step * K_STEP, 0, full);
        copy_tile(to + AT_X + X_TILE_BYTES, &p.x, step * K_STEP + K_STEP / 2, 0, full);
    }
};

// Adds the products of half a step, two of them deep, from a buffer.
template <u32 HALF> __device__ __forceinline__ void add_half(Sum (&sums)[HEIGHT][EIGHTS][4], u32 buffer) {
    const u32 lane = threadIdx.x % 32;
    u32 codes[HEIGHT][CODE_WORDS];
    #pragma unroll
    for (u32 m = 0; m < HEIGHT; m++) {
        #pragma unroll
        for (u32 i = 0; i < CODE_WORDS; i++) {
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes[m][i]) : "r"(buffer + AT_META + HALF * META_TILE_BYTES + m * SIXTEEN_CODES + 4 * code_word(lane) + 8 * i) : "memory");
        }
    }
    unrolled<2>([&](auto which) {
        constexpr u32 SECOND = decltype(which)::value;
        // Rows are swizzled: pieces of 16 bytes have changed places by the row. A product takes four pieces of X's rows and two of W's.
        u32 x[EIGHTS][4];
        #pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) load_matrices(buffer + AT_X + HALF * X_TILE_BYTES + (n * 8 + lane % 8) * ROW + ((SECOND * 4 + lane / 8) ^ lane % 8) * 16, x[n]);
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            u32 w[4];
            load_matrices(buffer + (m * 16 + lane % 16) * ROW + ((HALF * 4 + SECOND * 2 + lane / 16) ^ lane % 8) * 16, w);
            #pragma unroll
            for (u32 n = 0; n < EIGHTS; n++) sparse_product<CODE_WORDS == 1 ? SECOND : 0>(sums[m][n], w, x[n], codes[m][SECOND % CODE_WORDS]);
        }
    });
}

// The sum of four neighbouring rows and a token over all warps.
__device__ __forceinline__ void total(u32 address, Sum (&sums)[4]) {
    #pragma unroll
    for (u32 warp = 0; warp < WARPS; warp++) {
        u32 bits[4];
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                     : "r"(address + warp * WARP_SUMS * 4)
                     : "memory");
        #pragma unroll
        for (u32 j = 0; j < 4; j++) {
            Sum part;
            of_bits(part, bits[j]);
            sums[j] += part;
        }
    }
}

template <bool PLAIN> __device__ __forceinline__ void store_all(const Parameters& p, u32 shared, u32 feature) {
    #pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS / 4 * p.tokens; i += THREADS) {
        const u32 row = i % (ROWS / 4) * 4, t = i / (ROWS / 4), f = feature + row;
        if (f >= p.features) continue;
        Sum sums[4] = {};
        total(shared + (t * SUM_ROW + row) * 4, sums);
        if (PLAIN && p.to.stride_feature == 1) store_neighbours(p.to, p.output, sums, f, t);
        else {
            #pragma unroll
            for (u32 j = 0; j < 4; j++) store<PLAIN>(p.to, p.output, sums[j], f + j, t);
        }
    }
}

// Adds up the sums of all warps and stores the results of the rows from `feature` on.
__device__ __forceinline__ void finish(const Parameters& p, const Sum (&sums)[HEIGHT][EIGHTS][4], u32 shared, u32 feature) {
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
    if (p.to.plain) store_all<true>(p, shared, feature);
    else store_all<false>(p, shared, feature);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rings(const __grid_constant__ Parameters p) {
    extern __shared__ u8 memory[];
    const u32 shared = (shared_address(memory) + 1023) & ~1023u;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, feature = blockIdx.x * ROWS;
    const u32 begin = p.steps * warp / WARPS, end = p.steps * (warp + 1) / WARPS;
    const Ring ring(shared);
    if (lane == 0) {
        #pragma unroll
        for (u32 stage = 0; stage < STAGES; stage++) barrier_init(ring.barriers + 8 * stage, 1);
        barriers_are_ready();
        #pragma unroll 1
        for (u32 stage = 0; stage < STAGES && begin + stage < end; stage++) ring.ask(p, feature, stage, begin + stage);
    }
    __syncwarp();
    Sum sums[HEIGHT][EIGHTS][4] = {};
    u32 stage = 0, parity = 0;
    #pragma unroll 1
    for (u32 step = begin; step < end; step++) {
        barrier_wait(ring.barriers + 8 * stage, parity);
        const u32 buffer = ring.buffers + stage * STAGE_BYTES;
        add_half<0>(sums, buffer);
        add_half<1>(sums, buffer);
        // All lanes have read what is now overwritten.
        __syncwarp();
        if (lane == 0 && step + STAGES < end) ring.ask(p, feature, stage, step + STAGES);
        next_stage<STAGES>(stage, parity);
    }
    finish(p, sums, shared, feature);
}
