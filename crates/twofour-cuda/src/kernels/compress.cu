// From dense tensors of type IN to compressed ones of type OUT, in one direction: along rows, or along columns, which gives the compressed transpose. By a rule for
// groups of four or by a mask that is there. The same bits as crate twofour: select/nm.rs, estimate.
//
// A thread takes 32 elements: of a row, one word of metadata; or of two columns, half a word of each.
//
// Defined outside: IN, OUT.

enum Rule { MAGNITUDE = 0, SOFT_THRESHOLD = 1, MVUE_APPROXIMATE = 2, MVUE = 3, GIVEN = 4 };

struct OneWay {
    const void* dense;   // [rows, cols]
    void* values;        // of each line, two for each group, where lines are rows or columns
    MetaOrder meta;
    const u16* tiles;    // [rows / 4, cols / 4]: read by GIVEN
    const float* factor; // for all values, or null
    u64* wrong;          // the least index of what is not a number or, but for MAGNITUDE, not finite; or all ones
    u64 seed;
    u32 rows, cols;
    u32 groups;          // of a line's values: those past its end are of zeros
};

// ---- random numbers ------------------------------------------------------------------------------------------------------------

// Philox 4x32 with ten rounds.
__device__ __forceinline__ uint4 philox(u64 seed, u32 block, u32 row, u32 purpose) {
    u32 a = block, b = row, c = purpose, d = 0, key = (u32)seed, other_key = (u32)(seed >> 32);
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
    return make_uint4(a, b, c, d);
}

// A multiple of 2^-24 below 1.
__device__ __forceinline__ float unit(u32 word) { return (float)(word >> 8) * 0x1p-24f; }

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

// The sum of magnitudes, and those of all but each.
struct Sums {
    float all, others[4];
    __device__ __forceinline__ Sums(const float (&m)[4]) {
        const float ab = add(m[0], m[1]), cd = add(m[2], m[3]);
        all = add(ab, cd);
        others[0] = add(m[1], cd);
        others[1] = add(m[0], cd);
        others[2] = add(ab, m[3]);
        others[3] = add(ab, m[2]);
    }
};

__device__ __forceinline__ float signed_as(float value, float element, float magnitude) { return magnitude > 0.0f ? copysignf(value, element) : 0.0f; }

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

__device__ __forceinline__ u32 mvue_approximate(float (&v)[4], float first_random, float second_random) {
    float m[4], q[4];
    unrolled<4>([&](auto i) { m[i.value] = times(fabsf(v[i.value]), 0.125f); });
    const Sums sums(m);
    const u32 first = draw(m, 4, times(first_random, sums.all));
    const float left = first == 0 ? sums.others[0] : first == 1 ? sums.others[1] : first == 2 ? sums.others[2] : sums.others[3];
    const u32 second = draw(m, first, times(second_random, left));
    unrolled<4>([&](auto i) { q[i.value] = sums.others[i.value] > 0.0f ? over(m[i.value], sums.others[i.value]) : 0.0f; });
    const float of_others[4] = {sum_of(q[1], q[2], q[3]), sum_of(q[0], q[2], q[3]), sum_of(q[0], q[1], q[3]), sum_of(q[0], q[1], q[2])};
    const u32 kept = 1u << first | 1u << second;
    unrolled<4>([&](auto i) {
        if (kept >> i.value & 1) v[i.value] = signed_as(times(8.0f, over(sums.all, add(1.0f, of_others[i.value]))), v[i.value], m[i.value]);
    });
    return kept;
}

// What is stored of a group: two values and their code.
struct Two {
    float a, b;
    u32 code;
};

__device__ __forceinline__ Two of_kept(const float (&v)[4], u32 kept) {
    Two two;
    two.code = code_of(kept);
    const u32 first = two.code & 3, second = two.code >> 2;
    two.a = kept >> first & 1 ? first == 0 ? v[0] : first == 1 ? v[1] : v[2] : 0.0f;
    two.b = kept >> second & 1 ? second == 1 ? v[1] : second == 2 ? v[2] : v[3] : 0.0f;
    return two;
}

// Comparisons and choices bind here, so there are as few as can be: places on the line come in order, which makes them the code.
__device__ __forceinline__ Two mvue(const float (&v)[4], float random) {
    float m[4], line[4];
    unrolled<4>([&](auto i) { m[i.value] = times(fabsf(v[i.value]), 0.125f); });
    const Sums sums(m);
    unrolled<4>([&](auto i) { line[i.value] = fminf(m[i.value], sums.others[i.value]); });
    const float one = line[0], two = add(one, line[1]), three = add(two, line[2]);
    const float half = times(0.5f, add(three, line[3])), point = times(random, half), other = add(point, half);
    const bool p1 = one <= point, p2 = two <= point, p3 = three <= point, q1 = one <= other, q2 = two <= other, q3 = three <= other;
    const u32 first = p1 + p2 + p3, second = q1 + q2 + q3;
    Two drawn = {p3 ? v[3] : p2 ? v[2] : p1 ? v[1] : v[0], q3 ? v[3] : q2 ? v[2] : q1 ? v[1] : v[0], first | second << 2};
    if (first == second) drawn = of_kept(v, half > 0.0f ? 1u << first : two_largest(v));
    const float value = times(8.0f, half);
    drawn.a = signed_as(fmaxf(value, fabsf(drawn.a)), drawn.a, times(fabsf(drawn.a), 0.125f));
    drawn.b = signed_as(fmaxf(value, fabsf(drawn.b)), drawn.b, times(fabsf(drawn.b), 0.125f));
    return drawn;
}

// ---- one direction -----------------------------------------------------------------------------------------------------------------

typedef Bits<IN>::type Raw;
typedef Bits<OUT>::type Stored;
typedef Pair<sizeof(Stored)>::type Both;
typedef FourPairs<Both> FourBoth;
struct __align__(4 * sizeof(Raw)) FourRaw { Raw of[4]; };

// +0.0 for -0.0.
__device__ __forceinline__ Both stored(float value) {
    const Stored bits = narrow<OUT>(value);
    return (Stored)(bits << 1) == 0 ? 0 : bits;
}

// Whether a number is NaN or, unless those are welcome, infinite.
template <bool INFINITIES> __device__ __forceinline__ bool is_wrong(float value) { return INFINITIES ? value != value : !(fabsf(value) <= 3.402823466e38f); }
// Whether one of four is: eighths of magnitudes add up to a finite number if all are.
template <bool INFINITIES> __device__ __forceinline__ bool any_wrong(const float (&v)[4]) {
    if (INFINITIES) return v[0] != v[0] || v[1] != v[1] || v[2] != v[2] || v[3] != v[3];
    float m[4];
    unrolled<4>([&](auto i) { m[i.value] = times(fabsf(v[i.value]), 0.125f); });
    return is_wrong<false>(add(add(m[0], m[1]), add(m[2], m[3])));
}

// A line's four groups from `first_group` on: their values are stored, their codes returned. `place` tells where a line's element is in the tensor.
template <int RULE, bool COLUMNS, class Place>
__device__ __forceinline__ u32 four_groups(const OneWay& p, float (&values)[4][4], u32 line, u32 first_group, u32 own_groups, float factor, Place place) {
    // Four groups share one draw of random numbers, or two pairs of them one each.
    uint4 random = {}, more = {};
    if (RULE == MVUE) random = philox(p.seed, first_group / 4, line, 0);
    if (RULE == MVUE_APPROXIMATE) {
        random = philox(p.seed, first_group / 2, line, 1);
        more = philox(p.seed, first_group / 2 + 1, line, 1);
    }
    FourBoth out;
    u32 codes = 0;
    unrolled<4>([&](auto g) {
        const u32 group = first_group + g.value;
        float (&v)[4] = values[g.value];
        out.of[g.value] = 0;
        if (group >= p.groups) return;
        if (RULE != GIVEN && any_wrong<RULE == MAGNITUDE>(v)) {
            unrolled<4>([&](auto i) {
                if (is_wrong<RULE == MAGNITUDE>(v[i.value])) atomicMin(p.wrong, place(4 * group + i.value));
            });
        }
        u32 kept = 0;
        if (RULE == MAGNITUDE) kept = two_largest(v);
        if (RULE == SOFT_THRESHOLD) kept = soft_threshold(v);
        if (RULE == MVUE_APPROXIMATE && g.value < 2) kept = mvue_approximate(v, g.value == 0 ? unit(random.x) : unit(random.z), g.value == 0 ? unit(random.y) : unit(random.w));
        if (RULE == MVUE_APPROXIMATE && g.value >= 2) kept = mvue_approximate(v, g.value == 2 ? unit(more.x) : unit(more.z), g.value == 2 ? unit(more.y) : unit(more.w));
        if (RULE == GIVEN && group < own_groups) {
            const u32 tile = p.tiles[COLUMNS ? (u64)group * (p.cols / 4) + line / 4 : (u64)(line / 4) * (p.cols / 4) + group];
            kept = COLUMNS ? (tile >> line % 4 & 0x1111) * 0x249 >> 9 & 15 : tile >> 4 * (line % 4) & 15;
        }
        Two two;
        if (RULE == MVUE) two = mvue(v, unit(g.value == 0 ? random.x : g.value == 1 ? random.y : g.value == 2 ? random.z : random.w));
        else two = of_kept(v, kept);
        if (group >= own_groups) two = of_kept(v, 0);
        if (p.factor) {
            two.a = times(two.a, factor);
            two.b = times(two.b, factor);
        }
        out.of[g.value] = stored(two.a) | stored(two.b) << (8 * sizeof(Stored));
        codes |= two.code << (4 * g.value);
    });
    Both* to = (Both*)p.values + (u64)line * p.groups + first_group;
    if (p.groups % 4 == 0) {
        if (first_group < p.groups) *(FourBoth*)to = out;
    } else {
        unrolled<4>([&](auto g) {
            if (first_group + g.value < p.groups) to[g.value] = out.of[g.value];
        });
    }
    return codes;
}

// A thread takes 32 elements of a row, in two halves: twice as much code for both at once makes no difference.
template <int RULE> __device__ __forceinline__ void along_rows(const OneWay& p) {
    const u32 words = (p.groups + 7) / 8;
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (u64)p.rows * words) return;
    const u32 row = index <= 0xFFFFFFFFu ? (u32)index / words : (u32)(index / words), word = (u32)index - row * words;
    const auto place = [&](u32 along) { return (u64)row * p.cols + along; };
    const float factor = p.factor ? *p.factor : 1.0f;
    u32 codes = 0;
    #pragma unroll 1
    for (u32 half = 0; half < 2; half++) {
        const u32 start = 32 * word + 16 * half;
        const Raw* from = (const Raw*)p.dense + place(start);
        // All loads first, so that many are under way.
        FourRaw raw[4] = {};
        if (p.cols % 4 == 0) {
            unrolled<4>([&](auto g) {
                if (start + 4 * g.value < p.cols) raw[g.value] = ((const FourRaw*)from)[g.value];
            });
        } else {
            unrolled<16>([&](auto i) {
                if (start + i.value < p.cols) raw[i.value / 4].of[i.value % 4] = from[i.value];
            });
        }
        float values[4][4];
        unrolled<16>([&](auto i) { values[i.value / 4][i.value % 4] = widen<IN>(raw[i.value / 4].of[i.value % 4]); });
        codes |= four_groups<RULE, false>(p, values, row, start / 4, (p.cols + 3) / 4, factor, place) << (16 * half);
    }
    store_meta<sizeof(Stored)>(p.meta, p.rows, words, row, word, codes);
}

// A thread takes 16 elements of two neighbouring columns, and a warp's threads neighbouring pairs, so that loads of a row come together.
template <int RULE> __device__ __forceinline__ void along_columns(const OneWay& p) {
    struct __align__(2 * sizeof(Raw)) TwoRaw { Raw of[2]; };
    const u32 words = (p.groups + 7) / 8, col = 2 * (blockIdx.x * blockDim.x + threadIdx.x), half = blockIdx.y, start = 16 * half;
    if (col >= p.cols) return;
    const float factor = p.factor ? *p.factor : 1.0f;
    const Raw* from = (const Raw*)p.dense + (u64)start * p.cols + col;
    TwoRaw raw[16] = {};
    if (p.cols % 2 == 0 && start + 16 <= p.rows) {
        unrolled<16>([&](auto i) { raw[i.value] = *(const TwoRaw*)(from + (u64)i.value * p.cols); });
    } else {
        unrolled<16>([&](auto i) {
            if (start + i.value < p.rows) {
                raw[i.value].of[0] = from[(u64)i.value * p.cols];
                if (col + 1 < p.cols) raw[i.value].of[1] = from[(u64)i.value * p.cols + 1];
            }
        });
    }
    unrolled<2>([&](auto c) {
        const u32 line = col + c.value;
        if (line >= p.cols) return;
        const auto place = [&](u32 along) { return (u64)along * p.cols + line; };
        float values[4][4];
        unrolled<16>([&](auto i) { values[i.value / 4][i.value % 4] = widen<IN>(raw[i.value].of[c.value]); });
        const u32 codes = four_groups<RULE, true>(p, values, line, start / 4, (p.rows + 3) / 4, factor, place);
        store_half_meta<sizeof(Stored)>(p.meta, p.cols, words, line, half, (u16)codes);
    });
}

#define ONE_WAY(name, RULE)                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(256, 3) rows_##name(const __grid_constant__ OneWay p) { along_rows<RULE>(p); }                  \
    extern "C" __global__ void __launch_bounds__(256, 3) columns_##name(const __grid_constant__ OneWay p) { along_columns<RULE>(p); }
ONE_WAY(magnitude, MAGNITUDE)
ONE_WAY(soft_threshold, SOFT_THRESHOLD)
ONE_WAY(mvue_approximate, MVUE_APPROXIMATE)
ONE_WAY(mvue, MVUE)
ONE_WAY(given, GIVEN)
