// Products of f16 and bf16 on the tensor cores, from registers: a lane loads its part of fragments from the cache.
//
// A warp has 16 keys at a time, every fourth sixteen of the CTA's, and its own largest scores and sums. Scores are
// K Qᵀ, of 16 keys by 8 rows; results are Vᵀ Pᵀ, of 16 elements by 8 rows. A lane is known by g = lane / 4 and
// c = lane % 4, as in the layouts of `mma.sync`:
//
//     keys      of keys g and g + 8 the elements 32 j + 8 c .. + 8. The order of elements within a product of 16 is
//               ours to choose: queries have the same.
//     scores    of keys g and g + 8 rows 2 c and 2 c + 1. `movmatrix` makes a fragment of Pᵀ of them.
//     values    of keys 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 the elements 8 SPAN j + SPAN g .. + SPAN. Neighbouring
//               keys' are paired by `prmt`.
//     results   elements 8 SPAN j + SPAN g + 2 t and + 1 of rows 2 c and 2 c + 1
//
// Queries and shares are sums of two elements, what rounding leaves being the second, so that splitting them loses far
// less than rounding the result to the type.

constexpr u32 CHUNKS = DIM / 32, SPAN = DIM < 64 ? DIM / 8 : 8, PIECES = DIM / (8 * SPAN);
// Elements from one row of queries to the next: neighbouring rows start in different banks.
constexpr u32 STRIDE = DIM + (DIM == 32 ? 64 : 32);
// Of queries: a rotation makes them up to 1.42 times as large, which f16 might not hold.
constexpr float SHRUNK = ELEMENT == F16 ? 0.25f : 1.0f;

struct __align__(2 * SPAN) Piece { u32 of[SPAN / 2]; };

// A number as the sum of two elements.
struct Exact {
    Raw high, low;
    __device__ __forceinline__ explicit Exact(float x) : high(narrow<ELEMENT>(x)) {
        low = narrow<ELEMENT>(x - widen<ELEMENT>(high));
    }
};

__device__ __forceinline__ u32 pair_of(Raw first, Raw second) { return (u32)first | (u32)second << 16; }

// Transposes an 8x8 matrix of which lane 4 i + j has elements 2 j and 2 j + 1 of row i.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

template <int ROWS, bool APPENDS> __device__ __forceinline__ void attend(const Attention& p) {
    static_assert(ROWS == 8 && TILE == 16 * WARPS, "a product has 8 columns, and a warp 16 keys of a tile");
    __shared__ __align__(16) Raw q[2][ROWS][STRIDE];
    __shared__ __align__(16) float parts[WARPS][ROWS][DIM];
    __shared__ float of_warps[2][WARPS][ROWS], largest[ROWS], sums[ROWS];
    Part part;
    if (!find_part<ROWS>(p, part)) return;
    const u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const u32 from = part.from, to = part.to;
    // The new key that this CTA appends itself, and must not read before.
    const u32 fresh = APPENDS ? part.before : 0xFFFFFFFFu;

    uint4 keys[CHUNKS][2];
    Piece values[PIECES][4];
    const Raw* const all_keys = (const Raw*)p.k + part.cache + 8 * c;
    const Raw* const all_values = (const Raw*)p.v + part.cache + SPAN * g;
    // Loads those keys of a tile that `wanted` is true for; the others' registers keep what they have.
    const auto fetch_keys = [&](u32 tile, auto wanted) {
        unrolled<2>([&](auto h) {
            const u32 key = tile + g + 8 * h.value;
            if (!wanted(key)) return;
            unrolled<CHUNKS>([&](auto j) {
                keys[j.value][h.value] = *(const uint4*)(all_keys + (u64)key * DIM + 32 * j.value);
            });
        });
    };
    const auto fetch_values = [&](u32 tile, auto wanted) {
        unrolled<4>([&](auto i) {
            const u32 key = tile + 2 * c + i.value % 2 + 8 * (i.value / 2);
            if (!wanted(key)) return;
            unrolled<PIECES>([&](auto j) {
                values[j.value][i.value] = *(const Piece*)(all_values + (u64)key * DIM + 8 * SPAN * j.value);
            });
        });
    };
    u32 tile = from / 16 * 16 + 16 * warp;
    // The first keys are on their way while the queries are rotated.
    unrolled<CHUNKS>([&](auto j) { keys[j.value][0] = keys[j.value][1] = make_uint4(0, 0, 0, 0); });
    unrolled<PIECES>([&](auto j) { unrolled<4>([&](auto i) { values[j.value][i.value] = Piece(); }); });
    const auto is_there = [&](u32 key) { return key >= from && key < to && key != fresh; };
    fetch_keys(tile, is_there);
    fetch_values(tile, is_there);

    for (u32 r = warp; r < ROWS; r += WARPS) {
        float low[EACH], high[EACH];
        query_of(p, part, r, low, high);
        unrolled<EACH>([&](auto i) {
            const u32 pair = lane + 32 * i.value;
            if (pair >= HALF) return;
            const Exact first(low[i.value] * SHRUNK), second(high[i.value] * SHRUNK);
            q[0][r][pair] = first.high, q[0][r][pair + HALF] = second.high;
            q[1][r][pair] = first.low, q[1][r][pair + HALF] = second.low;
        });
    }
    if (APPENDS) append_one(p, part);
    __syncthreads();
    if (APPENDS && part.split == part.last_split) {
        const auto is_fresh = [&](u32 key) { return key == fresh; };
        fetch_keys(tile, is_fresh);
        fetch_values(tile, is_fresh);
    }

    // Of rows 2 c and 2 c + 1; the sums are the lane's own.
    const u32 limits[2] = {part.limit(2 * c), part.limit(2 * c + 1)};
    const float scale = p.scale / SHRUNK;
    float most[2] = {-INFINITE, -INFINITE}, sum[2] = {};
    float o[PIECES][SPAN / 2][4] = {};
    for (; tile < to; tile += TILE) {
        float products[4][4] = {};
        unrolled<CHUNKS>([&](auto j) {
            const uint4 first = keys[j.value][0], second = keys[j.value][1];
            const u32 a[4] = {first.x, second.x, first.y, second.y}, b[4] = {first.z, second.z, first.w, second.w};
            const uint4 high = *(const uint4*)&q[0][g][32 * j.value + 8 * c],
                        low = *(const uint4*)&q[1][g][32 * j.value + 8 * c];
            multiply<ELEMENT>(products[0], a, high.x, high.y);
            multiply<ELEMENT>(products[1], a, low.x, low.y);
            multiply<ELEMENT>(products[2], b, high.z, high.w);
            multiply<ELEMENT>(products[3], b, low.z, low.w);
        });
        // The next keys are on their way as soon as registers are free. A key beyond the end keeps what was loaded
        // before; its share is zero, and what was loaded is finite where the cache is.
        const auto is_next = [&](u32 key) { return key < to; };
        fetch_keys(tile + TILE, is_next);
        float scores[4];
        unrolled<4>([&](auto i) {
            const u32 key = tile + g + 8 * (i.value / 2), row = 2 * c + i.value % 2, limit = limits[i.value % 2];
            const bool attends =
                row < part.rows && key >= from && key < min(to, limit) && key + p.window >= limit;
            const float dot = (products[1][i.value] + products[3][i.value]) +
                              (products[0][i.value] + products[2][i.value]);
            scores[i.value] = attends ? capped(p, dot * scale) : -INFINITE;
        });
        float factors[2];
        unrolled<2>([&](auto e) {
            float now = fmaxf(scores[e.value], scores[e.value + 2]);
            for (u32 distance = 4; distance < 32; distance *= 2)
                now = fmaxf(now, __shfl_xor_sync(0xFFFFFFFFu, now, distance));
            now = fmaxf(now, most[e.value]);
            // Without a key yet there is nothing to scale.
            const float base = now == -INFINITE ? 0.0f : now;
            factors[e.value] = exp2f(most[e.value] - base);
            most[e.value] = now;
            scores[e.value] = exp2f(scores[e.value] - base), scores[e.value + 2] = exp2f(scores[e.value + 2] - base);
            sum[e.value] = sum[e.value] * factors[e.value] + (scores[e.value] + scores[e.value + 2]);
        });
        u32 high[2], low[2];
        unrolled<2>([&](auto h) {
            const Exact first(scores[2 * h.value]), second(scores[2 * h.value + 1]);
            high[h.value] = transposed(pair_of(first.high, second.high));
            low[h.value] = transposed(pair_of(first.low, second.low));
        });
        unrolled<PIECES>([&](auto j) {
            unrolled<SPAN / 2>([&](auto t) {
                const auto word = [&](auto i) { return values[j.value][i].of[t.value]; };
                // The even elements of a pair of keys, and the odd ones.
                const u32 a[4] = {__byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
                    __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)};
                float(&to)[4] = o[j.value][t.value];
                unrolled<4>([&](auto i) { to[i.value] *= factors[i.value % 2]; });
                multiply<ELEMENT>(to, a, high[0], high[1]);
                multiply<ELEMENT>(to, a, low[0], low[1]);
            });
        });
        fetch_values(tile + TILE, is_next);
    }

    unrolled<2>([&](auto e) {
        for (u32 distance = 4; distance < 32; distance *= 2)
            sum[e.value] += __shfl_xor_sync(0xFFFFFFFFu, sum[e.value], distance);
        const u32 row = 2 * c + e.value;
        if (g == 0) of_warps[0][warp][row] = most[e.value], of_warps[1][warp][row] = sum[e.value];
    });
    __syncthreads();
    float factors[2];
    unrolled<2>([&](auto e) {
        const u32 row = 2 * c + e.value;
        float all = -INFINITE;
        unrolled<WARPS>([&](auto w) { all = fmaxf(all, of_warps[0][w.value][row]); });
        const float base = all == -INFINITE ? 0.0f : all;
        factors[e.value] = exp2f(most[e.value] - base);
        if (warp == 0 && g == 0) {
            float total = 0.0f;
            unrolled<WARPS>(
                [&](auto w) { total += of_warps[1][w.value][row] * exp2f(of_warps[0][w.value][row] - base); });
            largest[row] = all, sums[row] = total;
        }
    });
    unrolled<PIECES>([&](auto j) {
        unrolled<SPAN / 2>([&](auto t) {
            const float(&of)[4] = o[j.value][t.value];
            const u32 element = 8 * SPAN * j.value + SPAN * g + 2 * t.value;
            unrolled<2>([&](auto e) {
                *(float2*)&parts[warp][2 * c + e.value][element] =
                    make_float2(of[e.value] * factors[e.value], of[e.value + 2] * factors[e.value]);
            });
        });
    });
    finish<ROWS>(p, part, parts, largest, sums);
}

KERNELS(8, CTAS)
