// From dense weights of type IN to masks and to compressed weights of type OUT, both defined by the compiler. The same bits as crate twofour: select/nm.rs, select/tile, compressed.

// ---- rules for tiles ---------------------------------------------------------------------------------------------------------

enum Rule { GREEDY_ABS = 0, GREEDY_SIGNED = 1, CAUSAL_1122 = 2, OPTIMAL = 3, GIVEN = 4 };

struct Entry {
    int key;
    u32 payload;
};

// Entries of two tiles, one in each half; keys are below 0x8000.
struct Two {
    u32 keys, payloads;
};

// A comparator leaves its pair as it is only where the first key is below the second: equal keys are exchanged.
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

__device__ __forceinline__ void compare(Two& a, Two& b) {
    // The sign of each half of the sum says whether its first key is below the second; copied to all of the half's bits.
    u32 in_order = permute(b.keys + 0x7FFF7FFFu - a.keys, 0, 0xBB99);
    Two low, high;
    low.keys = (a.keys & in_order) | (b.keys & ~in_order);
    low.payloads = (a.payloads & in_order) | (b.payloads & ~in_order);
    high.keys = (b.keys & in_order) | (a.keys & ~in_order);
    high.payloads = (b.payloads & in_order) | (a.payloads & ~in_order);
    a = low;
    b = high;
}

// The Bose-Nelson networks (JACM 1962), ascending, as functions of the place and the length of the runs.
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

// What taking element 4 row + col adds up to: its bit in the lower half; a count of two bits for each row and column in the upper.
__device__ constexpr u32 payload_of(int element) {
    return 1u << element | 1u << (16 + 2 * (element / 4)) | 1u << (24 + 2 * (element % 4));
}

// From the largest key down, while row and column hold fewer than two.
__device__ __forceinline__ u32 greedy(const int* keys) {
    Entry e[16];
    unrolled<16>([&](auto i) {
        e[i.value].key = keys[i.value];
        e[i.value].payload = payload_of(i.value);
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

// Rows in order, from the largest key down, at most 1, 1, 2, 2 of them, while the column holds fewer than two.
__device__ __forceinline__ u32 causal1122(const int* keys) {
    u32 taken = 0;
    unrolled<4>([&](auto row) {
        Entry e[4];
        unrolled<4>([&](auto col) {
            e[col.value].key = keys[4 * row.value + col.value];
            e[col.value].payload = payload_of(4 * row.value + col.value);
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

// The pairs that a row can keep, in lexicographic order.
__device__ constexpr u32 pair_of(int pair) {
    return pair == 0 ? 3u : pair == 1 ? 5u : pair == 2 ? 9u : pair == 3 ? 6u : pair == 4 ? 10u : 12u;
}

// Column counts that two rows leave, as four digits of two bits.
__device__ constexpr u32 counts_of(int pairs) {
    u32 a = pair_of(pairs / 6), b = pair_of(pairs % 6), sum = 0;
    for (int c = 0; c < 4; c++) sum += ((a >> c & 1) + (b >> c & 1)) << (2 * c);
    return sum;
}

// How many other column counts occur before these, among the pairs in order.
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

template <template <int> class Vector> __device__ __forceinline__ void best_by_vector(const float* first, const float* second, Best* best) {
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

// Of the 90 patterns the one of largest score; see select/tile/optimal.rs for the order of sums and ties, and for what happens to huge scores.
__device__ __forceinline__ u32 optimal(float* scores) {
    const float MAX = __uint_as_float(0x7F7FFFFFu);
    bool huge = false;
    unrolled<16>([&](auto i) { huge = huge || scores[i.value] > MAX / 8.0f; });
    if (huge) {
        unrolled<16>([&](auto i) {
            scores[i.value] = __float_as_uint(scores[i.value]) == 0x7F800000u ? MAX / 16.0f : scores[i.value] / 256.0f;
        });
    }
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

// Four elements of a row, as they are loaded: their values, and whole numbers in the order of their magnitudes or of their signed values, where
// -0.0 equals +0.0.
template <int E> struct Four {
    uint2 bits;
    __device__ __forceinline__ u32 raw(int i) const {
        u32 word = i < 2 ? bits.x : bits.y;
        return i % 2 ? word >> 16 : word & 0xFFFF;
    }
    __device__ __forceinline__ float value(int i) const { return widen<E>((u16)raw(i)); }
    __device__ __forceinline__ int magnitude(int i) const { return raw(i) & 0x7FFF; }
    __device__ __forceinline__ int signed_key(int i) const { return raw(i) & 0x8000 ? -magnitude(i) : magnitude(i); }
    // Not zero where one of them is NaN.
    __device__ __forceinline__ u32 nan() const {
        constexpr u32 above_infinity = E == BF16 ? 0x007F007Fu : 0x03FF03FFu;
        return (((bits.x & 0x7FFF7FFFu) + above_infinity) | ((bits.y & 0x7FFF7FFFu) + above_infinity)) & 0x80008000u;
    }
};
template <> struct Four<F32> {
    uint4 bits;
    __device__ __forceinline__ u32 raw(int i) const { return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w; }
    __device__ __forceinline__ float value(int i) const { return __uint_as_float(raw(i)); }
    __device__ __forceinline__ int magnitude(int i) const { return raw(i) & 0x7FFFFFFF; }
    __device__ __forceinline__ int signed_key(int i) const { return (int)raw(i) < 0 ? -magnitude(i) : magnitude(i); }
    __device__ __forceinline__ u32 nan() const {
        u32 any = 0;
        unrolled<4>([&](auto i) { any |= (raw(i.value) & 0x7FFFFFFFu) + 0x7FFFFFu; });
        return any & 0x80000000u;
    }
};

// Four values of so many bytes as they are stored: rounded, and +0.0 where that is -0.0.
template <int BYTES> struct Values;
template <> struct Values<2> { uint2 bits; };
template <> struct Values<1> { u32 bits; };

template <int Out, int In> __device__ __forceinline__ Values<2> stored(const Four<In>& four) {
    uint2 words;
    if constexpr (In == F32) words = make_uint2(narrow_two<Out>(four.value(0), four.value(1)), narrow_two<Out>(four.value(2), four.value(3)));
    else words = four.bits;
    return {make_uint2(plus_zeros<Out>(words.x), plus_zeros<Out>(words.y))};
}

// The same in 8-bit floats, multiplied by a factor before they are rounded.
template <int Out, int In> __device__ __forceinline__ Values<1> stored(const Four<In>& four, float factor) {
    auto two = [&](int i) { return (u32)narrow_two<Out>(four.value(i) * factor, four.value(i + 1) * factor); };
    u32 bits = two(0) | two(2) << 16;
    // A byte's upper bit goes where the lower seven are zero.
    return {bits & (((bits & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | 0x7F7F7F7Fu)};
}

// Of four rows the values of a column.
template <int COLUMN> __device__ __forceinline__ Values<2> column_of(const Values<2>* rows) {
    constexpr u32 halves = COLUMN % 2 ? 0x7632 : 0x5410;
    auto word = [&](int r) { return COLUMN < 2 ? rows[r].bits.x : rows[r].bits.y; };
    return {make_uint2(permute(word(0), word(1), halves), permute(word(2), word(3), halves))};
}
template <int COLUMN> __device__ __forceinline__ Values<1> column_of(const Values<1>* rows) {
    constexpr u32 bytes = COLUMN | (4 + COLUMN) << 4;
    return {permute(permute(rows[0].bits, rows[1].bits, bytes), permute(rows[2].bits, rows[3].bits, bytes), 0x5410)};
}

// The masks by magnitude of two tiles of 16-bit elements, of four rows each, sorted side by side. `payloads` are those of the elements.
template <int In> __device__ __forceinline__ void greedy_two(const Four<In>* first, const Four<In>* second, const u32* payloads, u32* kept) {
    Two e[16];
    unrolled<16>([&](auto i) {
        constexpr int r = i.value / 4, c = i.value % 4;
        u32 a = c < 2 ? first[r].bits.x : first[r].bits.y, b = c < 2 ? second[r].bits.x : second[r].bits.y;
        e[i.value].keys = permute(a, b, c % 2 ? 0x7632 : 0x5410) & 0x7FFF7FFFu;
        // Where its payload is, in bytes.
        e[i.value].payloads = 0x00040004u * i.value;
    });
    Sort<0, 16>::run(e);
    u32 a = 0, b = 0;
    unrolled<16>([&](auto i) {
        u32 places = e[15 - i.value].payloads;
        u32 of_a = *(const u32*)((const u8*)payloads + (places & 0xFFFF)), of_b = *(const u32*)((const u8*)payloads + (places >> 16));
        if ((a & (of_a << 1) & 0xAAAA0000u) == 0) a += of_a;
        if ((b & (of_b << 1) & 0xAAAA0000u) == 0) b += of_b;
    });
    kept[0] = a & 0xFFFF;
    kept[1] = b & 0xFFFF;
}

// The mask of the tile of four rows.
template <int RULE, int In> __device__ __forceinline__ u32 select_tile(const Four<In>* rows) {
    if constexpr (RULE == OPTIMAL) {
        float scores[16];
        unrolled<16>([&](auto i) { scores[i.value] = fabsf(rows[i.value / 4].value(i.value % 4)); });
        return optimal(scores);
    } else {
        int keys[16];
        unrolled<16>([&](auto i) {
            const Four<In>& row = rows[i.value / 4];
            keys[i.value] = RULE == GREEDY_ABS ? row.magnitude(i.value % 4) : row.signed_key(i.value % 4);
        });
        return RULE == CAUSAL_1122 ? causal1122(keys) : greedy(keys);
    }
}

// ---- from a mask to values and codes -----------------------------------------------------------------------------------------

// How to store a group of which some are kept. `bytes`: in the lower half which bytes of its four values make the two stored ones, in the upper
// half the code. `mask`: zero for a stored value that is not kept.
struct __align__(8) Picking {
    u32 bytes, mask;
};

template <int BYTES> __device__ __forceinline__ Picking picking_of(u32 kept) {
    u32 code = code_of(kept), first = code & 3, second = code >> 2;
    constexpr u32 all = BYTES == 2 ? 0xFFFF : 0xFF;
    u32 bytes = BYTES == 2 ? (0x10 + 0x22 * first) | (0x10 + 0x22 * second) << 8 : first | second << 4;
    u32 mask = (kept >> first & 1 ? all : 0) | (kept >> second & 1 ? all << (8 * BYTES) : 0);
    return Picking{bytes | code << 16, mask};
}

__device__ __forceinline__ u32 picked(Values<2> values, Picking pick) { return permute(values.bits.x, values.bits.y, pick.bytes) & pick.mask; }
__device__ __forceinline__ u16 picked(Values<1> values, Picking pick) { return (u16)(permute(values.bits, 0, pick.bytes) & pick.mask); }

// ---- metadata of rows ---------------------------------------------------------------------------------------------------------

// Four codes, one a byte, to 16 bits; twice that to 32.
__device__ __forceinline__ u32 join_codes(uint2 bytes) {
    u32 low = bytes.x | bytes.x >> 4, high = bytes.y | bytes.y >> 4;
    low = (low & 0xFF) | (low >> 8 & 0xFF00);
    high = (high & 0xFF) | (high >> 8 & 0xFF00);
    return low | high << 16;
}

// ---- both ways ---------------------------------------------------------------------------------------------------------------

// What a pass over a weight `[rows, cols]` reads and writes; null where it is not wanted.
struct BothWays {
    const void* weight;
    void* values;             // [rows, cols / 2]
    MetaOrder meta;           // of [rows, cols]
    void* values_transposed;  // [cols, rows / 2]
    MetaOrder meta_transposed;// of [cols, rows]
    u16* tiles;               // [rows / 4, cols / 4]: read by GIVEN, written by the other rules
    const u16* tiles_before;  // masks to count flips against
    u64* flips;
    u64* nan;                 // the index of the first NaN, or all ones
    u32 rows, cols;
    const float* factor;      // for values of 8 bits, or null
};

// Elements of a block's square, and of a thread's part: four tiles below each other.
#define SIDE 128
#define PART 16

// 256 threads: eight warps of 16 rows by 128 columns.
template <int In, int Out, int RULE> __device__ __forceinline__ void both_ways(const BothWays& p) {
    // Values of the transpose, [column, 64 of its row], in pieces of four tiles that are moved so that neither writing nor reading meets
    // a bank twice.
    typedef typename Bits<Out>::type Value;
    constexpr int BYTES = sizeof(Value);
    typedef typename Pair<BYTES>::type Both;
    typedef FourPairs<Both> Piece;
    __shared__ __align__(16) Value transposed[SIDE * SIDE / 2];
    __shared__ __align__(16) u8 row_codes[SIDE][SIDE / 4];
    __shared__ u16 column_codes[SIDE][9];
    __shared__ Picking pickings[16];
    __shared__ u32 payloads[16];

    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 first_row = blockIdx.y * SIDE, first_col = blockIdx.x * SIDE;
    const u32 row0 = first_row + warp * PART, col0 = first_col + 4 * lane;
    const u32 tile_cols = p.cols / 4;
    const bool column_inside = col0 < p.cols;

    auto load = [&](u32 row) {
        Four<In> four = {};
        if (column_inside && row < p.rows) four = *(const Four<In>*)((const typename Bits<In>::type*)p.weight + (u64)row * p.cols + col0);
        return four;
    };
    // All rows at once, so that many loads are under way, where registers allow.
    constexpr bool AT_ONCE = In != F32 && !(RULE == OPTIMAL && BYTES == 1);
    Four<In> w[PART];
    if constexpr (AT_ONCE) unrolled<PART>([&](auto r) { w[r.value] = load(row0 + r.value); });
    if (threadIdx.x < 16) {
        pickings[threadIdx.x] = picking_of<BYTES>(threadIdx.x);
        payloads[threadIdx.x] = payload_of(threadIdx.x);
    }
    __syncthreads();

    // Two tiles at a time where their elements share registers.
    constexpr bool IN_TWOS = RULE == GREEDY_ABS && In != F32;
    u32 masks[4];
    if constexpr (IN_TWOS) {
        greedy_two(w, w + 4, payloads, masks);
        greedy_two(w + 8, w + 12, payloads, masks + 2);
    }

    u32 flips = 0;
    u32 column_code[4] = {0, 0, 0, 0};
    Piece column_values[4];
    float factor = 1.0f;
    if constexpr (BYTES == 1) {
        if (p.factor) factor = *p.factor;
    }
    unrolled<4>([&](auto t) {
        constexpr int R = 4 * t.value;
        const u32 row = row0 + R;
        const bool inside = column_inside && row < p.rows;
        if constexpr (!AT_ONCE) unrolled<4>([&](auto r) { w[R + r.value] = load(row + r.value); });
        const u64 tile = (u64)(row / 4) * tile_cols + col0 / 4;
        u32 kept = 0;
        if constexpr (RULE == GIVEN) {
            if (inside) kept = p.tiles[tile];
        } else {
            if constexpr (IN_TWOS) kept = masks[t.value];
            else kept = select_tile<RULE>(w + R);
            if (inside && p.tiles) p.tiles[tile] = (u16)kept;
            if (w[R].nan() | w[R + 1].nan() | w[R + 2].nan() | w[R + 3].nan()) {
                unrolled<16>([&](auto i) {
                    float value = w[R + i.value / 4].value(i.value % 4);
                    if (value != value) atomicMin(p.nan, (u64)(row + i.value / 4) * p.cols + col0 + i.value % 4);
                });
            }
        }
        if (inside && p.tiles_before) flips += __popc(kept ^ p.tiles_before[tile]);

        Values<BYTES> out[4];
        unrolled<4>([&](auto r) {
            if constexpr (BYTES == 2) out[r.value] = stored<Out>(w[R + r.value]);
            else out[r.value] = stored<Out>(w[R + r.value], factor);
        });
        unrolled<4>([&](auto r) {
            Picking pick = pickings[kept >> (4 * r.value) & 15];
            Both pair = picked(out[r.value], pick);
            if (inside && p.values) *(Both*)((Value*)p.values + (u64)(row + r.value) * (p.cols / 2) + col0 / 2) = pair;
            row_codes[warp * PART + R + r.value][lane] = (u8)(pick.bytes >> 16);
        });
        unrolled<4>([&](auto c) {
            Picking pick = pickings[(kept >> c.value & 0x1111) * 0x249 >> 9 & 15];
            column_values[c.value].of[t.value] = picked(column_of<c.value>(out), pick);
            column_code[c.value] |= pick.bytes >> 16 << (4 * t.value);
        });
    });

    unrolled<4>([&](auto c) {
        u32 column = 4 * lane + c.value;
        column_codes[column][warp] = (u16)column_code[c.value];
        *(Piece*)(transposed + column * (SIDE / 2) + 8 * (warp ^ (lane & 7))) = column_values[c.value];
    });
    if (p.tiles_before) {
        flips = __reduce_add_sync(0xFFFFFFFFu, flips);
        if (lane == 0 && flips) atomicAdd(p.flips, (u64)flips);
    }
    __syncthreads();

    // Metadata of rows: four words of each of 128.
    const u32 words = (p.cols + 31) / 32, words_transposed = (p.rows + 31) / 32;
    for (u32 i = threadIdx.x; i < SIDE * 4; i += 256) {
        u32 r = i / 4, word = i % 4;
        u32 row = first_row + r, global_word = first_col / 32 + word;
        if (p.meta.words && row < p.rows && global_word < words) {
            u32 codes = join_codes(*(const uint2*)&row_codes[r][8 * word]);
            u32 groups = p.cols / 4 - 8 * global_word;
            if (groups < 8) codes &= (1u << (4 * groups)) - 1;
            store_meta<BYTES>(p.meta, p.rows, words, row, global_word, codes);
        }
        u32 col = first_col + r, transposed_word = first_row / 32 + word;
        if (p.meta_transposed.words && col < p.cols && transposed_word < words_transposed) {
            u32 codes = column_codes[r][2 * word] | (u32)column_codes[r][2 * word + 1] << 16;
            u32 groups = p.rows / 4 - 8 * transposed_word;
            if (groups < 8) codes &= (1u << (4 * groups)) - 1;
            store_meta<BYTES>(p.meta_transposed, p.cols, words_transposed, col, transposed_word, codes);
        }
    }
    if (p.values_transposed && p.rows % 16 == 0) {
        // Each warp stores 16 columns, four at a time, eight values a lane.
        #pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 piece = lane % 8, column = 16 * warp + 4 * i + lane / 8, col = first_col + column, row = first_row + 16 * piece;
            if (col < p.cols && row < p.rows) {
                const Value* from = transposed + column * (SIDE / 2) + 8 * (piece ^ (column / 4 & 7));
                Value* to = (Value*)p.values_transposed + (u64)col * (p.rows / 2) + row / 2;
                *(Piece*)to = *(const Piece*)from;
            }
        }
    } else if (p.values_transposed) {
        // The same for columns that do not start where a piece can: one after the other, two values a lane.
        for (u32 i = 0; i < 16; i++) {
            u32 column = 16 * warp + i, col = first_col + column, row = first_row + 4 * lane;
            if (col < p.cols && row < p.rows) {
                const Value* from = transposed + column * (SIDE / 2) + 8 * ((lane / 4) ^ (column / 4 & 7)) + 2 * (lane % 4);
                Value* to = (Value*)p.values_transposed + (u64)col * (p.rows / 2) + row / 2;
                *(Both*)to = *(const Both*)from;
            }
        }
    }
}

#define BOTH_WAYS(name, RULE) \
    extern "C" __global__ void __launch_bounds__(256, 2) name(const __grid_constant__ BothWays p) { both_ways<IN, OUT, RULE>(p); }
BOTH_WAYS(both_ways_greedy, GREEDY_ABS)
BOTH_WAYS(both_ways_greedy_signed, GREEDY_SIGNED)
BOTH_WAYS(both_ways_causal1122, CAUSAL_1122)
BOTH_WAYS(both_ways_optimal, OPTIMAL)
BOTH_WAYS(both_ways_given, GIVEN)

// ---- a mask of tiles and a dense tensor ----------------------------------------------------------------------------------------

struct Masked {
    const void* dense;  // [rows, cols]; may be `out`
    void* out;
    const u16* tiles;
    u32 rows, cols;
};

// Zeros what the mask drops; a thread takes four columns of a row.
template <int E> __device__ __forceinline__ void apply_mask(const Masked& p) {
    typedef typename Bits<E>::type T;
    const u32 groups = p.cols / 4;
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (u64)p.rows * groups) return;
    const u32 row = (u32)(index / groups), group = (u32)(index % groups);
    const u32 kept = p.tiles[(u64)(row / 4) * groups + group] >> (4 * (row % 4));
    const T* from = (const T*)p.dense + 4 * index;
    T* to = (T*)p.out + 4 * index;
    unrolled<4>([&](auto i) { to[i.value] = kept >> i.value & 1 ? from[i.value] : (T)0; });
}

extern "C" __global__ void __launch_bounds__(256) apply_mask_of_tiles(const __grid_constant__ Masked p) { apply_mask<IN>(p); }
