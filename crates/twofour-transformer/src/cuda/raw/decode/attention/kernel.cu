// Attention of new tokens over a cache of keys and values, in f32 (flash-decoding: Dao et al., "Flash-Decoding for
// long-context inference", 2023). The cache's length is split over CTAs at fixed positions; the last CTA of a head to
// arrive adds the partial results in the order of the splits, so results repeat bit for bit. Positions are read from
// device memory: a graph is replayed at every position.
//
// Queries that share a key-value head are the rows of a CTA, and so are those of neighbouring tokens. A key's elements
// are spread over LANES lanes.
//
// Defined outside: ELEMENT, DIM, MOST_SPLITS.

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

// Heads of more than 128 elements take twice the lanes, and tiles of half the keys: registers stay the same.
constexpr u32 THREADS = 128, WARPS = THREADS / 32, TILE = DIM > 128 ? 32 : 64;
constexpr u32 LANES = DIM > 128 ? 16 : DIM / WIDTH < 8 ? DIM / WIDTH : 8, PER = DIM / LANES, VECTORS = PER / WIDTH;
constexpr u32 AT_ONCE = THREADS / LANES, PASSES = TILE / AT_ONCE;
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

// Adds the lanes' partial results over the groups of LANES lanes. While a lane has several rows, it hands half of them
// to the lane at `DISTANCE` and keeps the others.
template <int ROWS, u32 DISTANCE>
__device__ __forceinline__ void across_lanes(float (*o)[PER], u32& row, bool& writes) {
    if constexpr (DISTANCE >= LANES) {
        if constexpr (ROWS > 1) {
            const bool upper = threadIdx.x & DISTANCE;
            unrolled<ROWS / 2>([&](auto r) {
                unrolled<PER>([&](auto e) {
                    const float first = o[r.value][e.value], second = o[r.value + ROWS / 2][e.value];
                    const float sent = upper ? first : second, kept = upper ? second : first;
                    o[r.value][e.value] = kept + __shfl_xor_sync(0xFFFFFFFFu, sent, DISTANCE);
                });
            });
            if (upper) row += ROWS / 2;
            across_lanes<ROWS / 2, DISTANCE / 2>(o, row, writes);
        } else {
            unrolled<PER>([&](auto e) { o[0][e.value] += __shfl_xor_sync(0xFFFFFFFFu, o[0][e.value], DISTANCE); });
            writes = writes && !(threadIdx.x & DISTANCE);
            across_lanes<1, DISTANCE / 2>(o, row, writes);
        }
    } else {
        static_assert(ROWS == 1, "a lane has one row at the end");
    }
}

template <int ROWS, bool APPENDS> __device__ __forceinline__ void attend(const Attention& p) {
    __shared__ __align__(16) float q[ROWS][DIM], parts[WARPS][ROWS][DIM];
    __shared__ float scores[ROWS][TILE], largest[ROWS], sums[ROWS], factors[ROWS], shares[ROWS][MOST_SPLITS];
    __shared__ u32 is_last;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = p.heads / p.kv_heads,
              all_rows = group * p.count;
    const u32 blocks = (all_rows + ROWS - 1) / ROWS, block = blockIdx.x % blocks,
              kv_head = blockIdx.x / blocks % p.kv_heads;
    const u32 sequence = blockIdx.x / blocks / p.kv_heads, split = blockIdx.y, before = p.positions[sequence];
    if (before + p.count > p.capacity) return;
    // The keys that any of the rows attends to, and the splits that hold them.
    const u32 first_row = block * ROWS, rows = min((u32)ROWS, all_rows - first_row);
    const u32 first = before + first_row / group + 1, end = before + (first_row + rows - 1) / group + 1;
    const u32 begin = first > p.window ? first - p.window : 0, span = p.tiles * TILE;
    const u32 first_split = begin / span, last_split = (end - 1) / span;
    if (split < first_split || split > last_split) return;
    const u32 from = max(begin, split * span), to = min(end, (split + 1) * span);
    // The new key that this CTA appends itself, and must not read before.
    const u32 fresh = APPENDS ? before : 0xFFFFFFFFu;

    const u64 cache = ((u64)sequence * p.kv_heads + kv_head) * p.capacity * DIM;
    const u32 within = threadIdx.x % LANES, place = threadIdx.x / LANES;
    Vector keys[PASSES][VECTORS], values[PASSES][VECTORS];
    const auto fetch = [&](Vector(&to)[PASSES][VECTORS], const void* from, u32 tile, auto i, bool wanted) {
        const u32 key = tile + i.value * AT_ONCE + place;
        const u64 at = cache + (u64)key * DIM + within * WIDTH;
        unrolled<VECTORS>([&](auto j) {
            if (wanted) to[i.value][j.value] = *(const Vector*)((const Raw*)from + at + j.value * LANES * WIDTH);
        });
    };
    u32 tile = from / TILE * TILE;
    // The first tile is on its way while the queries are rotated.
    unrolled<PASSES>([&](auto i) {
        unrolled<VECTORS>([&](auto j) { keys[i.value][j.value] = Vector(), values[i.value][j.value] = Vector(); });
        const u32 key = tile + i.value * AT_ONCE + place;
        const bool wanted = key >= from && key < to && key != fresh;
        fetch(keys, p.k, tile, i, wanted);
        fetch(values, p.v, tile, i, wanted);
    });

    for (u32 r = warp; r < ROWS; r += WARPS) {
        float low[EACH] = {}, high[EACH] = {};
        if (r < rows) {
            const u32 token = (first_row + r) / group, head = kv_head * group + (first_row + r) % group;
            turned(p, head_of(p, (u64)sequence * p.count + token, head), p.query_gain, before + token, low, high);
        }
        unrolled<EACH>([&](auto i) {
            const u32 pair = lane + 32 * i.value;
            if (pair < HALF) q[r][pair] = low[i.value] * p.scale, q[r][pair + HALF] = high[i.value] * p.scale;
        });
    }
    if (APPENDS && split == last_split) {
        if (warp == WARPS - 1) append_key(p, sequence, 0, kv_head, before);
        if (warp == WARPS - 2) append_value(p, sequence, 0, kv_head, before);
    }
    if (threadIdx.x < ROWS) largest[threadIdx.x] = -INFINITE, sums[threadIdx.x] = 0.0f;
    __syncthreads();
    if (APPENDS && split == last_split) {
        unrolled<PASSES>([&](auto i) {
            const bool wanted = tile + i.value * AT_ONCE + place == fresh;
            fetch(keys, p.k, tile, i, wanted);
            fetch(values, p.v, tile, i, wanted);
        });
    }

    float o[ROWS][PER] = {};
    while (true) {
        float dots[PASSES][ROWS] = {};
        unrolled<VECTORS>([&](auto j) {
            float wide[PASSES][WIDTH];
            unrolled<PASSES>([&](auto i) {
                unrolled<WIDTH>(
                    [&](auto e) { wide[i.value][e.value] = widen<ELEMENT>(keys[i.value][j.value].of[e.value]); });
            });
            unrolled<ROWS>([&](auto r) {
                float query[WIDTH];
                unrolled<WIDTH / 4>([&](auto e) {
                    const float4 four = *(const float4*)&q[r.value][(j.value * LANES + within) * WIDTH + 4 * e.value];
                    query[4 * e.value] = four.x, query[4 * e.value + 1] = four.y, query[4 * e.value + 2] = four.z,
                              query[4 * e.value + 3] = four.w;
                });
                unrolled<PASSES>([&](auto i) {
                    unrolled<WIDTH>([&](auto e) { dots[i.value][r.value] += query[e.value] * wide[i.value][e.value]; });
                });
            });
        });
        // The next tile is on its way as soon as this one's registers are free. A key beyond the end keeps what was
        // loaded before; its share is zero, and what was loaded is finite where the cache is.
        const u32 next = tile + TILE;
        unrolled<PASSES>([&](auto i) { fetch(keys, p.k, next, i, next + i.value * AT_ONCE + place < to); });
        unrolled<PASSES>([&](auto i) {
            const u32 key = tile + i.value * AT_ONCE + place;
            unrolled<ROWS>([&](auto r) {
                float dot = dots[i.value][r.value];
                for (u32 distance = LANES / 2; distance > 0; distance /= 2)
                    dot += __shfl_xor_sync(0xFFFFFFFFu, dot, distance);
                // The end of what the row's token attends to.
                const u32 limit = before + (first_row + r.value) / group + 1;
                const bool attends = r.value < rows && key >= from && key < min(to, limit) && key + p.window >= limit;
                if (within == 0) scores[r.value][i.value * AT_ONCE + place] = attends ? dot : -INFINITE;
            });
        });
        __syncthreads();
        for (u32 r = warp; r < ROWS; r += WARPS) {
            const float one = capped(p, scores[r][lane]),
                        other = TILE > 32 ? capped(p, scores[r][lane + 32 % TILE]) : -INFINITE, old = largest[r];
            float most = fmaxf(one, other);
            for (u32 distance = 16; distance > 0; distance /= 2)
                most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
            most = fmaxf(most, old);
            // Without a key yet there is nothing to scale.
            const float base = most == -INFINITE ? 0.0f : most, a = exp2f(one - base), b = exp2f(other - base),
                        factor = exp2f(old - base);
            float sum = a + b;
            for (u32 distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
            scores[r][lane] = a;
            if (TILE > 32) scores[r][lane + 32 % TILE] = b;
            __syncwarp();
            if (lane == 0) largest[r] = most, sums[r] = sums[r] * factor + sum, factors[r] = factor;
        }
        __syncthreads();
        unrolled<ROWS>([&](auto r) {
            const float factor = factors[r.value];
            unrolled<PER>([&](auto e) { o[r.value][e.value] *= factor; });
        });
        unrolled<PASSES>([&](auto i) {
            float share[ROWS];
            unrolled<ROWS>([&](auto r) { share[r.value] = scores[r.value][i.value * AT_ONCE + place]; });
            unrolled<VECTORS>([&](auto j) {
                unrolled<WIDTH>([&](auto e) {
                    const float value = widen<ELEMENT>(values[i.value][j.value].of[e.value]);
                    unrolled<ROWS>([&](auto r) { o[r.value][j.value * WIDTH + e.value] += share[r.value] * value; });
                });
            });
        });
        tile = next;
        if (tile >= to) break;
        unrolled<PASSES>([&](auto i) { fetch(values, p.v, tile, i, tile + i.value * AT_ONCE + place < to); });
        __syncthreads();
    }

    u32 row = 0;
    bool writes = true;
    across_lanes<ROWS, 16>(o, row, writes);
    if (writes) {
        unrolled<VECTORS>([&](auto j) {
            unrolled<WIDTH / 4>([&](auto e) {
                const float* const four = &o[0][j.value * WIDTH + 4 * e.value];
                *(float4*)&parts[warp][row][(j.value * LANES + within) * WIDTH + 4 * e.value] =
                    make_float4(four[0], four[1], four[2], four[3]);
            });
        });
    }
    __syncthreads();
    const u32 active = last_split - first_split + 1;
    const auto write = [&](u32 at, float value) {
        const u32 r = at / DIM, all = first_row + r;
        if (r >= rows) return;
        const u64 token = (u64)sequence * p.count + all / group;
        ((Raw*)p.out)[(token * p.heads + kv_head * group + all % group) * DIM + at % DIM] = narrow<ELEMENT>(value);
    };
    const auto total = [&](u32 at) {
        float sum = (&parts[0][0][0])[at];
        for (u32 w = 1; w < WARPS; w++) sum += (&parts[w][0][0])[at];
        return sum;
    };
    // The sum of a row's shares, with its sink's.
    const auto whole = [&](u32 r, float most, float sum) {
        if (!p.sinks || r >= rows) return sum;
        return sum + exp2f(p.sinks[kv_head * group + (first_row + r) % group] * 1.44269504f - most);
    };
    if (active == 1) {
        for (u32 at = threadIdx.x; at < ROWS * DIM; at += THREADS) {
            write(at, total(at) / whole(at / DIM, largest[at / DIM], sums[at / DIM]));
        }
        return;
    }
    // Two more elements of a row keep each split's results aligned.
    constexpr u32 SIZE = ROWS * (DIM + 4);
    float* const all = p.partial + (u64)blockIdx.x * p.splits * SIZE;
    float* const mine = all + (u64)split * SIZE;
    for (u32 at = threadIdx.x; at < ROWS * DIM; at += THREADS) mine[at] = total(at);
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
    for (u32 r = warp; r < ROWS; r += WARPS) {
        const float* const of_row = all + ROWS * DIM + r;
        float own[MOST_SPLITS / 32], most = -INFINITE, sum = 0.0f;
        unrolled<MOST_SPLITS / 32>([&](auto i) {
            const u32 s = first_split + lane + 32 * i.value;
            own[i.value] = s <= last_split ? __ldcg(of_row + (u64)s * SIZE) : -INFINITE;
            most = fmaxf(most, own[i.value]);
        });
        for (u32 distance = 16; distance > 0; distance /= 2)
            most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, distance));
        unrolled<MOST_SPLITS / 32>([&](auto i) {
            const u32 s = first_split + lane + 32 * i.value;
            const float share = exp2f(own[i.value] - most);
            shares[r][lane + 32 * i.value] = share;
            if (s <= last_split) sum += share * __ldcg(of_row + (u64)s * SIZE + ROWS);
        });
        for (u32 distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
        if (lane == 0) sums[r] = whole(r, most, sum);
    }
    __syncthreads();
    for (u32 at = 4 * threadIdx.x; at < ROWS * DIM; at += 4 * THREADS) {
        const u32 r = at / DIM;
        float4 sum = {};
        #pragma unroll 8
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

#define ATTEND(ROWS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(128, 2) attend_##ROWS(const __grid_constant__ Attention p) { \
        attend<ROWS, false>(p);                                                                               \
    }                                                                                                         \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                      \
        append_and_attend_##ROWS(const __grid_constant__ Attention p) {                                       \
        attend<ROWS, true>(p);                                                                                \
    }
ATTEND(1)
ATTEND(2)
#if DIM <= 128
ATTEND(4)
#endif
