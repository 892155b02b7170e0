// act(alpha * scales * W X^T + bias) with a 2:4 W and few tokens on sm_90a: bound by reading W, each byte of it once.
//
// A cluster of `split` blocks takes FEATURES rows of W and all tokens; each block sums over a part of the columns. One warp feeds STAGES buffers
// through the copy engine, deep enough to keep the memory busy; a warpgroup for every 64 rows multiplies. In the end every block adds up a part of the sums of all.
//
// A step of 128 bytes of W's rows needs 256 bytes of X's rows, as two tiles of 128, and two atoms of metadata for every 64 features, in the order that
// the products of many tokens want too (gemm_sm90.cu).
//
// Defined outside: ELEMENT, FEATURES, TOKENS, STAGES, and `first_product` and `product` for ELEMENT and TOKENS.

// The last warpgroup may have fewer rows: what else it multiplies is not stored.
constexpr int GROUPS = (FEATURES + 63) / 64;
constexpr int ELEMENT_BYTES = sizeof(Bits<ELEMENT>::type);
constexpr int K_STEP = 256 / ELEMENT_BYTES;
constexpr int ROW = 128;
constexpr int W_BYTES = FEATURES * ROW, X_TILE_BYTES = TOKENS * ROW, X_BYTES = 2 * X_TILE_BYTES;
constexpr int ATOM_BYTES = 64 * (K_STEP / 2) / 8;
constexpr int META_TILE_BYTES = FEATURES / 16 * (ATOM_BYTES / 4), META_BYTES = 2 * META_TILE_BYTES;

constexpr int AT_X = STAGES * W_BYTES;
constexpr int AT_META = AT_X + STAGES * X_BYTES;
// Sums are sent four at a time, as a thread has them.
constexpr u32 MULTIPLIERS = GROUPS * 128, FOURS = TOKENS / 8 * MULTIPLIERS;
// Most blocks of a cluster.
constexpr u32 MOST_BLOCKS = 8;
constexpr int AT_RECEIVED = AT_META + STAGES * META_BYTES;
constexpr int AT_FULL = AT_RECEIVED + (FOURS + MOST_BLOCKS) * 16;
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;
constexpr int AT_ARRIVED = AT_EMPTY + STAGES * 8;
constexpr int SHARED_BYTES = AT_ARRIVED + 16;
// The host asks for 1024 more, to round up the start.
static_assert(SHARED_BYTES + 1024 == SHARED_BYTES_ASKED, "the host's sum of shared memory");
constexpr int THREADS = GROUPS * 128 + 32;

struct Parameters {
    TensorMap weight, x, meta;
    Output to;
    u32 output;
    u32 features, tokens, steps;
    u32 split;
};

__device__ __forceinline__ void feed(const Parameters& p, u32 shared, u32 feature, u32 begin, u32 end) {
    u32 stage = 0, parity = 1;
    for (u32 step = begin; step < end; step++) {
        const u32 full = shared + AT_FULL + 8 * stage;
        barrier_wait(shared + AT_EMPTY + 8 * stage, parity);
        barrier_expect(full, W_BYTES + X_BYTES + META_BYTES);
        copy_tile(shared + stage * W_BYTES, &p.weight, step * (K_STEP / 2), feature, full);
        copy_tile(shared + AT_META + stage * META_BYTES, &p.meta, feature / 16 * (ATOM_BYTES / 32), step * 2, full);
        const u32 x = shared + AT_X + stage * X_BYTES;
        copy_tile(x, &p.x, step * K_STEP, 0, full);
        copy_tile(x + X_TILE_BYTES, &p.x, step * K_STEP + K_STEP / 2, 0, full);
        next_stage<STAGES>(stage, parity);
    }
}

__device__ __forceinline__ void multiply(Sum (&sums)[TOKENS / 2], u32 shared, u32 begin, u32 end) {
    const u32 group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const u64 weight = operand<ROW>(shared + group * 64 * ROW), x = operand<ROW>(shared + AT_X);
    // The thread's metadata of an atom: see the orders in `twofour::layout::sm90`.
    const u32 word = ELEMENT_BYTES == 2 ? 2 * (warp * 16 + lane % 2 * 8 + lane / 4) + lane / 2 % 2 : 4 * (warp * 16 + lane / 4 + lane % 2 * 8) + lane / 2 % 2;
    const u32 meta = shared + AT_META + group * ATOM_BYTES + 4 * word;
    constexpr int WORDS = ELEMENT_BYTES == 2 ? 1 : 2;
    u32 stage = 0, parity = 0, before = 0;
    // One step. With buffers enough it is over only when the next one has begun, so that products follow each other without a pause.
    constexpr bool AHEAD = STAGES > 4;
    const auto release = [&](u32 stage) {
        __syncwarp();
        if (lane == 0) barrier_arrive(shared + AT_EMPTY + 8 * stage);
    };
    const auto add_step = [&](auto first, u32 (&codes)[2][WORDS]) {
        constexpr bool FIRST = decltype(first)::value;
        barrier_wait(shared + AT_FULL + 8 * stage, parity);
        #pragma unroll
        for (int atom = 0; atom < 2; atom++) {
            #pragma unroll
            for (int i = 0; i < WORDS; i++) {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes[atom][i]) : "r"(meta + stage * META_BYTES + atom * META_TILE_BYTES + 8 * i) : "memory");
            }
        }
        const u64 w_now = operand_after(weight, stage * W_BYTES), x_now = operand_after(x, stage * X_BYTES);
        products_begin();
        if constexpr (FIRST) first_product<0>(sums, w_now, x_now, codes[0][0]);
        else product<0>(sums, w_now, x_now, codes[0][0]);
        product<ELEMENT_BYTES == 2 ? 1 : 0>(sums, operand_after(w_now, ROW / 4), operand_after(x_now, ROW / 2), codes[0][WORDS - 1]);
        const u64 w = operand_after(w_now, ROW / 2), x = operand_after(x_now, X_TILE_BYTES);
        product<0>(sums, w, x, codes[1][0]);
        product<ELEMENT_BYTES == 2 ? 1 : 0>(sums, operand_after(w, ROW / 4), operand_after(x, ROW / 2), codes[1][WORDS - 1]);
        products_commit();
        products_wait<AHEAD ? 1 : 0>();
        if (!AHEAD) release(stage);
        else if (!FIRST) release(before);
        before = stage;
        next_stage<STAGES>(stage, parity);
    };
    // Two sets of metadata by turns: products of a step still read theirs while the next step's is loaded.
    u32 codes[2][2][WORDS];
    add_step(Int<1>(), codes[0]);
    for (u32 left = end - begin - 1; left != 0; left--) {
        add_step(Int<0>(), codes[1]);
        if (--left == 0) break;
        add_step(Int<0>(), codes[0]);
    }
    products_wait<0>();
}

// The results of four sums as thread `which % MULTIPLIERS` had them: of features `row` and `row + 8`, and of two tokens.
template <bool PLAIN> __device__ __forceinline__ void store_four(const Parameters& p, const Sum (&sums)[4], u32 feature, u32 which) {
    const u32 thread = which % MULTIPLIERS;
    const u32 row = thread / 32 * 16 + thread % 32 / 4, token = which / MULTIPLIERS * 8 + thread % 4 * 2;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 inside = row + i / 2 * 8, f = feature + inside, t = token + i % 2;
        if (inside < FEATURES && f < p.features && t < p.tokens) store<PLAIN>(p.to, p.output, sums[i], f, t);
    }
}

// The fours that a block adds up.
__device__ __forceinline__ u32 first_four(const Parameters& p, u32 rank) { return FOURS * rank / p.split; }

// Sends this block's sums to those who add them up.
__device__ __forceinline__ void send(const Parameters& p, const Sum (&sums)[TOKENS / 2], u32 shared, u32 rank) {
    #pragma unroll
    for (int i = 0; i < TOKENS / 8; i++) {
        const u32 which = i * MULTIPLIERS + threadIdx.x, owner = ((which + 1) * p.split - 1) / FOURS;
        const u32 most = (FOURS + p.split - 1) / p.split;
        const u32 to = shared + AT_RECEIVED + (rank * most + which - first_four(p, owner)) * 16;
        if (p.split == 1) {
            // There is no sending in a cluster of one block.
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(bits_of(sums[4 * i])), "r"(bits_of(sums[4 * i + 1])), "r"(bits_of(sums[4 * i + 2])),
                         "r"(bits_of(sums[4 * i + 3]))
                         : "memory");
            continue;
        }
        asm volatile(
            "{.reg .b32 there, arrived; mapa.shared::cluster.u32 there, %0, %6; mapa.shared::cluster.u32 arrived, %5, %6;"
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%1, %2, %3, %4}, [arrived];}" ::"r"(to),
            "r"(bits_of(sums[4 * i])), "r"(bits_of(sums[4 * i + 1])), "r"(bits_of(sums[4 * i + 2])), "r"(bits_of(sums[4 * i + 3])),
            "r"(shared + AT_ARRIVED), "r"(owner)
            : "memory");
    }
}

// Adds up what this block was sent.
template <bool PLAIN> __device__ __forceinline__ void add_up(const Parameters& p, u32 shared, u32 feature, u32 rank) {
    const u32 first = first_four(p, rank), count = first_four(p, rank + 1) - first, most = (FOURS + p.split - 1) / p.split;
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        Sum sums[4] = {};
        #pragma unroll
        for (u32 from = 0; from < MOST_BLOCKS; from++) {
            if (from >= p.split) break;
            add_four(sums, shared + AT_RECEIVED + (from * most + i) * 16);
        }
        store_four<PLAIN>(p, sums, feature, first + i);
    }
}

__device__ __forceinline__ void receive(const Parameters& p, u32 shared, u32 feature, u32 rank) {
    if (p.split == 1) __syncthreads();
    else barrier_wait(shared + AT_ARRIVED, 0);
    if (p.to.plain) add_up<true>(p, shared, feature, rank);
    else add_up<false>(p, shared, feature, rank);
}

extern "C" __global__ void __launch_bounds__(THREADS) stream(const __grid_constant__ Parameters p) {
    extern __shared__ u8 memory[];
    const u32 shared = (shared_address(memory) + 1023) & ~1023u;
    // Asked for early: the first copies need them.
    if (threadIdx.x < 3) prefetch(threadIdx.x == 0 ? &p.weight : threadIdx.x == 1 ? &p.meta : &p.x);
    const u32 rank = cluster_rank();
    const u32 feature = blockIdx.x / p.split * FEATURES;
    const u32 begin = p.steps * rank / p.split, end = p.steps * (rank + 1) / p.split;
    if (threadIdx.x == MULTIPLIERS) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(shared + AT_FULL + 8 * stage, 1);
            barrier_init(shared + AT_EMPTY + 8 * stage, GROUPS * 4);
        }
        barrier_init(shared + AT_ARRIVED, 1);
        barriers_are_ready();
        barrier_expect(shared + AT_ARRIVED, (first_four(p, rank + 1) - first_four(p, rank)) * p.split * 16);
    }
    __syncthreads();
    // Nothing is sent to a block that has not begun.
    cluster_arrive();
    const bool multiplies = threadIdx.x < MULTIPLIERS;
    Sum sums[TOKENS / 2];
    if (multiplies) {
        multiply(sums, shared, begin, end);
    } else if (threadIdx.x == MULTIPLIERS) {
        feed(p, shared, feature, begin, end);
    }
    __syncwarp();
    cluster_wait();
    if (multiplies) send(p, sums, shared, rank);
    receive(p, shared, feature, rank);
}
