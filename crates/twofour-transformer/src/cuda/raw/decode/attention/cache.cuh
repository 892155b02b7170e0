// Attention of new tokens over a cache of keys and values, with sums in f32 (flash-decoding: Dao et al.,
// "Flash-Decoding for long-context inference", 2023). The cache's length is split over CTAs at fixed positions; the
// last CTA of a head to arrive adds the partial results in the order of the splits, so results repeat bit for bit.
// Positions are read from device memory: a graph is replayed at every position.
//
// Queries that share a key-value head are the rows of a CTA, and so are those of neighbouring tokens. This file has
// what the kernels share: `floats.cu` multiplies f32, `products.cu` f16 and bf16 on the tensor cores.
//
// Defined outside: ELEMENT, DIM, TILE (keys), CTAS (for each SM), MAX_SPLITS.

struct Attention {
    // [batch * count, (heads + 2 kv_heads) DIM]: queries, keys and values of the new tokens, not rotated
    const void* qkv;
    void* k;                 // [batch, kv_heads, capacity, DIM]
    void* v;
    void* out;               // [batch * count, heads DIM]
    const u32* positions;    // [batch]: tokens before the new ones
    const float* cos;        // [capacity, DIM / 2], or null for no rotation
    const float* sin;
    const float* query_gain; // [DIM]: RMS normalization of each head before the rotation, or null
    const float* key_gain;
    const float* sinks;      // [heads]: a score of each head whose share is of no value, or null
    float* partial;          // [row blocks, splits, ROWS (DIM + 4)]
    u32* arrived;            // [row blocks]: zeros between calls
    u32 batch, count, heads, kv_heads, capacity;
    u32 splits, tiles;       // splits of the cache, and tiles of each
    u32 window;              // keys that a token attends to, itself included; at most 2^31 - 1
    float epsilon;
    float scale;             // of scores, for powers of two; with a soft cap, of twice the score by the cap
    float soft_cap;          // of scores, for powers of two; 0 for none
};

constexpr u32 THREADS = 128, WARPS = THREADS / 32;
constexpr u32 HALF = DIM / 2, EACH = (HALF + 31) / 32;

// Loads a head, normalizes and rotates it (Su et al., "RoFormer", 2021): a warp has pairs (i, i + DIM / 2), lane after
// lane.
__device__ __forceinline__ void turned(
    const Attention& p, const Raw* head, const float* gain, u32 position, float (&low)[EACH], float (&high)[EACH]) {
    const u32 lane = threadIdx.x % 32;
    float squares = 0.0f;
    unrolled<EACH>([&](auto i) {
        const u32 pair = lane + 32 * i.value;
        low[i.value] = pair < HALF ? widen<ELEMENT>(head[pair]) : 0.0f;
        high[i.value] = pair < HALF ? widen<ELEMENT>(head[pair + HALF]) : 0.0f;
        squares += low[i.value] * low[i.value] + high[i.value] * high[i.value];
    });
    if (gain) {
        for (u32 distance = 16; distance > 0; distance /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, distance);
        const float rstd = 1.0f / sqrtf(squares / (float)DIM + p.epsilon);
        unrolled<EACH>([&](auto i) {
            const u32 pair = lane + 32 * i.value;
            if (pair < HALF) low[i.value] *= rstd * gain[pair], high[i.value] *= rstd * gain[pair + HALF];
        });
    }
    if (!p.cos) return;
    unrolled<EACH>([&](auto i) {
        const u32 pair = lane + 32 * i.value;
        if (pair < HALF) {
            const float cos = p.cos[(u64)position * HALF + pair], sin = p.sin[(u64)position * HALF + pair],
                        a = low[i.value], b = high[i.value];
            low[i.value] = a * cos - b * sin;
            high[i.value] = b * cos + a * sin;
        }
    });
}

__device__ __forceinline__ const Raw* head_of(const Attention& p, u64 token, u32 head) {
    return (const Raw*)p.qkv + (token * (p.heads + 2 * p.kv_heads) + head) * DIM;
}

// A warp writes a token's key of one head to the cache, rotated.
__device__ __forceinline__ void append_key(const Attention& p, u32 sequence, u32 token, u32 kv_head, u32 position) {
    float low[EACH], high[EACH];
    turned(p, head_of(p, (u64)sequence * p.count + token, p.heads + kv_head), p.key_gain, position, low, high);
    Raw* const to = (Raw*)p.k + (((u64)sequence * p.kv_heads + kv_head) * p.capacity + position) * DIM;
    unrolled<EACH>([&](auto i) {
        const u32 pair = threadIdx.x % 32 + 32 * i.value;
        if (pair < HALF) to[pair] = narrow<ELEMENT>(low[i.value]), to[pair + HALF] = narrow<ELEMENT>(high[i.value]);
    });
}

// A warp copies a token's value of one head to the cache.
__device__ __forceinline__ void append_value(const Attention& p, u32 sequence, u32 token, u32 kv_head, u32 position) {
    const Raw* const from = head_of(p, (u64)sequence * p.count + token, p.heads + p.kv_heads + kv_head);
    Raw* const to = (Raw*)p.v + (((u64)sequence * p.kv_heads + kv_head) * p.capacity + position) * DIM;
    for (u32 i = threadIdx.x % 32; i < DIM; i += 32) to[i] = from[i];
}

// Appends the keys and values of several tokens: a warp for each head of keys and of values.
extern "C" __global__ void __launch_bounds__(128) append(const __grid_constant__ Attention p) {
    const u64 index = (u64)blockIdx.x * WARPS + threadIdx.x / 32, per_token = 2 * p.kv_heads;
    const u64 row = index / per_token;
    if (row >= (u64)p.batch * p.count) return;
    const u32 head = (u32)(index - row * per_token), sequence = (u32)(row / p.count),
              token = (u32)(row - (u64)sequence * p.count);
    const u32 position = p.positions[sequence] + token;
    if (position >= p.capacity) return;
    if (head < p.kv_heads) append_key(p, sequence, token, head, position);
    else append_value(p, sequence, token, head - p.kv_heads, position);
}

// Returns a score with the soft cap: soft_cap tanh(x), from 2 x / ln 2. A key that is not attended to stays so.
__device__ __forceinline__ float capped(const Attention& p, float score) {
    if (p.soft_cap == 0.0f || score == -INFINITE) return score;
    return p.soft_cap - __fdividef(2.0f * p.soft_cap, 1.0f + exp2f(score));
}

// What a CTA computes: rows of queries, over a split of the keys of one head of a sequence.
struct Part {
    u32 sequence, kv_head, group, split, first_split, last_split, first_row, rows;
    u32 before;   // tokens of the sequence before the new ones
    u32 from, to; // the keys
    u64 cache;    // the place of the head's first key, and of its first value

    // Returns the new token that a row is of, and its head of queries.
    __device__ __forceinline__ u32 token(u32 row) const { return (first_row + row) / group; }
    __device__ __forceinline__ u32 head(u32 row) const { return kv_head * group + (first_row + row) % group; }
    // Returns the end of the keys that a row's token attends to.
    __device__ __forceinline__ u32 limit(u32 row) const { return before + token(row) + 1; }
};

// Returns whether the CTA, of ROWS rows, has any keys.
template <int ROWS> __device__ __forceinline__ bool find_part(const Attention& p, Part& part) {
    part.group = p.heads / p.kv_heads;
    const u32 all_rows = part.group * p.count, blocks = (all_rows + ROWS - 1) / ROWS;
    part.first_row = blockIdx.x % blocks * ROWS;
    part.rows = min((u32)ROWS, all_rows - part.first_row);
    part.kv_head = blockIdx.x / blocks % p.kv_heads;
    part.sequence = blockIdx.x / blocks / p.kv_heads;
    part.split = blockIdx.y;
    part.before = p.positions[part.sequence];
    if (part.before + p.count > p.capacity) return false;
    // The keys that any of the rows attends to, and the splits that hold them.
    const u32 first = part.limit(0), end = part.limit(part.rows - 1);
    const u32 begin = first > p.window ? first - p.window : 0, span = p.tiles * TILE;
    part.first_split = begin / span, part.last_split = (end - 1) / span;
    if (part.split < part.first_split || part.split > part.last_split) return false;
    part.from = max(begin, part.split * span), part.to = min(end, (part.split + 1) * span);
    part.cache = ((u64)part.sequence * p.kv_heads + part.kv_head) * p.capacity * DIM;
    return true;
}

// Loads the query of a row, which the warp has, normalized and rotated; zeros for a row that there is none of.
__device__ __forceinline__ void query_of(
    const Attention& p, const Part& part, u32 row, float (&low)[EACH], float (&high)[EACH]) {
    unrolled<EACH>([&](auto i) { low[i.value] = high[i.value] = 0.0f; });
    if (row >= part.rows) return;
    const u32 token = part.token(row);
    const Raw* const head = head_of(p, (u64)part.sequence * p.count + token, part.head(row));
    turned(p, head, p.query_gain, part.before + token, low, high);
}

// The CTA of the last split appends the one new token's key and value; other warps may read them after a barrier.
__device__ __forceinline__ void append_one(const Attention& p, const Part& part) {
    if (part.split != part.last_split) return;
    const u32 warp = threadIdx.x / 32;
    if (warp == WARPS - 1) append_key(p, part.sequence, 0, part.kv_head, part.before);
    if (warp == WARPS - 2) append_value(p, part.sequence, 0, part.kv_head, part.before);
}

// Writes the rows' results from each warp's sums of values, the CTA's largest scores, and its sums of shares. Where
// there are several splits they go to the workspace, and the last CTA to arrive adds them.
template <int ROWS> __device__ __forceinline__ void finish(const Attention& p, const Part& part,
    float (&parts)[WARPS][ROWS][DIM], const float (&largest)[ROWS], float (&sums)[ROWS]) {
    __shared__ float shares[ROWS][MAX_SPLITS];
    __shared__ u32 is_last;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_split = part.first_split,
              last_split = part.last_split;
    __syncthreads();
    const u32 active = last_split - first_split + 1;
    const auto write = [&](u32 at, float value) {
        const u32 r = at / DIM;
        const u64 token = (u64)part.sequence * p.count + part.token(r);
        ((Raw*)p.out)[(token * p.heads + part.head(r)) * DIM + at % DIM] = narrow<ELEMENT>(value);
    };
    const auto total = [&](u32 at) {
        float sum = (&parts[0][0][0])[at];
        for (u32 w = 1; w < WARPS; w++) sum += (&parts[w][0][0])[at];
        return sum;
    };
    // The sum of a row's shares, with its sink's.
    const auto whole = [&](u32 r, float most, float sum) {
        if (!p.sinks) return sum;
        return sum + exp2f(p.sinks[part.head(r)] * 1.44269504f - most);
    };
    if (active == 1) {
        for (u32 at = threadIdx.x; at < part.rows * DIM; at += THREADS) {
            write(at, total(at) / whole(at / DIM, largest[at / DIM], sums[at / DIM]));
        }
        return;
    }
    // Two more elements of a row keep each split's results aligned.
    constexpr u32 SIZE = ROWS * (DIM + 4);
    float* const all = p.partial + (u64)blockIdx.x * p.splits * SIZE;
    float* const mine = all + (u64)part.split * SIZE;
    for (u32 at = threadIdx.x; at < part.rows * DIM; at += THREADS) mine[at] = total(at);
    if (threadIdx.x < ROWS)
        mine[ROWS * DIM + threadIdx.x] = largest[threadIdx.x],
                          mine[ROWS * DIM + ROWS + threadIdx.x] = sums[threadIdx.x];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(p.arrived + blockIdx.x, 1u) == active - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    // What each split's sums count: a warp has a row, a lane every 32nd split.
    for (u32 r = warp; r < part.rows; r += WARPS) {
        const float* const of_row = all + ROWS * DIM + r;
        float own[MAX_SPLITS / 32], counted[MAX_SPLITS / 32], most = -INFINITE, sum = 0.0f;
        unrolled<MAX_SPLITS / 32>([&](auto i) {
            const u32 s = first_split + lane + 32 * i.value;
            const bool is_there = s <= last_split;
            own[i.value] = is_there ? __ldcg(of_row + (u64)s * SIZE) : -INFINITE;
            counted[i.value] = is_there ? __ldcg(of_row + (u64)s * SIZE + ROWS) : 0.0f;
            most = fmaxf(most, own[i.value]);
        });
        for (u32 distance = 16; distance > 0; distance /= 2)
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
        unrolled<MAX_SPLITS / 32>([&](auto i) {
            const float share = exp2f(own[i.value] - most);
            shares[r][lane + 32 * i.value] = share;
            sum += share * counted[i.value];
        });
        for (u32 distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
        if (lane == 0) sums[r] = whole(r, most, sum);
    }
    __syncthreads();
    for (u32 at = 4 * threadIdx.x; at < part.rows * DIM; at += 4 * THREADS) {
        const u32 r = at / DIM;
        float4 sum = {};
        // Each turn waits for memory once.
        #pragma unroll 16
        for (u32 s = first_split; s <= last_split; s++) {
            const float4 four = __ldcg((const float4*)(all + (u64)s * SIZE + at));
            const float share = shares[r][s - first_split];
            sum.x += share * four.x, sum.y += share * four.y, sum.z += share * four.z, sum.w += share * four.w;
        }
        write(at, sum.x / sums[r]), write(at + 1, sum.y / sums[r]), write(at + 2, sum.z / sums[r]),
            write(at + 3, sum.w / sums[r]);
    }
    if (threadIdx.x == 0) p.arrived[blockIdx.x] = 0;
}

// The kernels for ROWS rows, of which at least LEAST CTAs run on an SM at a time. `attend<ROWS, APPENDS>` is what a CTA
// does; it appends the one new token itself where APPENDS says so.
#define KERNELS(ROWS, LEAST)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128, LEAST) attend_##ROWS(const __grid_constant__ Attention p) { \
        attend<ROWS, false>(p);                                                                                   \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(128, LEAST)                                                      \
        append_and_attend_##ROWS(const __grid_constant__ Attention p) {                                           \
        attend<ROWS, true>(p);                                                                                    \
    }
