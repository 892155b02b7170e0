// From dense tensors of type IN to compressed ones of type OUT, in one direction: along rows, or along columns, which gives the compressed transpose. By a rule for
// groups of four or by a mask that is there. The same bits as crate twofour: select/nm.rs, estimate.
//
// A thread takes 32 elements: one word of metadata. Along columns, neighbouring threads have neighbouring columns, so that loads come together.
//
// Defined outside: IN, OUT.

enum Rule { MAGNITUDE = 0, SOFT_THRESHOLD = 1, MVUE_APPROXIMATE = 2, MVUE = 3, GIVEN = 4 };

struct OneWay {
    const void* dense;   // [rows, cols]
    void* values;        // of each line, 2 ceil(length / 4), where lines are rows or columns
    MetaOrder meta;
    const u16* tiles;    // [rows / 4, cols / 4]: read by GIVEN
    const float* factor; // for all values, or null
    u64* wrong;          // the least index of what is not a number or, but for MAGNITUDE, not finite; or all ones
    u64 seed;
    u32 rows, cols;
};

// ---- random numbers ------------------------------------------------------------------------------------------------------------

// Philox 4x32 with ten rounds: the first two words, as multiples of 2^-24 below 1.
__device__ __forceinline__ float2 uniform(u64 seed, u64 group) {
    u32 a = (u32)group, b = (u32)(group >> 32), c = 0, d = 0, key = (u32)seed, other_key = (u32)(seed >> 32);
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        const u32 high = __umulhi(0xD2511F53u, a), low = 0xD2511F53u * a, other_high = __umulhi(0xCD9E8D57u, c), other_low = 0xCD9E8D57u * c;
        a = other_high ^ b ^ key;
        b = other_low;
        c = high ^ d ^ other_key;
        d = low;
        key += 0x9E3779B9u;
        other_key += 0xBB67AE85u;
    }
    return make_float2((float)(a >> 8) * 0x1p-24f, (float)(b >> 8) * 0x1p-24f);
}

// ---- rules for groups: what is kept, and what its values become ------------------------------------------------------------------

// Sums and products that are never made one operation.
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float over(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float sum_of(float a, float b, float c) { return add(add(a, b), c); }

// The two largest magnitudes, ties to the lower index.
__device__ __forceinline__ u32 two_largest(const float (&v)[4]) {
    u32 kept = 0;
    unrolled<4>([&](auto i) {
        u32 larger = 0;
        unrolled<4>([&](auto j) {
            const u32 key = __float_as_uint(v[i.value]) & 0x7FFFFFFF, other = __float_as_uint(v[j.value]) & 0x7FFFFFFF;
            if (j.value != i.value) larger += j.value < i.value ? other >= key : other > key;
        });
        if (larger < 2) kept |= 1u << i.value;
    });
    return kept;
}

__device__ __forceinline__ u32 soft_threshold(float (&v)[4]) {
    const u32 kept = two_largest(v);
    float third = 0.0f;
    unrolled<4>([&](auto i) {
        if (!(kept >> i.value & 1)) third = fmaxf(third, fabsf(v[i.value]));
    });
    unrolled<4>([&](auto i) { v[i.value] = copysignf(add(fabsf(v[i.value]), -third), v[i.value]); });
    return kept;
}

__device__ __forceinline__ float divided(float value, float probability) { return probability > 0.0f ? over(value, probability) : 0.0f; }

// The first element that `target` falls to, but for one (4: for none): see the CPU's.
__device__ __forceinline__ u32 draw(const float (&magnitudes)[4], u32 without, float target) {
    float end = 0.0f;
    u32 drawn = 4, last = without == 0 ? 1 : 0;
    unrolled<4>([&](auto i) {
        if (i.value == without) return;
        end = add(end, magnitudes[i.value]);
        if (drawn == 4 && target < end) drawn = i.value;
        if (magnitudes[i.value] > 0.0f) last = i.value;
    });
    return drawn == 4 ? last : drawn;
}

__device__ __forceinline__ u32 mvue_approximate(float (&v)[4], float2 random) {
    float m[4];
    unrolled<4>([&](auto i) { m[i.value] = times(fabsf(v[i.value]), 0.125f); });
    const float sum = add(sum_of(m[0], m[1], m[2]), m[3]);
    if (sum == 0.0f) return 3;
    const float others[4] = {sum_of(m[1], m[2], m[3]), sum_of(m[0], m[2], m[3]), sum_of(m[0], m[1], m[3]), sum_of(m[0], m[1], m[2])};
    const u32 first = draw(m, 4, times(random.x, sum));
    const float left = first == 0 ? others[0] : first == 1 ? others[1] : first == 2 ? others[2] : others[3];
    const u32 second = draw(m, first, times(random.y, left));
    float share[4], q[4];
    unrolled<4>([&](auto i) {
        share[i.value] = over(m[i.value], sum);
        q[i.value] = others[i.value] > 0.0f ? over(share[i.value], others[i.value]) : 0.0f;
    });
    const float of_others[4] = {sum_of(q[1], q[2], q[3]), sum_of(q[0], q[2], q[3]), sum_of(q[0], q[1], q[3]), sum_of(q[0], q[1], q[2])};
    unrolled<4>([&](auto i) { v[i.value] = divided(v[i.value], add(share[i.value], times(m[i.value], of_others[i.value]))); });
    return 1u << first | 1u << second;
}

__device__ __forceinline__ u32 mvue(float (&v)[4], float random) {
    float m[4], sorted[4] = {};
    u32 rank[4];
    unrolled<4>([&](auto i) { m[i.value] = times(fabsf(v[i.value]), 0.125f); });
    unrolled<4>([&](auto i) {
        rank[i.value] = 0;
        unrolled<4>([&](auto j) {
            if (j.value != i.value) rank[i.value] += j.value < i.value ? m[j.value] <= m[i.value] : m[j.value] < m[i.value];
        });
        unrolled<4>([&](auto j) {
            if (rank[i.value] == j.value) sorted[j.value] = m[i.value];
        });
    });
    const float a = sorted[0], b = sorted[1], c = sorted[2], d = sorted[3], smaller = sum_of(a, b, c);
    float w[5];
    if (smaller > d) {
        const float sum = add(smaller, d);
        unrolled<4>([&](auto i) {
            const float probability = over(times(2.0f, m[i.value]), sum);
            v[i.value] = divided(v[i.value], probability > 1.0f ? 1.0f : probability);
        });
        const float first = add(add(times(2.0f, a), c), -d);
        w[4] = times(2.0f, add(add(c, d), -add(a, b)));
        if (first > 0.0f) {
            w[0] = first;
            w[1] = add(add(times(2.0f, a), d), -c);
            w[2] = add(add(times(2.0f, b), c), -d);
            w[3] = add(add(times(2.0f, b), d), -c);
        } else {
            w[0] = 0.0f;
            w[1] = times(4.0f, a);
            w[2] = times(2.0f, add(smaller, -d));
            w[3] = times(2.0f, add(add(b, -a), add(d, -c)));
        }
    } else {
        unrolled<4>([&](auto i) {
            if (rank[i.value] != 3) v[i.value] = divided(v[i.value], over(m[i.value], smaller));
        });
        w[0] = w[2] = 0.0f;
        w[1] = a;
        w[3] = b;
        w[4] = c;
    }
    const float target = times(random, add(add(add(add(w[0], w[1]), w[2]), w[3]), w[4]));
    // Pairs of ranks 02, 03, 12, 13, 23, as bits.
    constexpr u32 pairs[5] = {5, 9, 6, 10, 12};
    float end = 0.0f;
    u32 pair = 0;
    unrolled<4>([&](auto i) {
        end = add(end, w[i.value]);
        if (pair == 0 && target < end) pair = pairs[i.value];
    });
    if (pair == 0) pair = pairs[4];
    u32 kept = 0;
    unrolled<4>([&](auto i) { kept |= (pair >> rank[i.value] & 1) << i.value; });
    return kept;
}

// ---- one direction -----------------------------------------------------------------------------------------------------------------

typedef Bits<IN>::type Raw;
typedef Bits<OUT>::type Stored;
// Two stored values.
template <int BYTES> struct Pair;
template <> struct Pair<1> { typedef u16 type; };
template <> struct Pair<2> { typedef u32 type; };
typedef Pair<sizeof(Stored)>::type Both;
struct __align__(4 * sizeof(Raw)) FourRaw { Raw of[4]; };
struct __align__(4 * sizeof(Both)) FourBoth { Both of[4]; };

// +0.0 for -0.0.
__device__ __forceinline__ Both stored(float value) {
    const Stored bits = narrow<OUT>(value);
    return (Stored)(bits << 1) == 0 ? 0 : bits;
}

template <int RULE, bool COLUMNS> __device__ __forceinline__ void one_way(const OneWay& p) {
    const u32 lines = COLUMNS ? p.cols : p.rows, length = COLUMNS ? p.rows : p.cols;
    const u32 groups = (length + 3) / 4, words = (groups + 7) / 8;
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (u64)lines * words) return;
    const u32 line = (u32)(COLUMNS ? index % lines : index / words), word = (u32)(COLUMNS ? index / lines : index % words);
    const auto place = [&](u32 along) { return COLUMNS ? (u64)along * p.cols + line : (u64)line * p.cols + along; };
    const float factor = p.factor ? *p.factor : 1.0f;
    u32 codes = 0;
    // Four groups at a time: eight make no difference but that of twice the code.
    #pragma unroll 1
    for (u32 half = 0; half < 2; half++) {
        const u32 first_group = 8 * word + 4 * half;
        // All loads first, so that many are under way.
        float values[4][4];
        unrolled<4>([&](auto g) {
            const u32 first = 4 * (first_group + g.value);
            FourRaw four = {};
            if (!COLUMNS && length % 4 == 0) {
                if (first < length) four = *(const FourRaw*)((const Raw*)p.dense + place(first));
            } else {
                unrolled<4>([&](auto i) {
                    if (first + i.value < length) four.of[i.value] = ((const Raw*)p.dense)[place(first + i.value)];
                });
            }
            unrolled<4>([&](auto i) { values[g.value][i.value] = widen<IN>(four.of[i.value]); });
        });
        FourBoth out;
        unrolled<4>([&](auto g) {
            const u32 group = first_group + g.value;
            float (&v)[4] = values[g.value];
            out.of[g.value] = 0;
            if (group >= groups) return;
            if (RULE != GIVEN) {
                unrolled<4>([&](auto i) {
                    const bool wrong = RULE == MAGNITUDE ? v[i.value] != v[i.value] : !(fabsf(v[i.value]) <= 3.402823466e38f);
                    if (wrong) atomicMin(p.wrong, place(4 * group + i.value));
                });
            }
            u32 kept = 0;
            if (RULE == MAGNITUDE) kept = two_largest(v);
            if (RULE == SOFT_THRESHOLD) kept = soft_threshold(v);
            if (RULE == MVUE_APPROXIMATE) kept = mvue_approximate(v, uniform(p.seed, (u64)line * groups + group));
            if (RULE == MVUE) kept = mvue(v, uniform(p.seed, (u64)line * groups + group).x);
            if (RULE == GIVEN) {
                const u32 tile = p.tiles[COLUMNS ? (u64)group * (p.cols / 4) + line / 4 : (u64)(line / 4) * (p.cols / 4) + group];
                kept = COLUMNS ? (tile >> line % 4 & 0x1111) * 0x249 >> 9 & 15 : tile >> 4 * (line % 4) & 15;
            }
            const u32 code = code_of(kept), first = code & 3, second = code >> 2;
            float a = first == 0 ? v[0] : first == 1 ? v[1] : v[2], b = second == 1 ? v[1] : second == 2 ? v[2] : v[3];
            a = kept >> first & 1 ? a : 0.0f;
            b = kept >> second & 1 ? b : 0.0f;
            if (p.factor) {
                a = times(a, factor);
                b = times(b, factor);
            }
            out.of[g.value] = stored(a) | stored(b) << (8 * sizeof(Stored));
            codes |= code << (16 * half + 4 * g.value);
        });
        Both* to = (Both*)p.values + (u64)line * groups + first_group;
        if (groups % 4 == 0) {
            if (first_group < groups) *(FourBoth*)to = out;
        } else {
            unrolled<4>([&](auto g) {
                if (first_group + g.value < groups) to[g.value] = out.of[g.value];
            });
        }
    }
    store_meta<sizeof(Stored)>(p.meta, lines, words, line, word, codes);
}

#define ONE_WAY(name, RULE)                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256) rows_##name(const __grid_constant__ OneWay p) { one_way<RULE, false>(p); }                    \
    extern "C" __global__ void __launch_bounds__(256) columns_##name(const __grid_constant__ OneWay p) { one_way<RULE, true>(p); }
ONE_WAY(magnitude, MAGNITUDE)
ONE_WAY(soft_threshold, SOFT_THRESHOLD)
ONE_WAY(mvue_approximate, MVUE_APPROXIMATE)
ONE_WAY(mvue, MVUE)
ONE_WAY(given, GIVEN)
