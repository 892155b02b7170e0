// Shared parts of GEMM kernels for small batches on sm_90a, by clusters with split-K. They read each byte of W once and
// are bound by HBM bandwidth.
//
// A cluster of `split` CTAs computes FEATURES rows of W by up to TOKENS rows of X (`x_rows`; the last tile may have
// fewer). Each CTA accumulates a part of the columns, and at the end sends the other CTAs the accumulators of the rows
// that they store. The kernel is warp-specialized: producer warps fill STAGES stages by TMA, deep enough to saturate
// HBM, and consumer warpgroups multiply.
//
// Defined outside: FEATURES, TOKENS, HEIGHT, THREADS, GIVES (whether producers release registers to consumers, which
// then have TAKEN), BLOCKS (CTAs resident on an SM), STAGES, SUMS_BYTES, SHARED_BYTES_ASKED, OUTPUT (the results' type,
// or ANY_OUTPUT), KERNEL_EPILOGUE, and the `wgmma.sp` wrappers that a kernel uses.

// A consumer warpgroup computes HEIGHT times 64 rows, a warp 16 of each. The last warpgroup may have fewer; the surplus
// is not stored.
constexpr u32 GROUPS = (FEATURES + 64 * HEIGHT - 1) / (64 * HEIGHT), MULTIPLIERS = GROUPS * 128,
              ROW_FRAGMENTS = FEATURES / 16;
// Producer warps. One alone takes longer to issue the copies of all stages than their first bytes take to arrive, and
// four are no faster than two, as measured on an H200 (docs/explanation/kernels/cuda-gemm-cluster.md).
constexpr u32 PRODUCERS = 2;
static_assert(PRODUCERS <= STAGES, "a buffer for each");
static_assert(THREADS == MULTIPLIERS + 128, "a warpgroup of producers");
typedef Sum Sums[HEIGHT][TOKENS / 2];
// Tiles of X: 128 bytes of all tokens, swizzled.
constexpr u32 ROW = 128, X_TILE_BYTES = TOKENS * ROW;
// After the main loop the accumulators use the stages' memory. A row is a token; rows are padded against bank
// conflicts.
constexpr u32 SUM_ROW = GROUPS * HEIGHT * 64 + 4;
// Bytes of a warp's accumulators, which CTAs send in the registers' layout.
constexpr u32 SENT_BYTES = 16 * TOKENS * 4;

// Received accumulators follow the stages, then barriers. The host adds 1024 bytes to align the start.
constexpr u32 AT_SENT = SHARED_BYTES_ASKED - 1024 - 8, AT_EMPTY = AT_SENT - STAGES * 8, AT_FULL = AT_EMPTY - STAGES * 8,
              AT_SUMS = AT_FULL - SUMS_BYTES;
static_assert(AT_SUMS % 16 == 0, "sums are sent 16 bytes at a time");
static_assert(TOKENS * SUM_ROW * 4 <= AT_SUMS, "there is room for sums");

// An even division among the CTAs of a cluster: `each` for every one, and one more for the first `more`.
struct Share {
    u32 each, more;
    __device__ __forceinline__ u32 first(u32 rank) const { return rank * each + min(rank, more); }
};

struct Problem {
    Output to;
    u32 output;
    u32 features, tokens;
    // Clusters for all rows of W, and rows of X to a tile, a multiple of eight.
    u32 clusters, x_rows;
    // CTAs of a cluster, and each one's share of the steps, and of the rows in units of 16.
    u32 split;
    Share steps_each, fragments_each;
};

// Returns the type of results: where it comes with the launch, f32 or that of X.
__device__ __forceinline__ u32 output_of(const Problem& p) {
    return OUTPUT != ANY_OUTPUT ? (u32)OUTPUT : p.output == F32 ? (u32)F32 : (u32)ELEMENT;
}

// The work of a CTA: rows of W from `feature` on, `tokens` rows of X from `token` on, and the steps from `begin` to
// `end`. The grid's rows are clusters, first all of the first tile of X, then all of the next.
struct Part {
    u32 feature, token, tokens, rank, begin, end;
    // The rows that this CTA stores, in units of 16.
    u32 first, last;
    __device__ __forceinline__ explicit Part(const Problem& p) {
        const u32 tile = blockIdx.y / p.clusters;
        feature = (blockIdx.y - tile * p.clusters) * FEATURES;
        // The last tile starts earlier where it would not be full: results of tokens that two tiles have are computed
        // and stored twice, with the same bits.
        const bool overlaps = p.tokens > p.x_rows && !p.to.accumulate;
        token = overlaps ? min(tile * p.x_rows, p.tokens - p.x_rows) : tile * p.x_rows;
        tokens = min(p.x_rows, p.tokens - token);
        rank = blockIdx.x;
        begin = p.steps_each.first(rank);
        end = p.steps_each.first(rank + 1);
        first = p.fragments_each.first(rank);
        last = p.fragments_each.first(rank + 1);
    }
    __device__ __forceinline__ bool owns(u32 fragment) const { return fragment >= first && fragment < last; }
};

// Returns the CTA that stores these 16 rows.
__device__ __forceinline__ u32 owner_of(const Problem& p, u32 fragment) {
    u32 owner = 0;
    while (p.fragments_each.first(owner + 1) <= fragment) owner++;
    return owner;
}

// Returns the index of the h-th unit of 16 rows of the thread's warp.
__device__ __forceinline__ u32 row_fragment(u32 h) {
    return (threadIdx.x / 128 * HEIGHT + h) * 4 + threadIdx.x % 128 / 32;
}

// A position in the circular buffer of stages, and the stages' full and empty barriers.
struct Buffers {
    u32 shared, stage = 0, parity = 0;

    __device__ __forceinline__ u32 full() const { return shared + AT_FULL + 8 * stage; }
    __device__ __forceinline__ u32 empty() const { return shared + AT_EMPTY + 8 * stage; }
    __device__ __forceinline__ void next() { next_stage<STAGES>(stage, parity); }
    template <u32 COUNT> __device__ __forceinline__ void skip() {
        stage += COUNT;
        if (stage >= STAGES) {
            stage -= STAGES;
            parity ^= 1;
        }
    }
};

// Releases a stage after a warp has read it. Any one lane arrives: to find out a specific lane would take a read of a
// special register.
__device__ __forceinline__ void release(u32 empty) {
    __syncwarp();
    if (elected()) barrier_arrive(empty);
}

// A producer warp: every PRODUCERS-th step of the CTA.
template <class Work> struct Producer {
    const Work& work;
    const Part& part;
    Buffers to;
    u32 step;

    __device__ __forceinline__ Producer(const Work& work, const Part& part, u32 shared, u32 which)
        : work(work), part(part), to{shared, which}, step(part.begin + which) {}

    __device__ __forceinline__ void ask() {
        if (elected()) {
            barrier_expect(to.full(), work.copied_bytes());
            work.ask(to.shared, to.stage, to.full(), part, step);
        }
        to.skip<PRODUCERS>();
        step += PRODUCERS;
    }
    // Initializes the barriers of the stages that this warp fills first, and issues their copies before any
    // synchronization.
    __device__ __forceinline__ void begin() {
        if (elected()) {
            #pragma unroll 1
            for (Buffers first = to; first.parity == 0; first.skip<PRODUCERS>()) {
                barrier_init(first.full(), 1);
                barrier_init(first.empty(), GROUPS * 4);
            }
            barriers_are_ready();
        }
        __syncwarp();
        #pragma unroll 1
        while (to.parity == 0 && step < part.end) ask();
    }
    __device__ __forceinline__ void go_on() {
        #pragma unroll 1
        while (step < part.end) {
            barrier_wait(to.empty(), to.parity ^ 1);
            ask();
        }
    }
};

// Returns the address at which 16 rows of accumulators from another CTA arrive at `owner`.
__device__ __forceinline__ u32 sent_to(const Problem& p, u32 shared, u32 fragment, u32 owner, u32 from) {
    const u32 place = (fragment - p.fragments_each.first(owner)) * (p.split - 1) + (from < owner ? from : from - 1);
    return shared + AT_SUMS + place * SENT_BYTES + threadIdx.x % 32 * 16;
}

// Sends each CTA the accumulators of its rows.
__device__ __forceinline__ void send(const Sums& sums, const Problem& p, const Part& part, u32 shared) {
    #pragma unroll
    for (u32 h = 0; h < HEIGHT; h++) {
        const u32 mine = row_fragment(h);
        if (mine >= ROW_FRAGMENTS || part.owns(mine)) continue;
        const u32 owner = owner_of(p, mine);
        const u32 there = address_at(sent_to(p, shared, mine, owner, part.rank), owner),
                  barrier = address_at(shared + AT_SENT, owner);
#pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i += 4) {
            send_four(there + i * 128, bits_of(sums[h][i]), bits_of(sums[h][i + 1]), bits_of(sums[h][i + 2]),
                bits_of(sums[h][i + 3]), barrier);
        }
    }
}

// Adds the accumulators that other CTAs have sent.
__device__ __forceinline__ void receive(Sums& sums, const Problem& p, const Part& part, u32 shared) {
    barrier_wait_for_cluster(shared + AT_SENT, 0);
    #pragma unroll
    for (u32 h = 0; h < HEIGHT; h++) {
        const u32 mine = row_fragment(h);
        if (!part.owns(mine)) continue;
        #pragma unroll 1
        for (u32 from = 0; from < p.split; from++) {
            if (from == part.rank) continue;
            const u32 here = sent_to(p, shared, mine, part.rank, from);
            #pragma unroll
            for (u32 i = 0; i < TOKENS / 2; i += 4) add_four((Sum(&)[4])sums[h][i], here + i * 128);
        }
    }
}

// What the epilogue does with the thread's rows r = `lane / 4` and r + 8 of every 16.
struct Rows {
    Factors of[HEIGHT][2];

    template <int KIND> __device__ __forceinline__ void load(const Problem& p, const Part& part) {
        #pragma unroll
        for (u32 h = 0; h < HEIGHT; h++) {
            const u32 f = part.feature + row_fragment(h) * 16 + threadIdx.x % 32 / 4;
            of[h][0] = factors_of_feature<KIND>(p.to, p.features, f);
            of[h][1] = factors_of_feature<KIND>(p.to, p.features, f + 8);
        }
    }
};

// Stores 16 rows of results of a warp, which are there as rows of 16 features for each token.
__device__ __forceinline__ void store_fragment(const Problem& p, const Part& part, u32 here, u32 mine) {
    const u32 lane = threadIdx.x % 32, from = here + lane * 16, f = part.feature + mine * 16 + lane % 2 * 8;
    #pragma unroll
    for (u32 t = lane / 2; t < TOKENS; t += 16) {
        const uint4 eight = four_words(from + t / 16 * 512);
        if (t < part.tokens && f < p.features)
            *(uint4*)((u16*)p.to.data + (part.token + t) * p.to.stride_token + f) = eight;
    }
}

// Computes for each token of the CTA what the epilogue does with it, 1 and 0 where nothing, and writes them to a warp's
// shared memory.
template <int KIND> __device__ __forceinline__ void leave_tokens(const Problem& p, const Part& part, u32 at) {
    const u32 lane = threadIdx.x % 32;
    #pragma unroll
    for (u32 t = lane; t < (TOKENS + 31) / 32 * 32; t += 32) {
        const Factors of = factors_of_token<KIND>(p.to, p.tokens, part.token + t);
        if (t < TOKENS)
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at + t * 8), "f"(of.scale), "f"(of.bias) : "memory");
    }
    __syncwarp();
}

// Stores a warp's results where they are 16-bit and features are contiguous. The accumulator layout has two tokens of a
// row in a lane, 8x8; a transpose through shared memory makes them eight rows of a token.
template <int KIND, int ACTIVATION>
__device__ __forceinline__ void store_fragments(const Sums& sums, const Problem& p, const Part& part, u32 shared) {
    // Of a warp: results, and the tokens' scales and biases.
    constexpr u32 TOKEN_BYTES = 32, AT_FACTORS = TOKENS * TOKEN_BYTES,
                  WARP_BYTES = AT_FACTORS + (is_finished(KIND) ? TOKENS * 8 : 0);
    static_assert(MULTIPLIERS / 32 * WARP_BYTES <= AT_SUMS, "there is room for results");
    const u32 lane = threadIdx.x % 32, here = shared + threadIdx.x / 32 * WARP_BYTES,
              factors = here + AT_FACTORS + lane % 4 * 16;
    // Four 8x8 matrices: two units of eight rows for eight tokens, and for the next eight tokens. With eight tokens
    // there are two.
    const u32 to = here + (lane / 16 * 8 + lane % 8) * TOKEN_BYTES + lane / 8 % 2 * 16;
    Rows rows;
    if constexpr (!is_plain(KIND)) rows.load<KIND>(p, part);
    if constexpr (is_finished(KIND)) leave_tokens<KIND>(p, part, here + AT_FACTORS);
    const bool relu = is_finished(KIND) && ACTIVATION == NONE && p.to.activation == RELU;
    #pragma unroll
    for (u32 h = 0; h < HEIGHT; h++) {
        const u32 mine = row_fragment(h);
        if (!part.owns(mine)) continue;
        // The results of two tokens for rows r and r + 8.
        const auto results = [&](u32 eight) {
            float values[4];
            Factors tokens[2] = {{1.0f, 0.0f}, {1.0f, 0.0f}};
            if constexpr (is_finished(KIND)) {
                const uint4 words = four_words(factors + eight * 64);
                tokens[0] = {__uint_as_float(words.x), __uint_as_float(words.y)};
                tokens[1] = {__uint_as_float(words.z), __uint_as_float(words.w)};
            }
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float sum = (float)sums[h][eight * 4 + i];
                const Factors& row = rows.of[h][i / 2];
                values[i] = is_plain(KIND)    ? sum
                            : is_biased(KIND) ? sum + row.bias
                                              : activated<ACTIVATION, F16>(scaled(sum, row, tokens[i % 2]));
                if (relu) values[i] = larger(values[i], 0.0f);
            }
            return make_uint2(narrow_two<KIND>(values[0], values[1]), narrow_two<KIND>(values[2], values[3]));
        };
        if (h != 0) __syncwarp();
        #pragma unroll
        for (u32 eight = 0; eight < TOKENS / 8; eight += 2) {
            const uint2 first = results(eight);
            if constexpr (TOKENS == 8) {
                store_transposed(to, first.x, first.y);
            } else {
                const uint2 second = results(eight + 1);
                store_transposed(to + eight * 8 * TOKEN_BYTES, first.x, first.y, second.x, second.y);
            }
        }
        __syncwarp();
        store_fragment(p, part, here, mine);
    }
}

// Writes a thread's accumulators to shared memory.
__device__ __forceinline__ void leave(const Sums& sums, u32 shared) {
    // The accumulator layout of `wgmma`: a lane holds rows r and r + 8, tokens 2t and 2t + 1.
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 128 * (64 * HEIGHT) + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const u32 mine = shared + (lane % 4 * 2 * SUM_ROW + row) * 4;
    #pragma unroll
    for (u32 h = 0; h < HEIGHT; h++) {
        #pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++) {
            asm volatile(
                "st.shared.u32 [%0], %1;" ::"r"(mine + ((i / 4 * 8 + i % 2) * SUM_ROW + h * 64 + i % 4 / 2 * 8) * 4),
                "r"(bits_of(sums[h][i]))
                : "memory");
        }
    }
}

// Stores the results of the CTA's own rows through shared memory, four neighbouring ones at a time.
template <int KIND>
__device__ __forceinline__ void store_own(const Sums& sums, const Problem& p, const Part& part, u32 shared) {
    leave(sums, shared);
    named_barrier(1, MULTIPLIERS);
    const u32 row_fours = (part.last - part.first) * 4, count = part.tokens * row_fours;
    #pragma unroll 1
    for (u32 i = threadIdx.x; i < count; i += MULTIPLIERS) {
        const u32 t = i / row_fours, row = part.first * 16 + (i - t * row_fours) * 4, f = part.feature + row;
        Sum four[4] = {};
        add_four(four, shared + (t * SUM_ROW + row) * 4);
        if (f < p.features) store_neighbours<KIND>(p.to, output_of(p), four, p.features, f, part.token + t);
    }
}

__device__ __forceinline__ void fence_accumulators(Sums& sums) {
    #pragma unroll
    for (u32 h = 0; h < HEIGHT; h++) {
        #pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++) fence_accumulator(sums[h][i]);
    }
}

// The body of a kernel. `Work` has `copied_bytes()`, the bytes of a step, `ask(shared, stage, full, part, step)`, which
// issues its copies, and `multiply(sums, buffers, part)`, which accumulates all steps of a warpgroup.
template <class Work> __device__ __forceinline__ void run(const Work& work, const Problem& p) {
    extern __shared__ u8 memory[];
    const u32 shared = (shared_address(memory) + 1023) & ~1023u;
    static_assert(Work::BUFFER_BYTES <= AT_SUMS, "the host's sum of shared memory");
    const Part part(p);
    const u32 warp = uniform(threadIdx.x / 32), which = warp - MULTIPLIERS / 32;
    const bool is_producer = which < PRODUCERS;
    Producer<Work> producer(work, part, shared, which);
    if (is_producer) producer.begin();
    ask_for_features(p.to, output_of(p), p.features, part.feature, FEATURES, threadIdx.x);
    ask_for_tokens(p.to, part.token, part.tokens, threadIdx.x);
    if (threadIdx.x == 0) {
        barrier_init(shared + AT_SENT, 1);
        barriers_are_ready();
        if (p.split != 1) barrier_expect(shared + AT_SENT, (part.last - part.first) * (p.split - 1) * SENT_BYTES);
    }
    __syncthreads();
    // Before a CTA sends, it waits until the other CTAs' barriers are initialized, which the fences have made visible.
    if (p.split != 1) cluster_arrive_relaxed();
    if (warp >= MULTIPLIERS / 32) {
        if (GIVES) give_registers<24>();
        // Only for tools that follow barriers alone: no stage is released before the consumers have passed the cluster
        // barrier.
        if (p.split != 1) cluster_wait();
        if (is_producer) producer.go_on();
        return;
    }
    if (GIVES) take_registers<TAKEN>();
    if (p.split != 1) cluster_wait();
    Sums sums;
    work.multiply(sums, Buffers{shared}, part);
    fence_accumulators(sums);
    if (p.split != 1) send(sums, p, part, shared);
    // No warp reads from the stages any more: results go through their memory.
    named_barrier(1, MULTIPLIERS);
    if (p.split != 1) receive(sums, p, part, shared);
    by_epilogue<KERNEL_EPILOGUE>(p.to, output_of(p), [&](auto kind, auto activation) {
        constexpr int KIND = decltype(kind)::value;
        if constexpr (is_plain(KIND) || is_biased(KIND) || is_finished(KIND))
            store_fragments<KIND, decltype(activation)::value>(sums, p, part, shared);
        else store_own<KIND>(sums, p, part, shared);
    });
}
