// act(alpha * scales * W X^T + bias) with an int4 2:4 W, 16-bit X and small batches on sm_90a: see cluster.cuh,
// gemm/int4/maps.cuh and int4.cuh.
//
// A step is a unit of 128 columns for every 16 rows, in the order of `twofour::layout::lanes`, and two tiles of X. A
// lane's operands of `mma.sp` are its operands of `wgmma.sp` for its warp's 16 rows: W is loaded into registers,
// dequantized there and multiplied from there.
//
// Defined outside: BY_ROW (one scale for a row, instead of one for each row of a unit), and `first_product` and
// `product` for ELEMENT and TOKENS.

constexpr u32 UNITS = FEATURES / UNIT_ROWS, X_BYTES = 2 * X_TILE_BYTES;
constexpr u32 VALUES_BYTES = UNITS * 512, CODES_BYTES = UNITS * 256, SCALES_BYTES = BY_ROW ? 0 : UNITS * 32;
// TMA destinations are aligned to 128 bytes.
constexpr u32 SCALES_STAGE = (SCALES_BYTES + 127) / 128 * 128;
constexpr u32 AT_VALUES = STAGES * X_BYTES, AT_CODES = AT_VALUES + STAGES * VALUES_BYTES,
              AT_SCALES = AT_CODES + STAGES * CODES_BYTES;

struct MappedParameters {
    Maps maps;
    // Scales of rows, read with BY_ROW.
    const u32* row_scales;
    Problem problem;
};

static_assert(HEIGHT <= 2, "two items under way");

// A warp's tile of a step: 16 rows of converted elements, their metadata and scales, and their accumulators.
struct Item {
    u32 w[4][4];
    u32 codes[2];
    u32 scales;
    Sum parts[TOKENS / 2];
};

struct Work {
    static constexpr u32 BUFFER_BYTES = AT_SCALES + STAGES * SCALES_STAGE;
    const MappedParameters& p;

    __device__ __forceinline__ u32 copied_bytes() const { return X_BYTES + VALUES_BYTES + CODES_BYTES + SCALES_BYTES; }

    __device__ __forceinline__ void ask(u32 shared, u32 stage, u32 full, const Part& part, u32 step) const {
        const u32 values = shared + AT_VALUES + stage * VALUES_BYTES, codes = shared + AT_CODES + stage * CODES_BYTES,
                  scales = shared + AT_SCALES + stage * SCALES_STAGE;
        p.maps.ask(shared + stage * X_BYTES, values, codes, scales, part.feature / UNIT_ROWS, step, full);
    }
    // Returns the unit of a warp's tile. Where the last warpgroup has fewer rows, its surplus warps load the last unit
    // again.
    static __device__ __forceinline__ u32 unit(u32 tile) { return min(row_fragment(tile), UNITS - 1); }

    static __device__ __forceinline__ void take(Item& to, const Buffers& from, u32 lane) {
        u32 values[4];
        load_unit(values, to.codes, from.shared + AT_VALUES + from.stage * VALUES_BYTES + lane * 16,
            from.shared + AT_CODES + from.stage * CODES_BYTES + lane * 8);
        if (!BY_ROW)
            asm volatile("ld.shared.u32 %0, [%1];"
                : "=r"(to.scales)
                : "r"(from.shared + AT_SCALES + from.stage * SCALES_STAGE + lane / 4 * 4)
                : "memory");
#pragma unroll
        for (u32 which = 0; which < 4; which++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) to.w[which][i] = elements(values[which], i);
        }
    }
    // Issues an item's `wgmma`.
    static __device__ __forceinline__ void begin(Item& item, u64 x) {
        const u64 next = operand_after(x, X_TILE_BYTES);
        products_begin();
        first_product<0>(item.parts, item.w[0], x, item.codes[0]);
        product<1>(item.parts, item.w[1], operand_after(x, ROW / 2), item.codes[0]);
        product<0>(item.parts, item.w[2], next, item.codes[1]);
        product<1>(item.parts, item.w[3], operand_after(next, ROW / 2), item.codes[1]);
        products_commit();
    }
    // Waits until all but the last `LEFT` items are complete, and adds the item's scaled accumulators.
    template <int LEFT> static __device__ __forceinline__ void end(Sum (&sums)[TOKENS / 2], Item& item) {
        products_wait<LEFT>();
        fence_operands(item.codes);
        float low = 1.0f, high = 1.0f;
        if (!BY_ROW) scales_of(item.scales, low, high);
        #pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++) {
            // Volatile, so that the compiler moves it neither before the wait nor after the next `wgmma`.
            asm volatile("fma.rn.f32 %0, %1, %2, %0;"
                : "+f"(sums[i])
                : "f"(item.parts[i]), "f"(i % 4 < 2 ? low : high));
        }
    }
    // Two items are in flight: while `wgmma` computes one, the accumulators of the one before are added and the next
    // one is dequantized.
    __device__ __forceinline__ void multiply(Sums& sums, Buffers from, const Part& part) const {
        const u64 x = operand<ROW>(from.shared);
        #pragma unroll
        for (u32 h = 0; h < HEIGHT; h++) {
            #pragma unroll
            for (u32 i = 0; i < TOKENS / 2; i++) sums[h][i] = 0;
        }
        // The thread's lane of each tile. Where all warpgroups have all rows, lanes are a constant apart, which saves a
        // register: with two, 128 rows spilled.
        u32 lanes[HEIGHT];
        #pragma unroll
        for (u32 h = 0; h < HEIGHT; h++)
            lanes[h] =
                h != 0 && UNITS % (4 * HEIGHT) == 0 ? lanes[0] + h * 4 * 32 : pinned(unit(h) * 32 + threadIdx.x % 32);
        Item items[2];
        // Before the first item there is nothing to add.
        items[1].scales = items[1].codes[0] = items[1].codes[1] = 0;
        #pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++) items[1].parts[i] = 0;
        u32 before = 0;
        // The number of items. Where a step has two items, the last item is always a second one, but the compiler must
        // not know this: it tracks accumulators in flight only where either may be, and would otherwise insert a wait
        // before each item.
        u32 left = uniform(pinned((part.end - part.begin) * HEIGHT));
        // Begins a tile of this step and ends the item before it. That is the step's tile before, or the last tile of
        // the step before.
        const auto pass = [&](auto tile, Item& item, Item& other) {
            constexpr u32 TILE = decltype(tile)::value;
            if (TILE == 0) barrier_wait(from.full(), from.parity);
            take(item, from, lanes[TILE]);
            begin(item, operand_after(x, from.stage * X_BYTES));
            end<1>(sums[(TILE + HEIGHT - 1) % HEIGHT], other);
            if (TILE == 0 && before != 0) release(before);
            if (TILE == HEIGHT - 1) {
                before = from.empty();
                from.next();
            }
        };
        for (;;) {
            pass(Int<0>(), items[0], items[1]);
            if (--left == 0) {
                end<0>(sums[0], items[0]);
                break;
            }
            pass(Int<HEIGHT - 1>(), items[1], items[0]);
            if (--left == 0) {
                end<0>(sums[HEIGHT - 1], items[1]);
                break;
            }
        }
        if constexpr (BY_ROW) {
            #pragma unroll
            for (u32 h = 0; h < HEIGHT; h++) {
                // Rows past the end have the last ones' scales: their results are not stored.
                float low, high;
                scales_of(p.row_scales[min(part.feature / UNIT_ROWS + unit(h), p.problem.features / UNIT_ROWS - 1) * 8 +
                                       threadIdx.x % 32 / 4],
                    low, high);
#pragma unroll
                for (u32 i = 0; i < TOKENS / 2; i++) sums[h][i] *= i % 4 < 2 ? low : high;
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) decode(const __grid_constant__ MappedParameters p) {
    run(Work{p}, p.problem);
}
