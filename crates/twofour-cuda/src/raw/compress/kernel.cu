// Compresses dense tensors of type IN to values of type OUT, along rows or along columns; the latter produces the
// compressed transpose. The mask comes from a rule for groups of four or from memory. The same bits as crate twofour's
// select/nm.rs and estimate.
//
// A thread handles 32 elements: of a row, one word of metadata; or of two columns, half a word of each. Lines past the
// tensor's, and groups past the end of a line, are padding: zeros with a valid code.
//
// Defined outside: IN, OUT.

enum Rule { MAGNITUDE = 0, SOFT_THRESHOLD = 1, MVUE_APPROXIMATE = 2, MVUE = 3, GIVEN = 4 };

struct OneWay {
    const void* dense;   // [rows, cols]
    void* values;        // of each line, two for each group, where lines are rows or columns
    MetaOrder meta;
    const u16* tiles;    // [ceil(rows / 4), ceil(cols / 4)]: read by GIVEN
    const float* factor; // for all values, or null
    u64* wrong;          // the least index of what is not a number or, but for MAGNITUDE, not finite; or all ones
    u64 seed;
    const u64* seed_at;  // added to the seed, or null
    u32 rows, cols;
    u32 groups;          // of a line's values: those past its end are of zeros
    u32 lines;           // of the compressed form: those past the tensor's are of zeros
    u32 aligned;         // whether four elements of a row, or two where lines are columns, are aligned in every row
};

// ---- one axis
// ---------------------------------------------------------------------------------------------------------------------

typedef Bits<IN>::type Raw;
typedef Bits<OUT>::type Stored;
typedef Pair<sizeof(Stored)>::type Both;
typedef FourPairs<Both> FourBoth;
struct __align__(4 * sizeof(Raw)) FourRaw { Raw of[4]; };

// Rounds a value, and replaces -0.0 by +0.0.
__device__ __forceinline__ Both stored(float value) {
    const Stored bits = narrow<OUT>(value);
    return (Stored)(bits << 1) == 0 ? 0 : bits;
}

// Returns whether a number is NaN or, unless INFINITIES are allowed, infinite.
template <bool INFINITIES> __device__ __forceinline__ bool is_wrong(float value) {
    return INFINITIES ? value != value : !(fabsf(value) <= 3.402823466e38f);
}
// Returns whether any of four is. Magnitudes are divided by eight, so that the sum of finite ones is finite.
template <bool INFINITIES> __device__ __forceinline__ bool any_wrong(const float (&v)[4]) {
    if (INFINITIES) return v[0] != v[0] || v[1] != v[1] || v[2] != v[2] || v[3] != v[3];
    float m[4];
    unrolled<4>([&](auto i) { m[i.value] = times(fabsf(v[i.value]), 0.125f); });
    return is_wrong<false>(add(add(m[0], m[1]), add(m[2], m[3])));
}

// Returns the seed of this launch.
__device__ __forceinline__ u64 seed_of(const OneWay& p) { return p.seed_at ? p.seed + *p.seed_at : p.seed; }

// Four compressed groups of a line.
struct FourGroups {
    FourBoth values;
    u32 codes;
};

// Compresses four groups of a line from `first_group` on. `place` returns the index in the tensor of a line's element.
template <int RULE, bool COLUMNS, class Place> __device__ __forceinline__ FourGroups four_groups(const OneWay& p,
    u64 seed, float (&values)[4][4], u32 line, u32 first_group, u32 own_groups, float factor, Place place) {
    // One Philox draw serves four groups of MVUE, or two groups of MVUE_APPROXIMATE.
    uint4 random = {}, more = {};
    if (RULE == MVUE) random = philox(seed, first_group / 4, line, 0);
    if (RULE == MVUE_APPROXIMATE) {
        random = philox(seed, first_group / 2, line, 1);
        more = philox(seed, first_group / 2 + 1, line, 1);
    }
    FourGroups out = {};
    unrolled<4>([&](auto g) {
        const u32 group = first_group + g.value;
        float (&v)[4] = values[g.value];
        if (group >= p.groups) return;
        if (RULE != GIVEN && any_wrong<RULE == MAGNITUDE>(v)) {
            unrolled<4>([&](auto i) {
                if (is_wrong<RULE == MAGNITUDE>(v[i.value])) atomicMin(p.wrong, place(4 * group + i.value));
            });
        }
        u32 kept = 0;
        if (RULE == MAGNITUDE) kept = two_largest(v);
        if (RULE == SOFT_THRESHOLD) kept = soft_threshold(v);
        if (RULE == MVUE_APPROXIMATE && g.value < 2)
            kept = mvue_approximate(
                v, g.value == 0 ? unit(random.x) : unit(random.z), g.value == 0 ? unit(random.y) : unit(random.w));
        if (RULE == MVUE_APPROXIMATE && g.value >= 2)
            kept = mvue_approximate(
                v, g.value == 2 ? unit(more.x) : unit(more.z), g.value == 2 ? unit(more.y) : unit(more.w));
        if (RULE == GIVEN && group < own_groups) {
            const u32 tile_cols = (p.cols + 3) / 4;
            const u32 tile = p.tiles[COLUMNS ? (u64)group * tile_cols + line / 4 : (u64)(line / 4) * tile_cols + group];
            kept = COLUMNS ? (tile >> line % 4 & 0x1111) * 0x249 >> 9 & 15 : tile >> 4 * (line % 4) & 15;
        }
        Two two;
        if (RULE == MVUE)
            two = mvue(v, unit(g.value == 0 ? random.x : g.value == 1 ? random.y : g.value == 2 ? random.z : random.w));
        else two = of_kept(v, kept);
        if (group >= own_groups) two = of_kept(v, 0);
        if (p.factor) {
            two.a = times(two.a, factor);
            two.b = times(two.b, factor);
        }
        out.values.of[g.value] = stored(two.a) | stored(two.b) << (8 * sizeof(Stored));
        out.codes |= two.code << (4 * g.value);
    });
    return out;
}

// Compresses four groups by MVUE where values keep their 16-bit type and all elements are inside the tensor. `groups`
// returns the bits of each group. Returns false where `four_groups` must be used instead.
template <int RULE, int E, class Groups, class Out> __device__ __forceinline__ bool four_groups_drawn(
    const OneWay& p, u64 seed, Groups groups, u32 line, u32 first_group, Out& out) {
    if constexpr (RULE == MVUE && E == OUT && sizeof(typename Bits<E>::type) == 2) {
        uint2 lying[4];
        unrolled<4>([&](auto g) { lying[g.value] = groups(g); });
        return !p.factor && drawn<E>(lying, philox(seed, first_group / 4, line, 0), out.values.of, out.codes);
    }
    return false;
}

// Stores the values of four groups of a line from `first_group` on.
__device__ __forceinline__ void store_values(const OneWay& p, u32 line, u32 first_group, const FourBoth& values) {
    Both* to = (Both*)p.values + (u64)line * p.groups + first_group;
    if (p.groups % 4 == 0) {
        if (first_group < p.groups) *(FourBoth*)to = values;
    } else {
        unrolled<4>([&](auto g) {
            if (first_group + g.value < p.groups) to[g.value] = values.of[g.value];
        });
    }
}

// A thread compresses 32 elements of a row, in two halves: unrolling both is no faster and twice the code.
template <int RULE> __device__ __forceinline__ void along_rows(const OneWay& p) {
    const u32 words = (p.groups + 7) / 8;
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (u64)p.lines * words) return;
    const u32 row = index <= 0xFFFFFFFFu ? (u32)index / words : (u32)(index / words), word = (u32)index - row * words;
    if (row >= p.rows) {
        #pragma unroll 1
        for (u32 half = 0; half < 2; half++) store_values(p, row, 8 * word + 4 * half, FourBoth{});
        store_meta<sizeof(Stored)>(p.meta, p.lines, words, row, word, NO_VALUES);
        return;
    }
    const auto place = [&](u32 along) { return (u64)row * p.cols + along; };
    const float factor = p.factor ? *p.factor : 1.0f;
    const u64 seed = RULE == MVUE || RULE == MVUE_APPROXIMATE ? seed_of(p) : 0;
    u32 codes = 0;
    #pragma unroll 1
    for (u32 half = 0; half < 2; half++) {
        const u32 start = 32 * word + 16 * half;
        const Raw* from = (const Raw*)p.dense + place(start);
        // All loads first, so that many are in flight.
        FourRaw raw[4] = {};
        if (p.aligned) {
            unrolled<4>([&](auto g) {
                if (start + 4 * g.value < p.cols) raw[g.value] = ((const FourRaw*)from)[g.value];
            });
        } else {
            unrolled<16>([&](auto i) {
                if (start + i.value < p.cols) raw[i.value / 4].of[i.value % 4] = from[i.value];
            });
        }
        const auto lying = [&](auto g) {
            const Raw (&of)[4] = raw[g.value].of;
            return make_uint2(of[0] | of[1] << 16, of[2] | of[3] << 16);
        };
        FourGroups out;
        if (start + 16 > p.cols || !four_groups_drawn<RULE, IN>(p, seed, lying, row, start / 4, out)) {
            float values[4][4];
            unrolled<16>(
                [&](auto i) { values[i.value / 4][i.value % 4] = widen<IN>(raw[i.value / 4].of[i.value % 4]); });
            out = four_groups<RULE, false>(p, seed, values, row, start / 4, (p.cols + 3) / 4, factor, place);
        }
        store_values(p, row, start / 4, out.values);
        codes |= out.codes << (16 * half);
    }
    store_meta<sizeof(Stored)>(p.meta, p.lines, words, row, word, codes);
}

// A CTA compresses 64 columns of 128 elements each. A thread handles 16 elements of two neighbouring columns, and
// neighbouring threads neighbouring pairs of columns, so that loads of a row are coalesced. Values and metadata go
// through shared memory, so that stores of a line are coalesced.
template <int RULE> __device__ __forceinline__ void along_columns(const OneWay& p) {
    typedef Pair<sizeof(Raw)>::type Neighbours;
    __shared__ FourBoth values[ROWS_OF_BLOCK][HALVES_OF_BLOCK];
    __shared__ u32 meta[WORDS_OF_BLOCK];
    const u32 first_line = ROWS_OF_BLOCK * blockIdx.x, first_half = HALVES_OF_BLOCK * blockIdx.y;
    const u32 own_line = 2 * (threadIdx.x % 32), own_half = threadIdx.x / 32;
    const u32 col = first_line + own_line, start = 16 * (first_half + own_half);
    const float factor = p.factor ? *p.factor : 1.0f;
    const u64 seed = RULE == MVUE || RULE == MVUE_APPROXIMATE ? seed_of(p) : 0;
    const Raw* from = (const Raw*)p.dense + (u64)start * p.cols + col;
    Neighbours raw[16] = {};
    if (p.aligned && start + 16 <= p.rows) {
        if (col < p.cols)
            unrolled<16>([&](auto i) { raw[i.value] = *(const Neighbours*)(from + (u64)i.value * p.cols); });
    } else {
        unrolled<16>([&](auto i) {
            if (start + i.value < p.rows) {
                if (col < p.cols) raw[i.value] = from[(u64)i.value * p.cols];
                if (col + 1 < p.cols) raw[i.value] |= (Neighbours)from[(u64)i.value * p.cols + 1] << (8 * sizeof(Raw));
            }
        });
    }
    const HalfPlaces places = half_places<sizeof(Stored)>(p.meta.order, own_line, own_half);
    unrolled<2>([&](auto c) {
        const u32 line = col + c.value, half = own_half ^ own_line / 2 % HALVES_OF_BLOCK;
        if (line >= p.cols) {
            values[own_line + c.value][half] = FourBoth{};
            ((u16*)meta)[c.value == 0 ? places.even : places.odd] = (u16)NO_VALUES;
            return;
        }
        const auto place = [&](u32 along) { return (u64)along * p.cols + line; };
        const auto lying = [&](auto g) {
            return make_uint2(halves_of(raw[4 * g.value], raw[4 * g.value + 1], c.value),
                halves_of(raw[4 * g.value + 2], raw[4 * g.value + 3], c.value));
        };
        FourGroups out;
        if (start + 16 > p.rows || !four_groups_drawn<RULE, IN>(p, seed, lying, line, start / 4, out)) {
            float wide[4][4];
            unrolled<16>([&](auto i) {
                wide[i.value / 4][i.value % 4] = widen<IN>((Raw)(raw[i.value] >> (8 * sizeof(Raw) * c.value)));
            });
            out = four_groups<RULE, true>(p, seed, wide, line, start / 4, (p.rows + 3) / 4, factor, place);
        }
        // Swizzled: neighbouring pairs of lines begin in different banks.
        values[own_line + c.value][half] = out.values;
        ((u16*)meta)[c.value == 0 ? places.even : places.odd] = (u16)out.codes;
    });
    __syncthreads();
    constexpr u32 AT_ONCE = 256 / HALVES_OF_BLOCK;
    const u32 half = threadIdx.x % HALVES_OF_BLOCK,
              place_there = half ^ threadIdx.x / HALVES_OF_BLOCK / 2 % HALVES_OF_BLOCK;
    unrolled<ROWS_OF_BLOCK / AT_ONCE>([&](auto i) {
        const u32 line = AT_ONCE * i.value + threadIdx.x / HALVES_OF_BLOCK;
        if (first_line + line < p.lines)
            store_values(p, first_line + line, 4 * (first_half + half), values[line][place_there]);
    });
    store_meta_of_block(p.meta, p.lines, (p.groups + 7) / 8, first_line, first_half / 2, meta);
}

// CTAs resident on an SM, along rows and along columns, as registers allow. Before sm_100 the compiler fits three of
// MVUE along rows.
#if __CUDA_ARCH__ >= 1000
constexpr u32 MVUE_ALONG_ROWS = 2;
#else
constexpr u32 MVUE_ALONG_ROWS = 3;
#endif
#define ONE_WAY(name, RULE, ALONG_ROWS, ALONG_COLUMNS)                                                            \
    extern "C" __global__ void __launch_bounds__(256, ALONG_ROWS) rows_##name(const __grid_constant__ OneWay p) { \
        along_rows<RULE>(p);                                                                                      \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256, ALONG_COLUMNS)                                              \
        columns_##name(const __grid_constant__ OneWay p) {                                                        \
        along_columns<RULE>(p);                                                                                   \
    }
ONE_WAY(magnitude, MAGNITUDE, 3, 3)
ONE_WAY(soft_threshold, SOFT_THRESHOLD, 3, 3)
ONE_WAY(mvue_approximate, MVUE_APPROXIMATE, 3, 3)
ONE_WAY(mvue, MVUE, MVUE_ALONG_ROWS, 4)
ONE_WAY(given, GIVEN, 3, 3)

// Adds one to a seed, for the next launch.
extern "C" __global__ void advance_seed(u64* seed) { *seed += 1; }
