// act(alpha * scales * W X^T + bias) with an int4 2:4 W, 16-bit X and small batches, on sm_80 and everything after;
// bound by reading W.
//
// W is in the order of `twofour::layout::lanes`, so that a unit of 16 rows by 128 columns is contiguous. A warp copies
// units with a prefetch distance of STAGES - 1, and goes on from rows to rows without draining the pipeline. A lane
// reads only what it has copied itself, so warps need not synchronize. K_WARPS warps of a CTA share rows and compute
// every K_WARPS-th unit of them; the others have other rows. With a HEIGHT of 2 a warp has 32 rows, two units at a
// time: X is read once for both, and their instructions are independent. X stays in shared memory if it fits; otherwise
// it is streamed, a chunk of 128 columns for each of those warps at a time.
//
// The code is small on purpose: the instruction caches are cold where many other kernels run between two calls.
//
// Defined outside: Sum (float), ELEMENT, TOKENS, K_WARPS, HEIGHT, STAGES, BY_ROW (one scale for a row, instead of one
// for each row of a unit).

constexpr u32 WARPS = 8, THREADS = WARPS * 32, ROW_WARPS = WARPS / K_WARPS;
constexpr int TILES = TOKENS / 8;
constexpr u32 CHUNK = K_WARPS * UNIT_COLUMNS;
// Rows of X are padded, so that eight of them lie in different banks.
constexpr u32 X_ROW = CHUNK * 2 + 16;
// A warp's stage of a unit: for each lane values, metadata, scales.
constexpr u32 AT_CODES = 32 * 16, AT_SCALES = AT_CODES + 32 * 8, UNIT_BYTES = AT_SCALES + 32 * 4;
// Shared memory: the exchange of partial sums of eight tokens, units, X.
constexpr u32 AT_UNITS = WARPS * 32 * 16, STAGE_BYTES = WARPS * HEIGHT * UNIT_BYTES,
              AT_X = AT_UNITS + STAGES * STAGE_BYTES;

template <int BYTES> __device__ __forceinline__ void ask(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all but the last `LEFT` groups of this thread's copies.
template <int LEFT> __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// The addresses of a lane's parts of units, advanced from one of the warp's units to the next.
struct Reader {
    const u32 *values, *meta, *scales;

    __device__ __forceinline__ void move(long long units) {
        values += units * 128;
        meta += units * 64;
        if (!BY_ROW) scales += units * 8;
    }
    // Issues the copies of the unit `on` units further; `to` is the address for the lane's values.
    __device__ __forceinline__ void ask_unit(u32 to, u32 lane, u32 on) const {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(values + on * 128) : "memory");
        ask<8>(to + AT_CODES - lane * 8, meta + on * 64);
        if (!BY_ROW) ask<4>(to + AT_SCALES - lane * 12, scales + on * 8);
    }
};

// Issues the copies of a chunk of X; columns past the end are zero.
__device__ __forceinline__ void ask_x(const Parameters& p, u32 to, u32 chunk) {
    constexpr u32 PIECES = CHUNK / 8;
    #pragma unroll 1
    for (u32 i = threadIdx.x; i < p.tokens * PIECES; i += THREADS) {
        const u32 token = i / PIECES, inside = i % PIECES * 8, column = chunk * CHUNK + inside;
        const bool is = column < p.reduction;
        const u16* from = is ? p.x + (u64)token * p.reduction + column : p.x;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + token * X_ROW + inside * 2), "l"(from),
            "r"(is ? 16 : 0)
            : "memory");
    }
}

// Multiplies vertically adjacent units. `unit` is the address of the lane's values of the first, `rows` are the lane's
// addresses for `ldmatrix`, and `x` is the offset of this chunk.
__device__ __forceinline__ void add_units(
    Sum (&sums)[HEIGHT][TILES][4], u32 unit, u32 lane, const u32 (&rows)[TILES], u32 x) {
    u32 values[HEIGHT][4], codes[HEIGHT][2], scales[HEIGHT] = {};
    #pragma unroll
    for (u32 m = 0; m < HEIGHT; m++) {
        const u32 at = unit + m * UNIT_BYTES;
        load_unit(values[m], codes[m], at, at + AT_CODES - lane * 8);
        if (!BY_ROW)
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales[m]) : "r"(at + AT_SCALES - lane * 12) : "memory");
    }
    Sum parts[HEIGHT][TILES][4] = {};
    Sum (&into)[HEIGHT][TILES][4] = BY_ROW ? sums : parts;
    unrolled<4>([&](auto step) {
        constexpr int STEP = decltype(step)::value;
        u32 w[HEIGHT][4];
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) w[m][i] = elements(values[m][STEP], i);
        }
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            u32 activations[4];
            load_matrices(rows[tile] + x + STEP * 64, activations);
            #pragma unroll
            for (u32 m = 0; m < HEIGHT; m++)
                sparse_product<STEP % 2>(into[m][tile], w[m], activations, codes[m][STEP / 2]);
        }
    });
    if (!BY_ROW) {
        #pragma unroll
        for (u32 m = 0; m < HEIGHT; m++) {
            #pragma unroll
            for (int tile = 0; tile < TILES; tile++) add_scaled(sums[m][tile], parts[m][tile], scales[m]);
        }
    }
}

// Adds the partial sums of the warps that share rows, stores the results and resets the accumulators.
__device__ __forceinline__ void finish(const Parameters& p, Sum (&all)[HEIGHT][TILES][4], Sum* exchange, u32 group) {
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    #pragma unroll
    for (u32 m = 0; m < HEIGHT; m++) {
        Sum (&sums)[TILES][4] = all[m];
        const u32 rows = (group * ROW_WARPS + warp / K_WARPS) * HEIGHT + m;
        float low = 1.0f, high = 1.0f;
        if (BY_ROW && rows < p.features / UNIT_ROWS) scales_of(p.scales[rows * 8 + lane / 4], low, high);
        // Eight tokens at a time, always from the first accumulators: the others move up.
        #pragma unroll 1
        for (u32 first = 0; first < p.tokens; first += 8) {
            __syncthreads();
            ((float4*)exchange)[threadIdx.x] =
                make_float4(sums[0][0] * low, sums[0][1] * low, sums[0][2] * high, sums[0][3] * high);
            __syncthreads();
            #pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                #pragma unroll
                for (int i = 0; i < 4; i++) sums[tile][i] = tile + 1 < TILES ? sums[tile + 1][i] : 0.0f;
            }
            #pragma unroll 1
            for (u32 i = threadIdx.x; i < ROW_WARPS * UNIT_ROWS * 8; i += THREADS) {
                const u32 row = i % (ROW_WARPS * UNIT_ROWS), token = i / (ROW_WARPS * UNIT_ROWS);
                const u32 f = ((group * ROW_WARPS + row / UNIT_ROWS) * HEIGHT + m) * UNIT_ROWS + row % UNIT_ROWS;
                if (f >= p.features || first + token >= p.tokens) continue;
                // The accumulator layout of `mma`: a lane holds rows r and r + 8, tokens 2t and 2t + 1.
                const u32 theirs = row % 8 * 4 + token / 2, which = row % UNIT_ROWS / 8 * 2 + token % 2;
                Sum total = 0;
                #pragma unroll
                for (u32 from = 0; from < K_WARPS; from++)
                    total += exchange[((row / UNIT_ROWS * K_WARPS + from) * 32 + theirs) * 4 + which];
                store(p.to, p.output, total, f, first + token);
            }
        }
        // Clears accumulators of tokens past the end, too.
        #pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) sums[tile][i] = 0;
        }
    }
}

// A position in a CTA's work: a group of rows, and a chunk of columns.
struct Place {
    u32 group, chunk;
    __device__ __forceinline__ void next(u32 chunks) {
        if (++chunk == chunks) {
            chunk = 0;
            group += gridDim.x;
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) decode(const __grid_constant__ Parameters p) {
    extern __shared__ __align__(16) u8 memory[];
    const u32 shared = (u32)__cvta_generic_to_shared(memory), x = shared + AT_X, x_bytes = p.tokens * X_ROW;
    const u32 warp = threadIdx.x / 32, row_warp = warp / K_WARPS, k_warp = warp % K_WARPS;
    const u32 lane = threadIdx.x % 32, mine = shared + AT_UNITS + warp * (HEIGHT * UNIT_BYTES) + lane * 16;
    const u32 units = p.reduction / UNIT_COLUMNS, chunks = (units + K_WARPS - 1) / K_WARPS;
    const u32 row_units = p.features / UNIT_ROWS, groups = (row_units + ROW_WARPS * HEIGHT - 1) / (ROW_WARPS * HEIGHT);
    // The first of a warp's units at a position, and whether it has any there.
    const auto row_unit = [&](Place at) { return (at.group * ROW_WARPS + row_warp) * HEIGHT; };
    const auto has = [&](Place at) { return row_unit(at) < row_units && at.chunk * K_WARPS + k_warp < units; };
    Place now = {blockIdx.x, 0}, next = now;
    const u64 first = (u64)row_unit(now) * units + k_warp;
    Reader reader = {p.values + (first * 32 + lane) * 4, p.meta + (first * 32 + lane) * 2,
        BY_ROW ? p.scales : p.scales + first * 8 + lane / 4};
    const long long to_next_group =
        (long long)(gridDim.x * ROW_WARPS * HEIGHT) * units - (long long)(chunks - 1) * K_WARPS;
    // Issues the copies for the next position, as one group.
    const auto ask_next = [&](u32 stage) {
        if (has(next)) {
            reader.ask_unit(mine + stage * STAGE_BYTES, lane, 0);
            // Without second rows the first ones are loaded again: their results are not stored.
            if (HEIGHT == 2)
                reader.ask_unit(
                    mine + stage * STAGE_BYTES + UNIT_BYTES, lane, row_unit(next) + 1 < row_units ? units : 0);
        }
        if (!p.resident && next.group < groups) ask_x(p, x + stage * x_bytes, next.chunk);
        asked();
        next.next(chunks);
        reader.move(next.chunk == 0 ? to_next_group : (long long)K_WARPS);
    };
    #pragma unroll 1
    for (u32 stage = 0; stage < STAGES - 1; stage++) {
        // All of X, with the first group.
        for (u32 chunk = 0; p.resident && stage == 0 && chunk < chunks; chunk++) ask_x(p, x + chunk * x_bytes, chunk);
        ask_next(stage);
    }
    if (p.resident) {
        wait<STAGES - 2>();
        __syncthreads();
    }
    // Lanes of tokens past the end read another token's activations: their results are not stored.
    u32 rows[TILES];
    #pragma unroll
    for (u32 tile = 0; tile < TILES; tile++)
        rows[tile] = x + k_warp * (UNIT_COLUMNS * 2) + lane / 8 * 16 + min(tile * 8 + lane % 8, p.tokens - 1) * X_ROW;
    Sum sums[HEIGHT][TILES][4] = {};
    u32 stage = 0, ahead = STAGES - 1;
    #pragma unroll 1
    while (now.group < groups) {
        wait<STAGES - 2>();
        // A streamed chunk of X is for all warps. After the barrier no warp reads the stage before it any more.
        if (!p.resident) __syncthreads();
        ask_next(ahead);
        if (has(now))
            add_units(sums, mine + stage * STAGE_BYTES, lane, rows, (p.resident ? now.chunk : stage) * x_bytes);
        if (now.chunk + 1 == chunks) finish(p, sums, (Sum*)memory, now.group);
        now.next(chunks);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        ahead = ahead + 1 == STAGES ? 0 : ahead + 1;
    }
}
