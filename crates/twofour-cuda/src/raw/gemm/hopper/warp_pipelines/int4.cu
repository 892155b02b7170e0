// act(alpha * scales * W X^T + bias) with an int4 2:4 W, 16-bit X and small batches on sm_90a: see warp_pipelines.cuh,
// gemm/int4/maps.cuh and int4.cuh.
//
// A step is a unit of 16 rows by 128 columns for each 16 rows, and two tiles of X. In the order of
// `twofour::layout::lanes` each lane's part of a unit is contiguous.
//
// Defined outside: BY_ROW (one scale for a row, instead of one for each row of a unit).

constexpr u32 AT_VALUES = 2 * X_TILE_BYTES, AT_CODES = AT_VALUES + HEIGHT * 512, AT_SCALES = AT_CODES + HEIGHT * 256;

// Groups of eight tokens that are multiplied at once.
constexpr u32 AT_ONCE = TOKEN_FRAGMENTS < 4 ? TOKEN_FRAGMENTS : 4;

struct MappedParameters {
    Maps maps;
    // Scales of rows, read with BY_ROW.
    const u32* row_scales;
    Output to;
    u32 output;
    u32 features, tokens, steps;
};

struct Work {
    static constexpr u32 COPIED_BYTES = AT_SCALES + (BY_ROW ? 0 : HEIGHT * 32);
    const MappedParameters& p;
    u32 row_unit;

    __device__ __forceinline__ const TensorMap* map(u32 i) const { return p.maps.map(i); }
    __device__ __forceinline__ void ask(u32 to, u32 full, u32 step) const {
        p.maps.ask(to, to + AT_VALUES, to + AT_CODES, to + AT_SCALES, row_unit, step, full);
    }
    __device__ __forceinline__ void add(Sums& sums, u32 buffer, u32 lane) const {
        u32 values[HEIGHT][4], codes[HEIGHT][2];
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++)
            load_unit(values[m], codes[m], buffer + AT_VALUES + (m * 32 + lane) * 16,
                buffer + AT_CODES + (m * 32 + lane) * 8);
        // Large batches are multiplied in several passes, because registers cannot hold a second set of all their
        // accumulators.
        unrolled<TOKEN_FRAGMENTS / AT_ONCE>([&](auto group) {
            constexpr u32 FIRST = decltype(group)::value * AT_ONCE;
            Sum parts[HEIGHT][AT_ONCE][4] = {};
            unrolled<4>([&](auto which) {
                constexpr u32 WHICH = decltype(which)::value;
                u32 w[HEIGHT][4];
                #pragma unroll
                for (u32 m = 0; m < HEIGHT; m++) {
                    #pragma unroll
                    for (int i = 0; i < 4; i++) w[m][i] = elements(values[m][WHICH], i);
                }
                #pragma unroll
                for (u32 n = 0; n < AT_ONCE; n++) {
                    u32 x[4];
                    load_matrices(x_at(buffer + WHICH / 2 * X_TILE_BYTES, FIRST + n, WHICH % 2, lane), x);
                    #pragma unroll
                    for (u32 m = 0; m < HEIGHT; m++)
                        sparse_product<WHICH % 2>(
                            BY_ROW ? sums[m][FIRST + n] : parts[m][n], w[m], x, codes[m][WHICH / 2]);
                }
            });
            if (!BY_ROW) {
                #pragma unroll
                for (u32 m = 0; m < HEIGHT; m++) {
                    u32 scales;
                    asm volatile("ld.shared.u32 %0, [%1];"
                        : "=r"(scales)
                        : "r"(buffer + AT_SCALES + (m * 8 + lane / 4) * 4)
                        : "memory");
#pragma unroll
                    for (u32 n = 0; n < AT_ONCE; n++) add_scaled(sums[m][FIRST + n], parts[m][n], scales);
                }
            }
        });
    }
    // Multiplies the final accumulators by their rows' scales.
    __device__ __forceinline__ void scale(Sums& sums) const {
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            // Rows past the end have the last ones' scales: their results are not stored.
            float low, high;
            scales_of(
                p.row_scales[min(row_unit + m, p.features / UNIT_ROWS - 1) * 8 + threadIdx.x % 32 / 4], low, high);
#pragma unroll
            for (u32 n = 0; n < TOKEN_FRAGMENTS; n++) {
                #pragma unroll
                for (int i = 0; i < 4; i++) sums[m][n][i] *= i < 2 ? low : high;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode(const __grid_constant__ MappedParameters p) {
    extern __shared__ u8 memory[];
    const u32 shared = (shared_address(memory) + 1023) & ~1023u;
    const Work work{p, blockIdx.x * HEIGHT};
    ask_for_features(p.to, p.output, p.features, work.row_unit * UNIT_ROWS, ROWS, threadIdx.x);
    ask_for_tokens(p.to, 0, p.tokens, threadIdx.x);
    Sums sums = {};
    multiply(sums, work, shared, p.steps);
    if (BY_ROW) work.scale(sums);
    finish(p.to, p.output, p.features, p.tokens, sums, shared, work.row_unit * UNIT_ROWS);
}
