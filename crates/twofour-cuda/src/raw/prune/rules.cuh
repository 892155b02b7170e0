// Rules that select the mask of a 4x4 tile, with the same bits as crate twofour's select/nm.rs and select/tile.

// ---- rules for tiles
// ---------------------------------------------------------------------------------------------------------

enum Rule { GREEDY_ABS = 0, GREEDY_SIGNED = 1, CAUSAL_1122 = 2, OPTIMAL = 3, GIVEN = 4, ROWS = 5, ANY = 6 };

struct Entry {
    int key;
    u32 payload;
};

// How the keys of two tiles compare: those of one type of floats, or integers below 0x8000.
enum Keys { NUMBERS_F16, NUMBERS_BF16, INTEGERS };

// Entries of two tiles, one in each 16-bit half.
template <Keys K> struct Two {
    u32 keys, payloads;
};

// Returns 0xFFFF in each half in which the key of `a` is less than that of `b`. -0.0 and +0.0 are equal.
template <Keys K> __device__ __forceinline__ u32 is_less(u32 a, u32 b) {
    u32 less;
    if constexpr (K == NUMBERS_F16) asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(less) : "r"(a), "r"(b));
    else if constexpr (K == NUMBERS_BF16) asm("set.lt.u32.bf16x2 %0, %1, %2;" : "=r"(less) : "r"(a), "r"(b));
    // The sign bit of each half of the difference says whether its first key is the smaller one; `permute` copies it to
    // all bits of the half.
    else less = permute(b + 0x7FFF7FFFu - a, 0, 0xBB99);
    return less;
}

// A comparator keeps the order only where the first key is less than the second: equal keys are exchanged.
__device__ __forceinline__ void compare(Entry& a, Entry& b) {
    bool in_order = a.key < b.key;
    Entry low, high;
    low.key = in_order ? a.key : b.key;
    low.payload = in_order ? a.payload : b.payload;
    high.key = in_order ? b.key : a.key;
    high.payload = in_order ? b.payload : a.payload;
    a = low;
    b = high;
}

template <Keys K> __device__ __forceinline__ void compare(Two<K>& a, Two<K>& b) {
    const u32 in_order = is_less<K>(a.keys, b.keys);
    Two<K> low, high;
    low.keys = (a.keys & in_order) | (b.keys & ~in_order);
    low.payloads = (a.payloads & in_order) | (b.payloads & ~in_order);
    high.keys = (b.keys & in_order) | (a.keys & ~in_order);
    high.payloads = (b.payloads & in_order) | (a.payloads & ~in_order);
    a = low;
    b = high;
}

// Bose-Nelson sorting networks (JACM 1962), ascending, as templates over the offset and the length of the runs.
template <int I, int X, int J, int Y> struct Merge {
    static constexpr int A = X / 2, B = X % 2 ? Y / 2 : (Y + 1) / 2;
    template <class E> __device__ __forceinline__ static void run(E* e) {
        Merge<I, A, J, B>::run(e);
        Merge<I + A, X - A, J + B, Y - B>::run(e);
        Merge<I + A, X - A, J, B>::run(e);
    }
};
template <int I, int J> struct Merge<I, 1, J, 1> {
    template <class E> __device__ __forceinline__ static void run(E* e) { compare(e[I], e[J]); }
};
template <int I, int J> struct Merge<I, 1, J, 2> {
    template <class E> __device__ __forceinline__ static void run(E* e) {
        compare(e[I], e[J + 1]);
        compare(e[I], e[J]);
    }
};
template <int I, int J> struct Merge<I, 2, J, 1> {
    template <class E> __device__ __forceinline__ static void run(E* e) {
        compare(e[I], e[J]);
        compare(e[I + 1], e[J]);
    }
};
template <int I, int M> struct Sort {
    template <class E> __device__ __forceinline__ static void run(E* e) {
        Sort<I, M / 2>::run(e);
        Sort<I + M / 2, M - M / 2>::run(e);
        Merge<I, M / 2, I + M / 2, M - M / 2>::run(e);
    }
};
template <int I> struct Sort<I, 1> {
    template <class E> __device__ __forceinline__ static void run(E*) {}
};

// Returns the payload of element 4 row + col: its mask bit in the lower half, and two-bit counters for each row and
// column in the upper half.
__device__ constexpr u32 payload_of(int element) {
    return 1u << element | 1u << (16 + 2 * (element / 4)) | 1u << (24 + 2 * (element % 4));
}

constexpr u32 WHOLE = 0xFFFF;

// Keeps elements in descending order of keys, while their row and column have fewer than two. Elements outside `inside`
// are not kept.
__device__ __forceinline__ u32 greedy(const int* keys, u32 inside = WHOLE) {
    Entry e[16];
    unrolled<16>([&](auto i) {
        e[i.value].key = keys[i.value];
        e[i.value].payload = inside >> i.value & 1 ? payload_of(i.value) : 0;
    });
    Sort<0, 16>::run(e);
    u32 taken = 0;
    unrolled<16>([&](auto i) {
        u32 payload = e[15 - i.value].payload;
        // A count of two has its upper bit set.
        if ((taken & (payload << 1) & 0xAAAA0000u) == 0) taken += payload;
    });
    return taken & 0xFFFF;
}

// Row by row in descending order of keys: keeps at most 1, 1, 2, 2 elements of the rows, while the column has fewer
// than two.
__device__ __forceinline__ u32 causal1122(const int* keys, u32 inside = WHOLE) {
    u32 taken = 0;
    unrolled<4>([&](auto row) {
        Entry e[4];
        unrolled<4>([&](auto col) {
            e[col.value].key = keys[4 * row.value + col.value];
            e[col.value].payload =
                inside >> (4 * row.value + col.value) & 1 ? payload_of(4 * row.value + col.value) : 0;
        });
        Sort<0, 4>::run(e);
        constexpr u32 room = row.value < 2 ? 1 : 2;
        unrolled<4>([&](auto i) {
            u32 payload = e[3 - i.value].payload;
            bool in_row = ((taken >> (16 + 2 * row.value)) & 3) < room;
            if (in_row && (taken & (payload << 1) & 0xAA000000u) == 0) taken += payload;
        });
    });
    return taken & 0xFFFF;
}

// Returns the pairs that a row can keep, in lexicographic order.
__device__ constexpr u32 pair_of(int pair) {
    return pair == 0 ? 3u : pair == 1 ? 5u : pair == 2 ? 9u : pair == 3 ? 6u : pair == 4 ? 10u : 12u;
}

// Returns the column counts of two rows' pairs, as four digits of two bits.
__device__ constexpr u32 counts_of(int pairs) {
    u32 a = pair_of(pairs / 6), b = pair_of(pairs % 6), sum = 0;
    for (int c = 0; c < 4; c++) sum += ((a >> c & 1) + (b >> c & 1)) << (2 * c);
    return sum;
}

// Returns the index of these column counts among the distinct ones, in the order of pairs.
__device__ constexpr int vector_of_counts(u32 counts) {
    int vector = 0;
    for (int p = 0; p < 36; p++) {
        if (counts_of(p) == counts) return vector;
        bool first = true;
        for (int q = 0; q < p; q++) first = first && counts_of(q) != counts_of(p);
        if (first) vector++;
    }
    return -1;
}
template <int P> struct Leaves { static constexpr int value = vector_of_counts(counts_of(P)); };
template <int P> struct Completes { static constexpr int value = vector_of_counts(0xAA - counts_of(P)); };

struct Best {
    float score;
    // `pairs << 8 | bits of the two rows`: the order of pairs is the order of these.
    u32 pairs;
};

template <template <int> class Vector>
__device__ __forceinline__ void best_by_vector(const float* first, const float* second, Best* best) {
    unrolled<19>([&](auto v) { best[v.value] = Best{-1.0f, 0}; });
    unrolled<36>([&](auto p) {
        constexpr int P = p.value;
        float score = first[P / 6] + second[P % 6];
        Best& slot = best[Vector<P>::value];
        if (score > slot.score) {
            slot.score = score;
            slot.pairs = P << 8 | pair_of(P / 6) | pair_of(P % 6) << 4;
        }
    });
}

// Scales scores so that their sums are finite: see select/tile/optimal.rs.
__device__ __forceinline__ void without_overflow(float* scores) {
    const float MAX = __uint_as_float(0x7F7FFFFFu);
    bool huge = false;
    unrolled<16>([&](auto i) { huge = huge || scores[i.value] > MAX / 8.0f; });
    if (huge) {
        unrolled<16>([&](auto i) {
            scores[i.value] = __float_as_uint(scores[i.value]) == 0x7F800000u ? MAX / 16.0f : scores[i.value] / 256.0f;
        });
    }
}

// Returns the best of the 90 masks with two elements in each row and column; see select/tile/optimal.rs for the order
// of additions and ties.
__device__ __forceinline__ u32 optimal(float* scores) {
    without_overflow(scores);
    float rows[4][6];
    unrolled<4>([&](auto r) {
        const float* s = scores + 4 * r.value;
        rows[r.value][0] = s[0] + s[1];
        rows[r.value][1] = s[0] + s[2];
        rows[r.value][2] = s[0] + s[3];
        rows[r.value][3] = s[1] + s[2];
        rows[r.value][4] = s[1] + s[3];
        rows[r.value][5] = s[2] + s[3];
    });
    Best upper[19], lower[19];
    best_by_vector<Leaves>(rows[0], rows[1], upper);
    best_by_vector<Completes>(rows[2], rows[3], lower);
    float score = -1.0f;
    u32 above = 0xFFFFFFFFu, below = 0;
    unrolled<19>([&](auto v) {
        float total = upper[v.value].score + lower[v.value].score;
        if (total > score || (total == score && upper[v.value].pairs < above)) {
            score = total;
            above = upper[v.value].pairs;
            below = lower[v.value].pairs;
        }
    });
    return (above & 0xFF) | (below & 0xFF) << 8;
}

// Returns the sets that a row can keep in a tile at the weight's edge, in the order in which ties are resolved: larger
// sets first.
__device__ constexpr u32 choice_of(u32 i) { return i < 6 ? pair_of(i) : i < 10 ? 1u << (i - 6) : 0; }
constexpr u32 CHOICES = 11;

// Searches exhaustively for the best rows from ROW on, where the rows above keep `above` with a total of `score`.
template <int ROW> struct Extend {
    __device__ __forceinline__ static void run(const float* scores, u32 inside, u32 above, float score, Best& best) {
        #pragma unroll 1
        for (u32 i = 0; i < CHOICES; i++) {
            const u32 choice = choice_of(i), with = above | choice << (4 * ROW);
            const bool fits = __popc(with & 0x1111) <= 2 && __popc(with & 0x2222) <= 2 && __popc(with & 0x4444) <= 2 &&
                              __popc(with & 0x8888) <= 2;
            if (!fits || (choice << (4 * ROW) & ~inside) != 0) continue;
            float gain = 0.0f;
            unrolled<4>([&](auto c) {
                if (choice >> c.value & 1) gain += scores[4 * ROW + c.value];
            });
            Extend<ROW + 1>::run(scores, inside, with, score + gain, best);
        }
    }
};
template <> struct Extend<4> {
    __device__ __forceinline__ static void run(const float*, u32, u32 kept, float score, Best& best) {
        if (score > best.score) best = Best{score, kept};
    }
};

// Returns the best mask of a tile at the weight's edge: at most two elements in each row and column.
__device__ __forceinline__ u32 optimal_of_cut_tile(float* scores, u32 inside) {
    without_overflow(scores);
    Best best{-1.0f, 0};
    Extend<0>::run(scores, inside, 0, 0.0f, best);
    return best.pairs;
}

// Returns the two largest keys, ties to the lower index.
__device__ __forceinline__ u32 two_largest(const int* keys) {
    u32 kept = 0;
    unrolled<4>([&](auto i) {
        u32 larger = 0;
        unrolled<4>([&](auto j) {
            if (j.value != i.value)
                larger += j.value < i.value ? keys[j.value] >= keys[i.value] : keys[j.value] > keys[i.value];
        });
        if (larger < 2) kept |= 1u << i.value;
    });
    return kept;
}

// Four elements of a row as loaded: their values, and integer keys in the order of their magnitudes or of their signed
// values. The keys of -0.0 and +0.0 are equal.
template <int E> struct Four {
    uint2 bits;
    __device__ __forceinline__ u32 raw(int i) const {
        u32 word = i < 2 ? bits.x : bits.y;
        return i % 2 ? word >> 16 : word & 0xFFFF;
    }
    __device__ __forceinline__ float value(int i) const { return widen<E>((u16)raw(i)); }
    __device__ __forceinline__ int magnitude(int i) const { return raw(i) & 0x7FFF; }
    __device__ __forceinline__ int signed_key(int i) const { return raw(i) & 0x8000 ? -magnitude(i) : magnitude(i); }
    // Returns nonzero if an element is NaN.
    __device__ __forceinline__ u32 nan() const {
        constexpr u32 above_infinity = E == BF16 ? 0x007F007Fu : 0x03FF03FFu;
        return (((bits.x & 0x7FFF7FFFu) + above_infinity) | ((bits.y & 0x7FFF7FFFu) + above_infinity)) & 0x80008000u;
    }
};
template <> struct Four<F32> {
    uint4 bits;
    __device__ __forceinline__ u32 raw(int i) const {
        return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
    }
    __device__ __forceinline__ float value(int i) const { return __uint_as_float(raw(i)); }
    __device__ __forceinline__ int magnitude(int i) const { return raw(i) & 0x7FFFFFFF; }
    __device__ __forceinline__ int signed_key(int i) const { return (int)raw(i) < 0 ? -magnitude(i) : magnitude(i); }
    __device__ __forceinline__ u32 nan() const {
        u32 any = 0;
        unrolled<4>([&](auto i) { any |= (raw(i.value) & 0x7FFFFFFFu) + 0x7FFFFFu; });
        return any & 0x80000000u;
    }
};

// How the keys of two tiles of this type compare. bfloat16 has instructions for it from compute capability 9.0 on.
#if __CUDA_ARCH__ >= 900
template <int In> struct KeysOf { static constexpr Keys value = In == F16 ? NUMBERS_F16 : NUMBERS_BF16; };
#else
template <int In> struct KeysOf { static constexpr Keys value = In == F16 ? NUMBERS_F16 : INTEGERS; };
#endif

// Whether a rule's masks are selected for two tiles of 16-bit elements at a time.
template <int RULE, int In> struct InTwos {
    static constexpr bool value =
        In != F32 && (RULE == GREEDY_ABS || (RULE == GREEDY_SIGNED && KeysOf<In>::value != INTEGERS));
};

// Selects greedily the masks of two tiles of 16-bit elements, of four rows each, with one sort for both. `payloads` are
// those of the elements.
template <int RULE, int In> __device__ __forceinline__ void greedy_two(
    const Four<In>* first, const Four<In>* second, const u32* payloads, u32* kept) {
    constexpr u32 part = RULE == GREEDY_ABS ? 0x7FFF7FFFu : 0xFFFFFFFFu;
    Two<KeysOf<In>::value> e[16];
    unrolled<16>([&](auto i) {
        constexpr int r = i.value / 4, c = i.value % 4;
        u32 a = c < 2 ? first[r].bits.x : first[r].bits.y, b = c < 2 ? second[r].bits.x : second[r].bits.y;
        e[i.value].keys = permute(a, b, c % 2 ? 0x7632 : 0x5410) & part;
        // The byte offset of the element's payload.
        e[i.value].payloads = 0x00040004u * i.value;
    });
    Sort<0, 16>::run(e);
    u32 a = 0, b = 0;
    unrolled<16>([&](auto i) {
        u32 places = e[15 - i.value].payloads;
        u32 of_a = *(const u32*)((const u8*)payloads + (places & 0xFFFF)),
            of_b = *(const u32*)((const u8*)payloads + (places >> 16));
        if ((a & (of_a << 1) & 0xAAAA0000u) == 0) a += of_a;
        if ((b & (of_b << 1) & 0xAAAA0000u) == 0) b += of_b;
    });
    kept[0] = a & 0xFFFF;
    kept[1] = b & 0xFFFF;
}

// A key that is at most the key of every number: that of minus infinity.
template <int In> struct Below {
    static constexpr int value = In == F32 ? -0x7F800000 : In == BF16 ? -0x7F80 : -0x7C00;
};

// Returns the mask of a tile of four rows. With CUT the tile is at the weight's edge, and only the elements of `inside`
// exist.
template <int RULE, int In, bool CUT> __device__ __forceinline__ u32 select_tile(const Four<In>* rows, u32 inside) {
    if constexpr (RULE == OPTIMAL) {
        float scores[16];
        unrolled<16>([&](auto i) { scores[i.value] = fabsf(rows[i.value / 4].value(i.value % 4)); });
        if (CUT && inside != WHOLE) return optimal_of_cut_tile(scores, inside);
        return optimal(scores);
    } else {
        int keys[16];
        unrolled<16>([&](auto i) {
            const Four<In>& row = rows[i.value / 4];
            keys[i.value] =
                RULE == GREEDY_ABS || RULE == ROWS ? row.magnitude(i.value % 4) : row.signed_key(i.value % 4);
            if (CUT && !(inside >> i.value & 1)) keys[i.value] = Below<In>::value;
        });
        if (!CUT) inside = WHOLE;
        if constexpr (RULE == ROWS) {
            u32 kept = 0;
            unrolled<4>([&](auto r) { kept |= two_largest(keys + 4 * r.value) << (4 * r.value); });
            return kept & inside;
        }
        return RULE == CAUSAL_1122 ? causal1122(keys, inside) : greedy(keys, inside);
    }
}

// The same by a rule that is found out. A call of its own: the code is there once.
template <int In>
__device__ __noinline__ u32 select_tile_by(u32 rule, Four<In> a, Four<In> b, Four<In> c, Four<In> d, u32 inside) {
    const Four<In> rows[4] = {a, b, c, d};
    switch (rule) {
        case GREEDY_ABS: return select_tile<GREEDY_ABS, In, true>(rows, inside);
        case GREEDY_SIGNED: return select_tile<GREEDY_SIGNED, In, true>(rows, inside);
        case CAUSAL_1122: return select_tile<CAUSAL_1122, In, true>(rows, inside);
        case OPTIMAL: return select_tile<OPTIMAL, In, true>(rows, inside);
        default: return select_tile<ROWS, In, true>(rows, inside);
    }
}
