// Products of f32. A key's elements are spread over LANES lanes.

// Heads of more than 128 elements take twice the lanes, and tiles of half the keys: registers stay the same.
constexpr u32 LANES = DIM > 128 ? 16 : DIM / WIDTH < 8 ? DIM / WIDTH : 8, PER = DIM / LANES, VECTORS = PER / WIDTH;
constexpr u32 AT_ONCE = THREADS / LANES, PASSES = TILE / AT_ONCE;

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
    __shared__ float scores[ROWS][TILE], largest[ROWS], sums[ROWS], factors[ROWS];
    Part part;
    if (!find_part<ROWS>(p, part)) return;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, from = part.from, to = part.to;
    // The new key that this CTA appends itself, and must not read before.
    const u32 fresh = APPENDS ? part.before : 0xFFFFFFFFu;
    const u32 within = threadIdx.x % LANES, place = threadIdx.x / LANES;
    Vector keys[PASSES][VECTORS], values[PASSES][VECTORS];
    const auto fetch = [&](Vector(&held)[PASSES][VECTORS], const void* cache, u32 tile, auto i, bool wanted) {
        const u32 key = tile + i.value * AT_ONCE + place;
        const u64 at = part.cache + (u64)key * DIM + within * WIDTH;
        unrolled<VECTORS>([&](auto j) {
            if (wanted) held[i.value][j.value] = *(const Vector*)((const Raw*)cache + at + j.value * LANES * WIDTH);
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
        float low[EACH], high[EACH];
        query_of(p, part, r, low, high);
        unrolled<EACH>([&](auto i) {
            const u32 pair = lane + 32 * i.value;
            if (pair < HALF) q[r][pair] = low[i.value] * p.scale, q[r][pair + HALF] = high[i.value] * p.scale;
        });
    }
    if (APPENDS) append_one(p, part);
    if (threadIdx.x < ROWS) largest[threadIdx.x] = -INFINITE, sums[threadIdx.x] = 0.0f;
    __syncthreads();
    if (APPENDS && part.split == part.last_split) {
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
                const u32 limit = part.limit(r.value);
                const bool attends =
                    r.value < part.rows && key >= from && key < min(to, limit) && key + p.window >= limit;
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
    finish<ROWS>(p, part, parts, largest, sums);
}

KERNELS(1, 2)
KERNELS(2, 2)
#if DIM <= 128
KERNELS(4, 2)
#endif
