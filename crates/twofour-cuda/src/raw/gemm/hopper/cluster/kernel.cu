// act(alpha * scales * W X^T + bias) with a 2:4 W and small batches on sm_90a: see cluster.cuh.
//
// A step of 128 bytes of W's rows needs 256 bytes of X's rows, as two tiles of 128, and two atoms of metadata for every
// 64 features, in the order of gemm/hopper/tiled/kernel.cu.
//
// Defined outside: ELEMENT, and `first_product` and `product` for ELEMENT and TOKENS.

constexpr u32 ELEMENT_BYTES = sizeof(Bits<ELEMENT>::type), K_STEP = 256 / ELEMENT_BYTES;
constexpr u32 W_BYTES = FEATURES * ROW, X_BYTES = 2 * X_TILE_BYTES;
constexpr u32 ATOM_BYTES = 64 * (K_STEP / 2) / 8, META_TILE_BYTES = FEATURES / 16 * (ATOM_BYTES / 4),
              META_BYTES = 2 * META_TILE_BYTES;
constexpr u32 AT_X = STAGES * W_BYTES, AT_META = AT_X + STAGES * X_BYTES;

struct Parameters {
    TensorMap weight, x, meta;
    Problem problem;
};

struct Work {
    static constexpr u32 BUFFER_BYTES = STAGES * (W_BYTES + X_BYTES + META_BYTES);
    const Parameters& p;

    __device__ __forceinline__ u32 copied_bytes() const { return W_BYTES + META_BYTES + 2 * p.problem.x_rows * ROW; }

    __device__ __forceinline__ void ask(u32 shared, u32 stage, u32 full, const Part& part, u32 step) const {
        copy_tile(shared + stage * W_BYTES, &p.weight, step * (K_STEP / 2), part.feature, full);
        copy_tile(
            shared + AT_META + stage * META_BYTES, &p.meta, part.feature / 16 * (ATOM_BYTES / 32), step * 2, full);
        const u32 x = shared + AT_X + stage * X_BYTES;
        copy_tile(x, &p.x, step * K_STEP, part.token, full);
        copy_tile(x + X_TILE_BYTES, &p.x, step * K_STEP + K_STEP / 2, part.token, full);
    }
    __device__ __forceinline__ void multiply(Sums& all, Buffers from, const Part& part) const {
        Sum (&sums)[TOKENS / 2] = all[0];
        const u32 group = uniform(threadIdx.x / 128), lane = threadIdx.x % 32;
        const u64 weight = operand<ROW>(from.shared + group * 64 * ROW), x = operand<ROW>(from.shared + AT_X);
        // The thread's metadata of an atom: see the orders in `twofour::layout::sm90`.
        // Where the last warpgroup has fewer rows, its surplus warps load the last rows' metadata again.
        const u32 row = min(row_fragment(0), ROW_FRAGMENTS - 1) * 16 + lane % 2 * 8 + lane / 4,
                  word = (ELEMENT_BYTES == 2 ? 2 : 4) * row + lane / 2 % 2;
        const u32 meta = pinned(from.shared + AT_META + 4 * word);
        constexpr int WORDS = ELEMENT_BYTES == 2 ? 1 : 2;
        // Computes one step. With enough stages it is complete only when the next one has begun, so that instructions
        // of both steps overlap.
        constexpr bool AHEAD = STAGES > 4;
        u32 before = 0;
        const auto hold = [](const u32 (&codes)[2][WORDS]) {
            fence_operands(codes[0]);
            fence_operands(codes[1]);
        };
        const auto add_step = [&](auto first, u32 (&codes)[2][WORDS], const u32 (&codes_before)[2][WORDS]) {
            constexpr bool FIRST = decltype(first)::value;
            barrier_wait(from.full(), from.parity);
            #pragma unroll
            for (int atom = 0; atom < 2; atom++) {
                #pragma unroll
                for (int i = 0; i < WORDS; i++) {
                    asm volatile("ld.shared.u32 %0, [%1];"
                        : "=r"(codes[atom][i])
                        : "r"(meta + from.stage * META_BYTES + atom * META_TILE_BYTES + 8 * i)
                        : "memory");
                }
            }
            const u64 w_now = operand_after(weight, from.stage * W_BYTES),
                      x_now = operand_after(x, from.stage * X_BYTES);
            products_begin();
            if constexpr (FIRST) first_product<0>(sums, w_now, x_now, codes[0][0]);
            else product<0>(sums, w_now, x_now, codes[0][0]);
            product<ELEMENT_BYTES == 2 ? 1 : 0>(
                sums, operand_after(w_now, ROW / 4), operand_after(x_now, ROW / 2), codes[0][WORDS - 1]);
            const u64 w = operand_after(w_now, ROW / 2), x = operand_after(x_now, X_TILE_BYTES);
            product<0>(sums, w, x, codes[1][0]);
            product<ELEMENT_BYTES == 2 ? 1 : 0>(
                sums, operand_after(w, ROW / 4), operand_after(x, ROW / 2), codes[1][WORDS - 1]);
            products_commit();
            products_wait<AHEAD ? 1 : 0>();
            if (!AHEAD) {
                hold(codes);
                release(from.empty());
            } else if (!FIRST) {
                hold(codes_before);
                release(before);
            }
            before = from.empty();
            from.next();
        };
        // Two sets of metadata registers, used alternately: instructions of a step still read theirs while the next
        // step's is loaded.
        u32 codes[2][2][WORDS] = {};
        add_step(Int<1>(), codes[0], codes[1]);
        for (u32 left = part.end - part.begin - 1; left != 0; left--) {
            add_step(Int<0>(), codes[1], codes[0]);
            if (--left == 0) break;
            add_step(Int<0>(), codes[0], codes[1]);
        }
        products_wait<0>();
        hold(codes[0]);
        hold(codes[1]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) stream(const __grid_constant__ Parameters p) {
    run(Work{p}, p.problem);
}
