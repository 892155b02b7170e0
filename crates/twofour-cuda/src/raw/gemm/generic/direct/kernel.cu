// act(alpha * scales * W X^T + bias) with a 16-bit 2:4 W and at most eight tokens, on sm_80 and everything after: see
// direct.cuh.
//
// A step is 64 columns. A lane loads 16 contiguous bytes of a row, the kept values of four groups, while each of two
// `mma.sp` instructions takes two groups from every lane. Groups are therefore permuted between W and the instructions,
// and the activations and the metadata are permuted accordingly (tests/lanes.rs):
//
// | group of a step | lane of four that holds it | instruction | the instruction's group |
// |---|---|---|---|
// | 4 j + 2 s + h | j | s | 4 h + j |

// Bytes of a step of W's kept values, of X and of metadata, in a row.
constexpr u32 W_BYTES = 64, X_BYTES = 128, META_BYTES = 8;

struct Parameters {
    const u8* values;
    const u8* meta;
    const u8* x;
    Output to;
    u32 output;
    // Rows of W, padding included.
    u32 rows, tokens, steps;
    u32 features;
};

// A lane's part of a step: for every 16 rows the values of rows r = `lane / 4` and r + 8, and the metadata of both, in
// words of four groups.
struct Step {
    u32 values[HEIGHT][2][4];
    u32 codes[HEIGHT][2][2];
};

// The addresses of a lane's parts, advanced from step to step.
struct Reader {
    const u8* values[HEIGHT];
    const u8* meta[HEIGHT];
    u64 eight_rows, meta_step;

    __device__ __forceinline__ Reader(const Parameters& p, u32 feature, u32 step) {
        const u32 lane = threadIdx.x % 32;
        const u64 row_bytes = (u64)p.steps * W_BYTES;
        eight_rows = 8 * row_bytes;
        meta_step = (u64)p.rows * META_BYTES;
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            // Rows past the end are replaced by the last ones: their results are not stored.
            const u32 row = min(feature + m * 16, p.rows - 16) + lane / 4;
            values[m] = p.values + row * row_bytes + (u64)step * W_BYTES + lane % 4 * 16;
            meta[m] = p.meta + step * meta_step + row * META_BYTES;
        }
    }
    __device__ __forceinline__ void next(Step& to, bool there) {
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            load(to.values[m][0], values[m], there);
            load(to.values[m][1], values[m] + eight_rows, there);
            load(to.codes[m][0], meta[m], there);
            load(to.codes[m][1], meta[m] + 8 * META_BYTES, there);
            values[m] += W_BYTES;
            meta[m] += meta_step;
        }
    }
};

// Returns the metadata operand of a lane: for rows r (lower half) and r + 8 (upper half) the codes of group `lane % 4`
// of every four.
__device__ __forceinline__ u32 product_codes(const u32 (&words)[2][2]) {
    u32 codes = 0;
    #pragma unroll
    for (u32 j = 0; j < 4; j++) {
        const u32 word = words[j % 2][j / 2];
        codes |= __funnelshift_r(word, word, 4 * (threadIdx.x % 4 - j)) & 0x000F000Fu << 4 * j;
    }
    return codes;
}

// Multiplies a step; `x` is the address of the lane's part of X's step.
__device__ __forceinline__ void add(Sum (&sums)[HEIGHT][4], const Step& step, u32 x) {
    u32 codes[HEIGHT];
    #pragma unroll
    for (u32 m = 0; m < HEIGHT; m++) codes[m] = product_codes(step.codes[m]);
    unrolled<2>([&](auto which) {
        constexpr int WHICH = decltype(which)::value;
        u32 activations[4];
        #pragma unroll
        for (u32 i = 0; i < 4; i++) {
            asm volatile("ld.shared.u32 %0, [%1];"
                : "=r"(activations[i])
                : "r"(x + WHICH * 16 + i % 2 * 64 + i / 2 * 8)
                : "memory");
        }
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            const u32 (&w)[2][4] = step.values[m];
            const u32 four[4] = {w[0][2 * WHICH], w[1][2 * WHICH], w[0][2 * WHICH + 1], w[1][2 * WHICH + 1]};
            sparse_product<WHICH>(sums[m], four, activations, codes[m]);
        }
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) direct(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(16) u8 memory[];
    const u32 lane = threadIdx.x % 32, feature = blockIdx.x * ROWS;
    const Part part = part_of(p.steps);
    Reader reader(p, feature, part.begin);
    Step steps[DEPTH];
    #pragma unroll
    for (u32 d = 0; d < DEPTH; d++) reader.next(steps[d], d < part.end - part.begin);
    ask_for_features(p.to, p.output, p.features, feature, ROWS, threadIdx.x);
    ask_for_tokens(p.to, 0, p.tokens, threadIdx.x);
    const Activations<X_BYTES> x(p.x, p.tokens, p.steps, part, memory);
    // Lanes of tokens past the end read another token's activations: their results are not stored.
    const u32 mine = x.first + min(lane / 4, p.tokens - 1) * x.row_bytes + lane % 4 / 2 * 32 + lane % 2 * 4;
    Sum sums[HEIGHT][4] = {};
    x.wait();
    add_all<Step, X_BYTES>(sums, reader, steps, part, mine);
    finish(p.to, p.output, p.features, p.tokens, sums, memory, feature);
}
