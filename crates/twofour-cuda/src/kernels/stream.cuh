// What products of few tokens share whose rows a cluster of blocks takes, on sm_90a. They are bound by reading W, each byte of it once.
//
// A cluster of `split` blocks takes FEATURES rows of W and all tokens; each block sums over a part of the columns. One warp feeds STAGES buffers
// through the copy engine, deep enough to keep the memory busy; warpgroups multiply. In the end every block adds up a part of the sums of all.
//
// Defined outside: FEATURES, TOKENS, HEIGHT, THREADS, STAGES, SHARED_BYTES_ASKED, and what a file wants of `wgmma.sp`.

// A warpgroup takes HEIGHT times 64 rows. The last one may have fewer: what else it multiplies is not stored.
constexpr u32 GROUPS = (FEATURES + 64 * HEIGHT - 1) / (64 * HEIGHT), MULTIPLIERS = GROUPS * 128;
// Whether those who feed leave registers to those who multiply.
constexpr bool GIVES = THREADS == MULTIPLIERS + 128;
static_assert(GIVES || THREADS == MULTIPLIERS + 32, "a warp that feeds, or as many threads as change registers together");
typedef Sum Sums[HEIGHT][TOKENS / 2];
// Tiles of X: 128 bytes of all tokens, swizzled.
constexpr u32 ROW = 128, X_TILE_BYTES = TOKENS * ROW;
// In the end sums lie where the buffers were. Rows, a token each, are longer than they are used, for other banks.
constexpr u32 SUM_ROW = GROUPS * HEIGHT * 64 + 4;

// Barriers lie after the buffers. The host asks for 1024 more, to round up the start.
constexpr u32 AT_EMPTY = SHARED_BYTES_ASKED - 1024 - STAGES * 8, AT_FULL = AT_EMPTY - STAGES * 8;
static_assert(TOKENS * SUM_ROW * 4 <= AT_FULL, "there is room for sums");

struct Problem {
    Output to;
    u32 output;
    u32 features, tokens, steps;
    u32 split;
};

// What a block has to do: rows of W from `feature` on, and some of the steps of their columns.
struct Part {
    u32 feature, rank, begin, end;
    __device__ __forceinline__ explicit Part(const Problem& p) {
        feature = blockIdx.x / p.split * FEATURES;
        rank = cluster_rank();
        begin = p.steps * rank / p.split;
        end = p.steps * (rank + 1) / p.split;
    }
};

// A buffer after the other, and the barriers that tell who may have it.
struct Buffers {
    u32 shared, stage = 0, parity = 0;

    __device__ __forceinline__ u32 full() const { return shared + AT_FULL + 8 * stage; }
    __device__ __forceinline__ u32 empty() const { return shared + AT_EMPTY + 8 * stage; }
    __device__ __forceinline__ void next() { next_stage<STAGES>(stage, parity); }
};

// A warp has read what the barrier's buffer held.
__device__ __forceinline__ void release(u32 empty) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty);
}

template <class Work> __device__ __forceinline__ void feed(const Work& work, const Part& part, u32 shared) {
    Buffers to = {shared};
    #pragma unroll 1
    for (u32 step = part.begin; step < part.end; step++) {
        barrier_wait(to.empty(), to.parity ^ 1);
        barrier_expect(to.full(), Work::COPIED_BYTES);
        work.ask(shared, to.stage, to.full(), part.feature, step);
        to.next();
    }
}

// The tokens whose sums a block adds up begin here.
__device__ __forceinline__ u32 first_token(const Problem& p, u32 rank) { return p.tokens * rank / p.split; }

// Leaves a thread's sums in shared memory.
__device__ __forceinline__ void leave(const Sums& sums, u32 shared) {
    // As instructions leave them: rows r and r + 8, tokens 2t and 2t + 1 in a lane.
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 128 * (64 * HEIGHT) + threadIdx.x % 128 / 32 * 16 + lane / 4;
    const u32 mine = shared + (lane % 4 * 2 * SUM_ROW + row) * 4;
    #pragma unroll
    for (u32 h = 0; h < HEIGHT; h++) {
        #pragma unroll
        for (u32 i = 0; i < TOKENS / 2; i++) {
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(mine + ((i / 4 * 8 + i % 2) * SUM_ROW + h * 64 + i % 4 / 2 * 8) * 4), "r"(bits_of(sums[h][i])) : "memory");
        }
    }
}

__device__ __forceinline__ u32 address_at(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Adds up a block's tokens, four rows at a time, from all blocks of the cluster, and stores the results.
template <int KIND> __device__ __forceinline__ void add_up(const Problem& p, u32 shared, const Part& part) {
    // A thread asks for so many fours before it waits for the first.
    constexpr u32 ROW_FOURS = FEATURES / 4, FOURS = TOKENS * ROW_FOURS, AT_ONCE = FOURS >= 4 * MULTIPLIERS ? 4 : (FOURS + MULTIPLIERS - 1) / MULTIPLIERS;
    const u32 first = first_token(p, part.rank), count = (first_token(p, part.rank + 1) - first) * ROW_FOURS;
    #pragma unroll 1
    for (u32 begin = threadIdx.x; begin < count; begin += AT_ONCE * MULTIPLIERS) {
        Sum sums[AT_ONCE][4] = {};
        u32 at[AT_ONCE];
        #pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) {
            const u32 i = min(begin + j * MULTIPLIERS, count - 1);
            at[j] = ((first + i / ROW_FOURS) * SUM_ROW + i % ROW_FOURS * 4) * 4;
        }
        // Its own, then those of the others by turns, so that not all ask the same one.
        #pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) add_four(sums[j], shared + at[j]);
        #pragma unroll 1
        for (u32 on = 1; on < p.split; on++) {
            const u32 there = address_at(shared, part.rank + on < p.split ? part.rank + on : part.rank + on - p.split);
            u32 bits[AT_ONCE][4];
            #pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(bits[j][0]), "=r"(bits[j][1]), "=r"(bits[j][2]), "=r"(bits[j][3]) : "r"(there + at[j]));
            }
            #pragma unroll
            for (u32 j = 0; j < AT_ONCE; j++) {
                #pragma unroll
                for (u32 k = 0; k < 4; k++) {
                    Sum sum;
                    of_bits(sum, bits[j][k]);
                    sums[j][k] += sum;
                }
            }
        }
        #pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) {
            const u32 i = begin + j * MULTIPLIERS, f = part.feature + i % ROW_FOURS * 4;
            if (i < count && f < p.features) store_neighbours<KIND>(p.to, p.output, sums[j], f, first + i / ROW_FOURS);
        }
    }
}

// A block's whole work. `Work` knows a step: COPIED_BYTES of it, `ask(shared, stage, full, feature, step)` for them and its maps by number, null beyond the last; and
// `multiply(sums, buffers, part)` makes a warpgroup's sums of all steps.
template <class Work> __device__ __forceinline__ void run(const Work& work, const Problem& p) {
    extern __shared__ u8 memory[];
    const u32 shared = (shared_address(memory) + 1023) & ~1023u;
    static_assert(Work::BUFFER_BYTES <= AT_FULL, "the host's sum of shared memory");
    // Asked for early: the first copies need them.
    if (work.map(threadIdx.x)) prefetch(work.map(threadIdx.x));
    const Part part(p);
    if (threadIdx.x == MULTIPLIERS) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(shared + AT_FULL + 8 * stage, 1);
            barrier_init(shared + AT_EMPTY + 8 * stage, GROUPS * 4);
        }
        barriers_are_ready();
    }
    __syncthreads();
    if (threadIdx.x >= MULTIPLIERS) {
        if (GIVES) give_registers<24>();
        if (threadIdx.x == MULTIPLIERS) feed(work, part, shared);
        return;
    }
    if (GIVES) take_registers<240>();
    Sums sums;
    work.multiply(sums, Buffers{shared}, part);
    // Nobody reads from the buffers any more.
    named_barrier(1, MULTIPLIERS);
    leave(sums, shared);
    if (p.split == 1) named_barrier(1, MULTIPLIERS);
    else cluster_sync();
    by_kind(p.to, p.output, [&](auto kind) { add_up<decltype(kind)::value>(p, shared, part); });
    // Others may still read from here.
    if (p.split != 1) cluster_sync();
}
