// Prunes dense weights of type IN: masks, and compressed weights of type OUT, both defined outside. Compressed weights
// have the same bits as crate twofour's; rules.cuh selects the masks.

// Four values of BYTES bytes as they are stored: rounded, with -0.0 replaced by +0.0.
template <int BYTES> struct Values;
template <> struct Values<2> { uint2 bits; };
template <> struct Values<1> { u32 bits; };

template <int Out, int In> __device__ __forceinline__ Values<2> stored(const Four<In>& four) {
    uint2 words;
    if constexpr (In == F32)
        words =
            make_uint2(narrow_two<Out>(four.value(0), four.value(1)), narrow_two<Out>(four.value(2), four.value(3)));
    else words = four.bits;
    return {make_uint2(plus_zeros<Out>(words.x), plus_zeros<Out>(words.y))};
}

// Four values as 8-bit floats, multiplied by a scale before they are rounded.
template <int Out, int In> __device__ __forceinline__ Values<1> stored(const Four<In>& four, float factor) {
    auto two = [&](int i) { return (u32)narrow_two<Out>(four.value(i) * factor, four.value(i + 1) * factor); };
    u32 bits = two(0) | two(2) << 16;
    // Clears a byte's sign bit where its lower seven bits are zero.
    return {bits & (((bits & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | 0x7F7F7F7Fu)};
}

// Returns the values of one column of four rows.
template <int COLUMN> __device__ __forceinline__ Values<2> column_of(const Values<2>* rows) {
    constexpr u32 halves = COLUMN % 2 ? 0x7632 : 0x5410;
    auto word = [&](int r) { return COLUMN < 2 ? rows[r].bits.x : rows[r].bits.y; };
    return {make_uint2(permute(word(0), word(1), halves), permute(word(2), word(3), halves))};
}
template <int COLUMN> __device__ __forceinline__ Values<1> column_of(const Values<1>* rows) {
    constexpr u32 bytes = COLUMN | (4 + COLUMN) << 4;
    return {permute(permute(rows[0].bits, rows[1].bits, bytes), permute(rows[2].bits, rows[3].bits, bytes), 0x5410)};
}

// ---- from a mask to values and metadata
// ---------------------------------------------------------------------------------------

// How to store a group of which some elements are kept. `bytes`: in the lower half the bytes of the group's four values
// that make the two stored ones, in the upper half the metadata code. `mask`: zero for a stored value that is not kept.
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

__device__ __forceinline__ u32 picked(Values<2> values, Picking pick) {
    return permute(values.bits.x, values.bits.y, pick.bytes) & pick.mask;
}
__device__ __forceinline__ u16 picked(Values<1> values, Picking pick) {
    return (u16)(permute(values.bits, 0, pick.bytes) & pick.mask);
}

// ---- metadata of rows
// ---------------------------------------------------------------------------------------------------------

// Packs eight codes, one in each byte, into 32 bits.
__device__ __forceinline__ u32 join_codes(uint2 bytes) {
    u32 low = bytes.x | bytes.x >> 4, high = bytes.y | bytes.y >> 4;
    low = (low & 0xFF) | (low >> 8 & 0xFF00);
    high = (high & 0xFF) | (high >> 8 & 0xFF00);
    return low | high << 16;
}

// ---- the weight and its transpose
// --------------------------------------------------------------------------------------------

// Lines of a compressed form and groups of each, padding included; codes of groups from `coded` on are 0.
struct Padded {
    u32 lines, groups, coded;

    __device__ __forceinline__ u32 words() const { return (groups + 7) / 8; }
    // Returns the codes of this word's eight groups, as they are stored.
    __device__ __forceinline__ u32 codes(u32 codes, u32 word) const {
        const u32 left = coded - 8 * word;
        return left < 8 ? codes & (1u << (4 * left)) - 1 : codes;
    }
};

// The pointers of a pass over a weight `[rows, cols]`; null for results that are not needed.
struct BothWays {
    const void* weight;
    void* values;             // [rows, cols / 2], or as `along` says
    MetaOrder meta;           // of [rows, cols]
    void* values_transposed;  // [cols, rows / 2], or as `across` says
    MetaOrder meta_transposed;// of [cols, rows]
    u16* tiles;               // [ceil(rows / 4), ceil(cols / 4)]: read by GIVEN, written by the other rules
    const u16* tiles_before;  // masks to count flips against
    u64* flips;
    u64* nan;                 // the index of the first NaN, or all ones
    u32 rows, cols;
    const float* factor;      // for values of 8 bits, or null
    // Read by ANY: the shapes of the compressed weight and of its compressed transpose, and the rule.
    Padded along, across;
    u32 rule;
    const u32* skip;          // where it is not 0, nothing is written; or null
};

// Loads up to four elements from `from` on, and zeros for the rest.
template <int In> __device__ __forceinline__ Four<In> four_of(const typename Bits<In>::type* from, u32 count) {
    u32 raw[4] = {};
    unrolled<4>([&](auto i) {
        if (i.value < count) raw[i.value] = from[i.value];
    });
    if constexpr (In == F32) return {make_uint4(raw[0], raw[1], raw[2], raw[3])};
    else return {make_uint2(raw[0] | raw[1] << 16, raw[2] | raw[3] << 16)};
}

// Returns which elements of a tile are inside the weight.
__device__ __forceinline__ u32 inside_of(const BothWays& p, u32 row, u32 col) {
    const u32 rows = row < p.rows ? min(p.rows - row, 4u) : 0, cols = col < p.cols ? min(p.cols - col, 4u) : 0;
    return ((1u << cols) - 1) * 0x1111 & (1u << 4 * rows) - 1;
}

// Returns a mask with two elements in each row and column, one of which is `element`.
__device__ __forceinline__ u32 keeping(u32 element) {
    u32 kept = 0;
    unrolled<4>([&](auto r) { kept |= ((0x33u << (element - element / 4 + r.value & 3)) >> 4 & 15) << (4 * r.value); });
    return kept;
}

// Elements along a side of a CTA's square, and rows of a thread: four vertically adjacent tiles.
#define SIDE 128
#define PART 16

// A CTA passes over a square, which is given by its row and column among the weight's squares. 256 threads: eight warps
// of 16 rows by 128 columns. ANY supports every rule, shape and alignment of the weight, and writes padding: elements
// outside the weight are zeros.
template <int In, int Out, int RULE>
__device__ __forceinline__ void both_ways(const BothWays& p, u32 square_row, u32 square_col) {
    // Values of the transpose, [column, 64 of its row], in pieces of four tiles that are swizzled so that neither
    // writes nor reads have bank conflicts.
    typedef typename Bits<Out>::type Value;
    constexpr int BYTES = sizeof(Value);
    typedef typename Pair<BYTES>::type Both;
    typedef FourPairs<Both> Piece;
    __shared__ __align__(16) Value transposed[SIDE * SIDE / 2];
    __shared__ __align__(16) u8 row_codes[SIDE][SIDE / 4];
    __shared__ u16 column_codes[SIDE][9];
    __shared__ Picking pickings[16];
    __shared__ u32 payloads[16];

    if (p.skip && *p.skip) return;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 first_row = square_row * SIDE, first_col = square_col * SIDE;
    const u32 row0 = first_row + warp * PART, col0 = first_col + 4 * lane;
    const u32 tile_cols = RULE == ANY ? (p.cols + 3) / 4 : p.cols / 4;
    const bool column_inside = col0 < p.cols;

    auto load = [&](u32 row) {
        Four<In> four = {};
        if constexpr (RULE == ANY) {
            if (row < p.rows)
                four = four_of<In>((const typename Bits<In>::type*)p.weight + (u64)row * p.cols + col0,
                    col0 < p.cols ? p.cols - col0 : 0);
        } else if (column_inside && row < p.rows)
            four = *(const Four<In>*)((const typename Bits<In>::type*)p.weight + (u64)row * p.cols + col0);
        return four;
    };
    // Loads all rows at once where registers allow, so that many loads are in flight.
    constexpr bool AT_ONCE = In != F32 && !(RULE == OPTIMAL && BYTES == 1);
    Four<In> w[PART];
    if constexpr (AT_ONCE) unrolled<PART>([&](auto r) { w[r.value] = load(row0 + r.value); });
    if (threadIdx.x < 16) {
        pickings[threadIdx.x] = picking_of<BYTES>(threadIdx.x);
        payloads[threadIdx.x] = payload_of(threadIdx.x);
    }
    __syncthreads();

    // Two tiles at a time where two 16-bit elements share a register.
    constexpr bool IN_TWOS = InTwos<RULE, In>::value;
    u32 masks[4];
    if constexpr (IN_TWOS) {
        greedy_two<RULE>(w, w + 4, payloads, masks);
        greedy_two<RULE>(w + 8, w + 12, payloads, masks + 2);
    }

    // The mask before: read first, as the new one may be in the same memory.
    u32 before[4] = {};
    if (p.tiles_before && column_inside) {
        unrolled<4>([&](auto t) {
            const u32 row = row0 + 4 * t.value;
            if (row < p.rows) before[t.value] = p.tiles_before[(u64)(row / 4) * tile_cols + col0 / 4];
        });
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
        if (RULE == GIVEN || (RULE == ANY && p.rule == GIVEN)) {
            if (inside) kept = p.tiles[tile];
            if constexpr (RULE == ANY) kept &= inside_of(p, row, col0);
        } else {
            if constexpr (IN_TWOS) kept = masks[t.value];
            else if constexpr (RULE == ANY)
                kept = select_tile_by(p.rule, w[R], w[R + 1], w[R + 2], w[R + 3], inside_of(p, row, col0));
            else kept = select_tile<RULE, In, false>(w + R, WHOLE);
            if (w[R].nan() | w[R + 1].nan() | w[R + 2].nan() | w[R + 3].nan()) {
                u32 last = 0;
                unrolled<16>([&](auto i) {
                    float value = w[R + i.value / 4].value(i.value % 4);
                    if (value != value) {
                        atomicMin(p.nan, (u64)(row + i.value / 4) * p.cols + col0 + i.value % 4);
                        last = i.value;
                    }
                });
                // It has no place in an order, and must not disappear: results that would depend on it are NaN.
                if constexpr (RULE != ROWS)
                    kept = RULE == ANY && p.rule == ROWS ? kept : keeping(last) & inside_of(p, row, col0);
            }
            if (inside && p.tiles) p.tiles[tile] = (u16)kept;
        }
        if (inside && p.tiles_before) flips += __popc(kept ^ before[t.value]);

        Values<BYTES> out[4];
        unrolled<4>([&](auto r) {
            if constexpr (BYTES == 2) out[r.value] = stored<Out>(w[R + r.value]);
            else out[r.value] = stored<Out>(w[R + r.value], factor);
        });
        unrolled<4>([&](auto r) {
            Picking pick = pickings[kept >> (4 * r.value) & 15];
            Both pair = picked(out[r.value], pick);
            if constexpr (RULE == ANY) {
                if (p.values && row + r.value < p.along.lines && col0 / 4 < p.along.groups)
                    ((Both*)p.values)[(u64)(row + r.value) * p.along.groups + col0 / 4] = pair;
            } else {
                if (inside && p.values)
                    *(Both*)((Value*)p.values + (u64)(row + r.value) * (p.cols / 2) + col0 / 2) = pair;
            }
            row_codes[warp * PART + R + r.value][lane] = (u8)(pick.bytes >> 16);
        });
        if constexpr (RULE != ROWS) {
            unrolled<4>([&](auto c) {
                Picking pick = pickings[(kept >> c.value & 0x1111) * 0x249 >> 9 & 15];
                column_values[c.value].of[t.value] = picked(column_of<c.value>(out), pick);
                column_code[c.value] |= pick.bytes >> 16 << (4 * t.value);
            });
        }
    });

    if constexpr (RULE != ROWS) {
        unrolled<4>([&](auto c) {
            u32 column = 4 * lane + c.value;
            column_codes[column][warp] = (u16)column_code[c.value];
            *(Piece*)(transposed + column * (SIDE / 2) + 8 * (warp ^ (lane & 7))) = column_values[c.value];
        });
    }
    if (p.tiles_before) {
        flips = __reduce_add_sync(0xFFFFFFFFu, flips);
        if (lane == 0 && flips) atomicAdd(p.flips, (u64)flips);
    }
    __syncthreads();

    // Metadata of rows: four words for each of 128 rows.
    const u32 lines = RULE == ANY ? p.along.lines : p.rows, words = RULE == ANY ? p.along.words() : (p.cols + 31) / 32;
    const u32 lines_transposed = RULE == ANY ? p.across.lines : p.cols,
              words_transposed = RULE == ANY ? p.across.words() : (p.rows + 31) / 32;
    for (u32 i = threadIdx.x; i < SIDE * 4; i += 256) {
        u32 r = i / 4, word = i % 4;
        u32 row = first_row + r, global_word = first_col / 32 + word;
        if (p.meta.words && row < lines && global_word < words) {
            u32 codes = join_codes(*(const uint2*)&row_codes[r][8 * word]);
            u32 groups = p.cols / 4 - 8 * global_word;
            if constexpr (RULE == ANY) codes = p.along.codes(codes, global_word);
            else if (groups < 8) codes &= (1u << (4 * groups)) - 1;
            store_meta<BYTES>(p.meta, lines, words, row, global_word, codes);
        }
        if (RULE == ROWS) continue;
        u32 col = first_col + r, transposed_word = first_row / 32 + word;
        if (p.meta_transposed.words && col < lines_transposed && transposed_word < words_transposed) {
            u32 codes = column_codes[r][2 * word] | (u32)column_codes[r][2 * word + 1] << 16;
            u32 groups = p.rows / 4 - 8 * transposed_word;
            if constexpr (RULE == ANY) codes = p.across.codes(codes, transposed_word);
            else if (groups < 8) codes &= (1u << (4 * groups)) - 1;
            store_meta<BYTES>(p.meta_transposed, lines_transposed, words_transposed, col, transposed_word, codes);
        }
    }
    // Groups of a line of the transpose.
    const u32 groups = RULE == ANY ? p.across.groups : p.rows / 4;
    if (RULE == ROWS) return;
    if (p.values_transposed && groups % 4 == 0) {
        // Each warp stores 16 columns, four at a time, eight values a lane.
        #pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 piece = lane % 8, column = 16 * warp + 4 * i + lane / 8, col = first_col + column,
                      row = first_row + 16 * piece;
            if (col < lines_transposed && row / 4 < groups) {
                const Value* from = transposed + column * (SIDE / 2) + 8 * (piece ^ (column / 4 & 7));
                Value* to = (Value*)p.values_transposed + (u64)col * (2 * groups) + row / 2;
                *(Piece*)to = *(const Piece*)from;
            }
        }
    } else if (p.values_transposed) {
        // Where columns do not start at a multiple of a piece: one column after the other, two values a lane.
        for (u32 i = 0; i < 16; i++) {
            u32 column = 16 * warp + i, col = first_col + column, row = first_row + 4 * lane;
            if (col < lines_transposed && row / 4 < groups) {
                const Value* from =
                    transposed + column * (SIDE / 2) + 8 * ((lane / 4) ^ (column / 4 & 7)) + 2 * (lane % 4);
                Value* to = (Value*)p.values_transposed + (u64)col * (2 * groups) + row / 2;
                *(Both*)to = *(const Both*)from;
            }
        }
    }
}

// Weights of a launch: blockIdx.y is that of a weight, blockIdx.x counts its squares, row after row, up to the most
// squares of any weight. Weights alone would leave SMs idle at the end of each.
constexpr u32 WEIGHTS = 24;
struct Weights {
    BothWays of[WEIGHTS];
};

template <int RULE> __device__ __forceinline__ void together(const Weights& weights) {
    const BothWays& p = weights.of[blockIdx.y];
    const u32 in_a_row = (p.cols + SIDE - 1) / SIDE, square_row = blockIdx.x / in_a_row;
    if (square_row * SIDE < p.rows) both_ways<IN, OUT, RULE>(p, square_row, blockIdx.x - square_row * in_a_row);
}

// A source has a part of the kernels, by a definition outside, so that a program compiles those that it calls.
#ifdef PART_OF_A_RULE
extern "C" __global__ void __launch_bounds__(256, 2) both_ways_together(const __grid_constant__ Weights weights) {
    together<PART_OF_A_RULE>(weights);
}
// A weight alone: its parameters are operands of instructions. Where a block's index chooses among weights they are
// loaded: 116 instead of 104 us for [4096, 14336] in bf16 on an H200.
extern "C" __global__ void __launch_bounds__(256, 2) both_ways_alone(const __grid_constant__ BothWays p) {
    both_ways<IN, OUT, PART_OF_A_RULE>(p, blockIdx.y, blockIdx.x);
}
#endif
#ifdef PART_OF_EVERY_SHAPE
extern "C" __global__ void __launch_bounds__(256, 1) both_ways_any(const __grid_constant__ Weights weights) {
    together<ANY>(weights);
}
#endif

#ifdef PART_OF_MASKS
// ---- a mask of tiles and a dense tensor
// ----------------------------------------------------------------------------------------

struct Masked {
    const void* dense;  // [rows, cols]; may be `out`
    void* out;
    const u16* tiles;
    u32 rows, cols;
};

// Zeros the elements that the mask prunes; a thread handles four columns of a row. ANY_SHAPE supports any number of
// columns.
template <int E, bool ANY_SHAPE> __device__ __forceinline__ void apply_mask(const Masked& p) {
    typedef typename Bits<E>::type T;
    const u32 groups = ANY_SHAPE ? (p.cols + 3) / 4 : p.cols / 4;
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (u64)p.rows * groups) return;
    const u32 row = (u32)(index / groups), group = (u32)(index % groups);
    const u32 kept = p.tiles[(u64)(row / 4) * groups + group] >> (4 * (row % 4));
    const u64 first = ANY_SHAPE ? (u64)row * p.cols + 4 * group : 4 * index;
    const T* from = (const T*)p.dense + first;
    T* to = (T*)p.out + first;
    unrolled<4>([&](auto i) {
        if (!ANY_SHAPE || 4 * group + i.value < p.cols) to[i.value] = kept >> i.value & 1 ? from[i.value] : (T)0;
    });
}

extern "C" __global__ void __launch_bounds__(256) apply_mask_of_tiles(const __grid_constant__ Masked p) {
    apply_mask<IN, false>(p);
}
extern "C" __global__ void __launch_bounds__(256) apply_mask_of_tiles_any(const __grid_constant__ Masked p) {
    apply_mask<IN, true>(p);
}
#endif
