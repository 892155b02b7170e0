// act(alpha * scales * W X^T + bias) with an int4 2:4 W, 16-bit X and at most eight tokens, on sm_80 and everything
// after: see direct.cuh and int4.cuh.
//
// A step is a unit of 16 rows by 128 columns. In the order of `twofour::layout::lanes` each lane's part of it is
// contiguous.
//
// Defined outside: BY_ROW (one scale for a row, instead of one for each row of a unit).

constexpr u32 X_BYTES = UNIT_COLUMNS * 2;

static_assert(HEIGHT <= 2, "two units one above the other at most");

// A lane's part of a step, of HEIGHT vertically adjacent units.
struct Step {
    u32 values[HEIGHT][4];
    u32 codes[HEIGHT][2];
    u32 scales[HEIGHT];
};

// The addresses of a lane's parts, advanced from step to step; and the distance in units to the second unit below the
// first.
struct Reader {
    const u32 *values, *meta, *scales;
    u32 below;

    __device__ __forceinline__ Reader(const Parameters& p, u32 row_unit, u32 steps, u32 step) {
        const u32 lane = threadIdx.x % 32, last = p.features / UNIT_ROWS - 1;
        const u64 first = (u64)row_unit * steps + step;
        values = p.values + (first * 32 + lane) * 4;
        meta = p.meta + (first * 32 + lane) * 2;
        scales = BY_ROW ? p.scales : p.scales + first * 8 + lane / 4;
        // Without second rows the first ones are loaded again: their results are not stored.
        below = row_unit < last ? steps : 0;
    }
    __device__ __forceinline__ void next(Step& to, bool there) {
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            const u64 on = m * below;
            load(to.values[m], values + on * 128, there);
            load(to.codes[m], meta + on * 64, there);
            if (!BY_ROW) load(to.scales[m], scales + on * 8, there);
        }
        values += 128;
        meta += 64;
        if (!BY_ROW) scales += 8;
    }
};

// Multiplies a step; `x` is the lane's address for `ldmatrix` in X's step.
__device__ __forceinline__ void add(Sum (&sums)[HEIGHT][4], const Step& step, u32 x) {
    Sum parts[HEIGHT][4] = {};
    Sum (&into)[HEIGHT][4] = BY_ROW ? sums : parts;
    unrolled<4>([&](auto which) {
        constexpr int WHICH = decltype(which)::value;
        u32 activations[4];
        load_matrices(x + WHICH * 64, activations);
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            u32 w[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) w[i] = elements(step.values[m][WHICH], i);
            sparse_product<WHICH % 2>(into[m], w, activations, step.codes[m][WHICH / 2]);
        }
    });
    if (!BY_ROW) {
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) add_scaled(sums[m], parts[m], step.scales[m]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(16) u8 memory[];
    const u32 lane = threadIdx.x % 32, row_unit = blockIdx.x * HEIGHT, steps_of_all = p.reduction / UNIT_COLUMNS;
    const Part part = part_of(steps_of_all);
    Reader reader(p, row_unit, steps_of_all, part.begin);
    Step steps[DEPTH];
    #pragma unroll
    for (u32 d = 0; d < DEPTH; d++) reader.next(steps[d], d < part.end - part.begin);
    ask_for_features(p.to, p.output, p.features, row_unit * UNIT_ROWS, ROWS, threadIdx.x);
    ask_for_tokens(p.to, 0, p.tokens, threadIdx.x);
    const Activations<X_BYTES> x((const u8*)p.x, p.tokens, steps_of_all, part, memory);
    // Lanes of tokens past the end read another token's activations: their results are not stored.
    const u32 mine = x.first + min(lane % 8, p.tokens - 1) * x.row_bytes + lane / 8 * 16;
    Sum sums[HEIGHT][4] = {};
    x.wait();
    add_all<Step, X_BYTES>(sums, reader, steps, part, mine);
    if (BY_ROW) {
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            const Sum unscaled[4] = {sums[m][0], sums[m][1], sums[m][2], sums[m][3]};
            #pragma unroll
            for (int i = 0; i < 4; i++) sums[m][i] = 0;
            add_scaled(sums[m], unscaled, p.scales[min(row_unit + m, p.features / UNIT_ROWS - 1) * 8 + lane / 4]);
        }
    }
    finish(p.to, p.output, p.features, p.tokens, sums, memory, row_unit * UNIT_ROWS);
}
