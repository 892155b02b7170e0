// act(alpha * scales * W X^T + bias) with a 2:4 W and few tokens on sm_90a: bound by reading W, each byte of it once.
//
// A cluster of `split` blocks takes 64 * GROUPS rows of W and all tokens; each block sums over a part of the columns. One warp feeds STAGES buffers
// through the copy engine, deep enough to keep the memory busy; GROUPS warpgroups multiply. In the end every block adds up a part of the sums of all.
//
// A step of 128 bytes of W's rows needs 256 bytes of X's rows, as two tiles of 128, and two atoms of metadata for every 64 features, in the order that
// the products of many tokens want too (gemm_sm90.cu).
//
// Defined outside: ELEMENT, GROUPS, TOKENS, STAGES, and `product` for ELEMENT and TOKENS.

constexpr int FEATURES = 64 * GROUPS;
constexpr int ELEMENT_BYTES = sizeof(Bits<ELEMENT>::type);
constexpr int K_STEP = 256 / ELEMENT_BYTES;
constexpr int ROW = 128;
constexpr int W_BYTES = FEATURES * ROW, X_TILE_BYTES = TOKENS * ROW, X_BYTES = 2 * X_TILE_BYTES;
constexpr int ATOM_BYTES = 64 * (K_STEP / 2) / 8;
constexpr int META_BYTES = 2 * GROUPS * ATOM_BYTES;

constexpr int AT_X = STAGES * W_BYTES;
constexpr int AT_META = AT_X + STAGES * X_BYTES;
// Sums are sent four at a time, as a thread has them.
constexpr bool SENDS = TOKENS <= 16;
constexpr u32 MULTIPLIERS = GROUPS * 128, FOURS = TOKENS / 8 * MULTIPLIERS;
// Most blocks of a cluster.
constexpr u32 MOST_BLOCKS = 8;
constexpr int AT_RECEIVED = AT_META + STAGES * META_BYTES;
constexpr int AT_FULL = AT_RECEIVED + (SENDS ? (FOURS + MOST_BLOCKS) * 16 : 0);
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;
constexpr int AT_ARRIVED = AT_EMPTY + STAGES * 8;
constexpr int SHARED_BYTES = AT_ARRIVED + 16;
// Many sums lie where the buffers were. Their rows are longer than they are used, for other banks.
constexpr int SUM_ROW = FEATURES + 4;
static_assert(SENDS || TOKENS * SUM_ROW * 4 <= AT_FULL, "there is room for sums");
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
        copy_tile(shared + AT_META + stage * META_BYTES, &p.meta, feature / 64 * (ATOM_BYTES / 8), step * 2, full);
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
    u32 stage = 0, parity = 0;
    #pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0;
    for (u32 step = begin; step < end; step++) {
        barrier_wait(shared + AT_FULL + 8 * stage, parity);
        u32 codes[2][WORDS];
        #pragma unroll
        for (int atom = 0; atom < 2; atom++) {
            #pragma unroll
            for (int i = 0; i < WORDS; i++) {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes[atom][i]) : "r"(meta + stage * META_BYTES + atom * GROUPS * ATOM_BYTES + 8 * i));
            }
        }
        const u64 w_now = operand_after(weight, stage * W_BYTES), x_now = operand_after(x, stage * X_BYTES);
        products_begin();
        #pragma unroll
        for (int atom = 0; atom < 2; atom++) {
            const u64 w = operand_after(w_now, atom * ROW / 2), x = operand_after(x_now, atom * X_TILE_BYTES);
            product<0>(sums, w, x, codes[atom][0]);
            product<ELEMENT_BYTES == 2 ? 1 : 0>(sums, operand_after(w, ROW / 4), operand_after(x, ROW / 2), codes[atom][WORDS - 1]);
        }
        products_commit();
        products_wait<0>();
        __syncwarp();
        if (lane == 0) barrier_arrive(shared + AT_EMPTY + 8 * stage);
        next_stage<STAGES>(stage, parity);
    }
}

// Sums of four neighbouring features over all blocks of the cluster; all of them are asked for before any is waited for.
__device__ __forceinline__ void total(u32 address, u32 split, Sum (&sums)[4]) {
    u32 bits[MOST_BLOCKS][4];
    #pragma unroll
    for (u32 rank = 0; rank < MOST_BLOCKS; rank++) {
        if (rank < split) {
            asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %4, %5; ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [there];}"
                         : "=r"(bits[rank][0]), "=r"(bits[rank][1]), "=r"(bits[rank][2]), "=r"(bits[rank][3])
                         : "r"(address), "r"(rank)
                         : "memory");
        }
    }
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        sums[i] = 0;
        #pragma unroll
        for (u32 rank = 0; rank < MOST_BLOCKS; rank++) {
            Sum part;
            of_bits(part, bits[rank][i]);
            if (rank < split) sums[i] += part;
        }
    }
}

// Four neighbouring results of a token, at once where they are contiguous.
template <class Out> struct alignas(4 * sizeof(Out)) Four { Out of[4]; };

template <int OUTPUT> __device__ __forceinline__ typename Result<OUTPUT>::Type finished(const Parameters& p, Sum sum, u32 f, u32 t) {
    const float scale = scale_of(p.to, f, t);
    const float bias = p.to.bias ? Result<OUTPUT>::bias(p.to.bias, f) : 0.0f;
    return Result<OUTPUT>::of(sum, activated(p.to.activation, fmaf((float)sum, scale, bias)));
}

// The results of the sums that all blocks left: a part of them.
template <int OUTPUT> __device__ __forceinline__ void store_left(const Parameters& p, u32 shared, u32 feature, u32 rank) {
    typedef typename Result<OUTPUT>::Type Out;
    for (u32 i = rank * THREADS + threadIdx.x; i < p.tokens * (FEATURES / 4); i += p.split * THREADS) {
        const u32 inside = i % (FEATURES / 4) * 4, f = feature + inside, t = i / (FEATURES / 4);
        if (f >= p.features) continue;
        Sum sums[4];
        total(shared + 4 * (t * SUM_ROW + inside), p.split, sums);
        Four<Out> results;
        #pragma unroll
        for (int j = 0; j < 4; j++) results.of[j] = finished<OUTPUT>(p, sums[j], f + j, t);
        Out* to = (Out*)p.to.data + f * p.to.stride_feature + t * p.to.stride_token;
        if (p.to.stride_feature == 1) {
            *(Four<Out>*)to = results;
        } else {
            #pragma unroll
            for (int j = 0; j < 4; j++) to[j * p.to.stride_feature] = results.of[j];
        }
    }
}

// The results of four sums as thread `which % MULTIPLIERS` had them: of features `row` and `row + 8`, and of two tokens.
template <int OUTPUT> __device__ __forceinline__ void store_four(const Parameters& p, const Sum (&sums)[4], u32 feature, u32 which) {
    typedef typename Result<OUTPUT>::Type Out;
    const u32 thread = which % MULTIPLIERS;
    const u32 f = feature + thread / 32 * 16 + thread % 32 / 4, t = which / MULTIPLIERS * 8 + thread % 4 * 2;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const u32 row = f + i / 2 * 8, token = t + i % 2;
        if (row < p.features && token < p.tokens) {
            ((Out*)p.to.data)[row * p.to.stride_feature + token * p.to.stride_token] = finished<OUTPUT>(p, sums[i], row, token);
        }
    }
}

__device__ __forceinline__ void store_four(const Parameters& p, const Sum (&sums)[4], u32 feature, u32 which) {
    if (p.output == BF16) store_four<BF16>(p, sums, feature, which);
    if (p.output == F16) store_four<F16>(p, sums, feature, which);
    if (p.output == F32) store_four<F32>(p, sums, feature, which);
    if (p.output == I32) store_four<I32>(p, sums, feature, which);
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
        asm volatile(
            "{.reg .b32 there, arrived; mapa.shared::cluster.u32 there, %0, %6; mapa.shared::cluster.u32 arrived, %5, %6;"
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%1, %2, %3, %4}, [arrived];}" ::"r"(to),
            "r"(bits_of(sums[4 * i])), "r"(bits_of(sums[4 * i + 1])), "r"(bits_of(sums[4 * i + 2])), "r"(bits_of(sums[4 * i + 3])),
            "r"(shared + AT_ARRIVED), "r"(owner)
            : "memory");
    }
}

// Adds up what this block was sent.
__device__ __forceinline__ void receive(const Parameters& p, u32 shared, u32 feature, u32 rank) {
    barrier_wait(shared + AT_ARRIVED, 0);
    const u32 first = first_four(p, rank), count = first_four(p, rank + 1) - first, most = (FOURS + p.split - 1) / p.split;
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        Sum sums[4] = {};
        #pragma unroll
        for (u32 from = 0; from < MOST_BLOCKS; from++) {
            if (from >= p.split) break;
            u32 bits[4];
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(bits[0]), "=r"(bits[1]), "=r"(bits[2]), "=r"(bits[3])
                         : "r"(shared + AT_RECEIVED + (from * most + i) * 16)
                         : "memory");
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                Sum part;
                of_bits(part, bits[j]);
                sums[j] += part;
            }
        }
        store_four(p, sums, feature, first + i);
    }
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
        if (SENDS && p.split > 1) barrier_expect(shared + AT_ARRIVED, (first_four(p, rank + 1) - first_four(p, rank)) * p.split * 16);
    }
    __syncthreads();
    // Nothing is sent to a block that has not begun.
    if (SENDS && p.split > 1) cluster_arrive();
    const bool multiplies = threadIdx.x < MULTIPLIERS;
    Sum sums[TOKENS / 2];
    if (multiplies) {
        multiply(sums, shared, begin, end);
    } else if (threadIdx.x == MULTIPLIERS) {
        feed(p, shared, feature, begin, end);
    }
    if constexpr (SENDS) {
        if (p.split == 1) {
            if (!multiplies) return;
            #pragma unroll
            for (int i = 0; i < TOKENS / 8; i++) {
                const Sum four[4] = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
                store_four(p, four, feature, i * MULTIPLIERS + threadIdx.x);
            }
            return;
        }
        __syncwarp();
        cluster_wait();
        if (multiplies) send(p, sums, shared, rank);
        receive(p, shared, feature, rank);
        return;
    }
    // Nobody reads from the buffers any more.
    __syncthreads();
    if (multiplies) {
        const u32 row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
        #pragma unroll
        for (int i = 0; i < TOKENS / 2; i++) {
            const u32 f = row + i / 2 % 2 * 8, t = column + i / 4 * 8 + i % 2;
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + 4 * (t * SUM_ROW + f)), "r"(bits_of(sums[i])) : "memory");
        }
    }
    cluster_sync();
    if (p.output == BF16) store_left<BF16>(p, shared, feature, rank);
    if (p.output == F16) store_left<F16>(p, shared, feature, rank);
    if (p.output == F32) store_left<F32>(p, shared, feature, rank);
    if (p.output == I32) store_left<I32>(p, shared, feature, rank);
    // Nobody goes while another of the cluster may still read from it.
    cluster_sync();
}
