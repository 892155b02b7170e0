// act(alpha * scales * W X^T + bias) with a 2:4 W and small batches on sm_90a: see warp_pipelines.cuh.
//
// A step of 128 bytes of W's rows needs 256 bytes of X's rows, as two tiles, and the metadata of both halves, in the
// order of gemm/hopper/tiled/kernel.cu.

constexpr u32 ELEMENT_BYTES = sizeof(Bits<ELEMENT>::type), K_STEP = 256 / ELEMENT_BYTES;
constexpr u32 W_BYTES = ROWS * ROW;
// Bytes of metadata of 16 rows in half a step, and of all rows.
constexpr u32 FRAGMENT_META_BYTES = 16 * K_STEP / 2 / 8, META_TILE_BYTES = HEIGHT * FRAGMENT_META_BYTES;
constexpr u32 AT_X = W_BYTES, AT_META = AT_X + 2 * X_TILE_BYTES;

struct Parameters {
    TensorMap weight, x, meta;
    Output to;
    u32 output;
    u32 features, tokens, steps;
};

struct Work {
    static constexpr u32 COPIED_BYTES = AT_META + 2 * META_TILE_BYTES;
    const Parameters& p;
    u32 feature;

    __device__ __forceinline__ const TensorMap* map(u32 i) const {
        return i == 0 ? &p.weight : i == 1 ? &p.x : i == 2 ? &p.meta : nullptr;
    }
    __device__ __forceinline__ void ask(u32 to, u32 full, u32 step) const {
        copy_tile(to, &p.weight, step * (K_STEP / 2), feature, full);
        copy_tile(to + AT_META, &p.meta, feature / 16 * (FRAGMENT_META_BYTES / 8), step * 2, full);
        copy_tile(to + AT_X, &p.x, step * K_STEP, 0, full);
        copy_tile(to + AT_X + X_TILE_BYTES, &p.x, step * K_STEP + K_STEP / 2, 0, full);
    }
    __device__ __forceinline__ void add(Sums& sums, u32 buffer, u32 lane) const {
        unrolled<2>([&](auto half) { add_half<decltype(half)::value>(sums, buffer, lane); });
    }
    // Multiplies half a step, two instructions deep.
    template <u32 HALF> __device__ __forceinline__ void add_half(Sums& sums, u32 buffer, u32 lane) const {
        u32 codes[HEIGHT][CODE_WORDS];
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            #pragma unroll
            for (u32 i = 0; i < CODE_WORDS; i++) {
                const u32 at =
                    buffer + AT_META + HALF * META_TILE_BYTES + m * FRAGMENT_META_BYTES + 4 * code_word(lane) + 8 * i;
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes[m][i]) : "r"(at) : "memory");
            }
        }
        unrolled<2>([&](auto which) {
            constexpr u32 SECOND = decltype(which)::value;
            // An instruction reads four 16-byte pieces of X's rows and two of W's.
            u32 x[TOKEN_FRAGMENTS][4];
            #pragma unroll
            for (u32 n = 0; n < TOKEN_FRAGMENTS; n++)
                load_matrices(x_at(buffer + AT_X + HALF * X_TILE_BYTES, n, SECOND, lane), x[n]);
#pragma unroll
            for (u32 m = 0; m < HEIGHT; m++) {
                u32 w[4];
                load_matrices(
                    buffer + (m * 16 + lane % 16) * ROW + ((HALF * 4 + SECOND * 2 + lane / 16) ^ lane % 8) * 16, w);
#pragma unroll
                for (u32 n = 0; n < TOKEN_FRAGMENTS; n++)
                    sparse_product<CODE_WORDS == 1 ? SECOND : 0>(sums[m][n], w, x[n], codes[m][SECOND % CODE_WORDS]);
            }
        });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) rings(const __grid_constant__ Parameters p) {
    extern __shared__ u8 memory[];
    const u32 shared = (shared_address(memory) + 1023) & ~1023u, feature = blockIdx.x * ROWS;
    ask_for_features(p.to, p.output, p.features, feature, ROWS, threadIdx.x);
    ask_for_tokens(p.to, 0, p.tokens, threadIdx.x);
    Sums sums = {};
    multiply(sums, Work{p, feature}, shared, p.steps);
    finish(p.to, p.output, p.features, p.tokens, sums, shared, feature);
}
