// act(alpha * scales * W X^T + bias) with a 2:4 W on the tensor cores of sm_90a (`wgmma.sp`).
//
// A CTA computes a tile of FEATURES rows of W by TOKENS rows of X. Warp specialization: one producer warp fills a
// circular buffer of STAGES stages by TMA, and two consumer warpgroups multiply, 64 * BLOCKS features each.
//
// Two CTAs of a cluster may share the rows of X (`sharing`): each loads a part of them and multicasts it to both. With
// SPLIT_K, which is compiled for tiles that leave registers for it, CTAs of a cluster may also divide the reduction
// among them (`parts`): each accumulates a part of K, then sends every other CTA those of its accumulators that the
// other CTA stores (`st.async`), and adds what it received, in the order of the parts, so that results repeat bit for
// bit. Without SPLIT_K the cluster is compiled in (CLUSTER), there is one part, and the kernel is persistent; with
// SPLIT_K both numbers come with the launch, and a cluster of several parts computes one tile.
//
// A stage holds ATOMS times 128 bytes of X's rows (K_ATOM elements), 64 bytes of W's rows, and an atom of metadata for
// every 64 features in CUTLASS's order; atoms of the same columns are contiguous. TMA takes as long for 64 bytes of a
// row as for 128, so two atoms to a stage fill it faster where three stages still fit. With 16-bit elements a thread
// loads one word of metadata for each atom: lanes with bit 1 unset hold that of the first instruction, the others that
// of the second, and the instruction's selector says which lanes to read. With SPLIT_K a tile may have fewer rows of X:
// only `x_rows` of them are loaded, and neighbouring tiles start `x_rows` apart. The last one starts earlier where it
// would not be full: results of tokens that two tiles have are computed and stored twice, with the same bits.
//
// X is `[tokens, reduction]` (K-major) or, with X_MN_MAJOR, `[reduction, tokens]` (MN-major) of 16-bit elements. In the
// latter case TMA loads a step's rows of X in boxes of 64 tokens.
//
// Defined outside: ELEMENT, OUTPUT, BLOCKS, TOKENS, STAGES, ATOMS, SPLIT_K, CLUSTER, CHUNK, X_MN_MAJOR, STORE,
// KERNEL_EPILOGUE, ACCUMULATE (of results that TMA stores), REGISTERS_LEFT, REGISTERS_TAKEN, `first_product` and
// `product` for ELEMENT and TOKENS.

constexpr int WARPGROUPS = 2;
constexpr bool EPILOGUE = KERNEL_EPILOGUE != WITHOUT;
constexpr int FEATURES = 64 * BLOCKS * WARPGROUPS;
constexpr int ELEMENT_BYTES = sizeof(Bits<ELEMENT>::type);
constexpr int K_ATOM = 128 / ELEMENT_BYTES, K_STEP = ATOMS * K_ATOM;
constexpr int W_ROW = 64 * ATOMS, X_ROW = 128;
constexpr int W_BYTES = FEATURES * W_ROW, X_ATOM_BYTES = TOKENS * X_ROW, X_BYTES = ATOMS * X_ATOM_BYTES;
constexpr int META_ATOM_BYTES = 64 * K_ATOM / 8;
constexpr int META_ROW_BYTES = FEATURES / 64 * META_ATOM_BYTES, META_BYTES = ATOMS * META_ROW_BYTES;
// Rows of X that the first of two CTAs that share them loads; a multiple of eight, the period of the swizzle.
constexpr int FIRST_PART = (TOKENS / 2 + 7) / 8 * 8;
// With X_MN_MAJOR: a TMA box is 64 tokens of all of a step's rows; the first of two CTAs loads FIRST_PIECES of the
// boxes.
constexpr u32 PIECE_TOKENS = 64, PIECE_BYTES = K_ATOM * PIECE_TOKENS * ELEMENT_BYTES, X_PIECES = TOKENS / PIECE_TOKENS,
              FIRST_PIECES = (X_PIECES + 1) / 2;
static_assert(!X_MN_MAJOR || (ELEMENT_BYTES == 2 && TOKENS % PIECE_TOKENS == 0), "whole pieces of 16-bit elements");

// Staging buffers for results stored by TMA: CHUNK tokens of 64 features each.
constexpr u32 OUT_BUFFERS = STORE == STORE_ONE_BY_ONE ? 0 : 3;
constexpr u32 OUT_BYTES = CHUNK * 128;
// Accumulators that go through shared memory of their own. Those of results that TMA stores go through two of the three
// staging buffers.
constexpr u32 SUM_BYTES = STORE == STORE_ONE_BY_ONE ? CHUNK * 64 * 4 : 0;

constexpr int AT_X = STAGES * W_BYTES;
constexpr int AT_OUT = AT_X + STAGES * X_BYTES;
constexpr int AT_SUMS = AT_OUT + WARPGROUPS * OUT_BUFFERS * OUT_BYTES;
constexpr int AT_META = AT_SUMS + WARPGROUPS * SUM_BYTES;
constexpr int AT_FULL = AT_META + STAGES * META_BYTES;
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;
constexpr int AT_RECEIVED = AT_EMPTY + STAGES * 8;
constexpr int SHARED_BYTES = AT_RECEIVED + (SPLIT_K ? 8 : 0);
// The host adds 1024 bytes to align the start.
static_assert(SHARED_BYTES + 1024 == SHARED_BYTES_ASKED, "the host's sum of shared memory");
static_assert(TOKENS % CHUNK == 0 && CHUNK % 8 == 0, "pieces of a tile, which start where swizzling does");
static_assert(STORE != STORE_MN_MAJOR || (!EPILOGUE && (CHUNK == 16 || CHUNK == 32 || CHUNK == 64)),
    "rows of 32, 64 or 128 bytes, as swizzling has them");

struct Parameters {
    TensorMap weight;
    TensorMap x[2];
    TensorMap out;
    const u8* meta;
    Output to;
    // Rows of W, padding included: a multiple of 64. Atoms and steps of the reduction.
    u32 rows, tokens, atoms, steps;
    // CTAs that share rows of X, CTAs that divide the reduction, and rows of X to a tile; read with SPLIT_K only.
    u32 sharing, parts, x_rows;
    // No tile starts behind this token: the last tile overlaps the one before, so that all are full.
    u32 last_token;
    // The scheduler's tiles of features are those of clusters.
    Rasterization rasterization;
    u32 features;
};

// The position of a CTA in its cluster.
struct Place {
    u32 sharing, parts, x_rows, rank;

    __device__ __forceinline__ explicit Place(const Parameters& p)
        : sharing(SPLIT_K ? p.sharing : CLUSTER),
          parts(SPLIT_K ? p.parts : 1),
          x_rows(SPLIT_K ? p.x_rows : TOKENS),
          rank(!SPLIT_K && CLUSTER == 1 ? 0 : cluster_rank()) {}

    __device__ __forceinline__ u32 member() const { return SPLIT_K ? rank % sharing : rank; }
    __device__ __forceinline__ u32 part() const { return SPLIT_K ? rank / sharing : 0; }
    __device__ __forceinline__ u32 blocks() const { return sharing * parts; }
    // Returns the rank of another member of this part, or of the same member of another part.
    __device__ __forceinline__ u32 of_member(u32 member) const { return SPLIT_K ? part() * sharing + member : member; }
    __device__ __forceinline__ u32 of_part(u32 part) const { return part * sharing + member(); }
    // Returns the first step of this part, and of the next one.
    __device__ __forceinline__ u32 first_step(const Parameters& p) const {
        return SPLIT_K ? (u32)((u64)p.steps * part() / parts) : 0;
    }
    // Returns the first token of a tile.
    __device__ __forceinline__ u32 token(const Parameters& p, const Tile& tile) const {
        return min(tile.token * x_rows, p.last_token);
    }
    __device__ __forceinline__ u32 last_step(const Parameters& p) const {
        return SPLIT_K ? (u32)((u64)p.steps * (part() + 1) / parts) : p.steps;
    }
};

// The origin of a CTA's tile, and the bytes of its metadata.
struct TileCoordinates { u32 feature, token, first_feature_atom, meta_bytes; };

// Issues the copies of rows of X, for the columns of one atom.
__device__ __forceinline__ void ask_x(const Parameters& p, u32 x, const Place& place, u32 token, u32 column, u32 full) {
    const bool alone = place.sharing == 1;
    const u32 member = place.member();
    const u16 both = 3 << place.of_member(0);
    if (X_MN_MAJOR) {
        #pragma unroll
        for (u32 i = 0; i < X_PIECES; i++) {
            const u32 to = x + i * PIECE_BYTES, first = token + i * PIECE_TOKENS;
            if (alone) copy_tile(to, &p.x[0], first, column, full);
            else if (member == (i < FIRST_PIECES ? 0 : 1)) copy_tile_to_many(to, &p.x[0], first, column, full, both);
        }
    } else if (alone) {
        copy_tile(x, &p.x[0], column, token, full);
    } else if (member == 0) {
        copy_tile_to_many(x, &p.x[0], column, token, full, both);
    } else {
        copy_tile_to_many(x + FIRST_PART * X_ROW, &p.x[1], column, token + FIRST_PART, full, both);
    }
}

// Issues the copies of a step into a stage.
__device__ __forceinline__ void ask(
    const Parameters& p, u32 shared, const Place& place, const TileCoordinates& coordinates, u32 step, u32 stage) {
    const u32 full = shared + AT_FULL + 8 * stage;
    const u32 x_bytes = SPLIT_K ? ATOMS * p.x_rows * X_ROW : X_BYTES;
    barrier_expect(full, W_BYTES + x_bytes + ATOMS * coordinates.meta_bytes);
    copy_tile(shared + stage * W_BYTES, &p.weight, step * (K_STEP / 2), coordinates.feature, full);
    #pragma unroll
    for (u32 i = 0; i < ATOMS; i++) {
        const u32 atom = step * ATOMS + i;
        if (coordinates.meta_bytes != 0) {
            // Beyond the last atom W and X are zeros, and any valid metadata is correct.
            const u64 from = (u64)min(atom, p.atoms - 1) * (p.rows / 64) + coordinates.first_feature_atom;
            copy_bytes(shared + AT_META + stage * META_BYTES + i * META_ROW_BYTES, p.meta + from * META_ATOM_BYTES,
                coordinates.meta_bytes, full);
        }
        ask_x(p, shared + AT_X + stage * X_BYTES + i * X_ATOM_BYTES, place, coordinates.token, atom * K_ATOM, full);
    }
}

// The body of the producer warp.
__device__ __forceinline__ void produce(const Parameters& p, u32 shared, const Place& place) {
    const u32 feature_atoms = p.rows / 64, last_step = place.last_step(p);
    u32 stage = 0, parity = 1;
    const Rasterization& order = p.rasterization;
    for (u32 index = blockIdx.x / place.blocks(); index < order.tiles(); index += gridDim.x / place.blocks()) {
        const Tile tile = order.tile(index);
        const u32 feature = (tile.feature * place.sharing + place.member()) * FEATURES, token = place.token(p, tile);
        const u32 first = min(feature / 64, feature_atoms);
        const u32 meta_bytes = min(FEATURES / 64u, feature_atoms - first) * META_ATOM_BYTES;
        for (u32 step = place.first_step(p); step < last_step; step++) {
            barrier_wait(shared + AT_EMPTY + 8 * stage, parity);
            if (elected()) ask(p, shared, place, TileCoordinates{feature, token, first, meta_bytes}, step, stage);
            next_stage<STAGES>(stage, parity);
        }
    }
}

typedef Result<OUTPUT>::Type Out;

__device__ __forceinline__ u32 pair_of(Out low, Out high) { return low | (u32)high << 16; }
// Two results of 16 bits in one word.
__device__ __forceinline__ u32 rounded(float low, float high) {
    return narrow_two<OUTPUT == F16 ? PLAIN_F16 : PLAIN_BF16>(low, high);
}
// The larger of two results of 16 bits each, or NaN where one is.
__device__ __forceinline__ u32 larger_two(u32 a, u32 b) {
    u32 most;
    if (OUTPUT == F16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
}

// In place of an activation.
constexpr int AT_RUN_TIME = -1;

// Scales, bias and activation for the thread's two features of a 64-row accumulator, which are 8 apart.
struct Epilogue {
    const Parameters& p;
    u32 token;
    float scale[2], bias[2];

    __device__ __forceinline__ Epilogue(const Parameters& p, u32 feature, u32 token) : p(p), token(token) {
        #pragma unroll
        for (int high = 0; high < 2; high++) {
            const u32 row = feature + 8 * high;
            const bool inside = row < p.features;
            scale[high] = p.to.alpha * (p.to.feature_scales && inside ? p.to.feature_scales[row] : 1.0f);
            bias[high] = p.to.bias && inside ? Result<OUTPUT>::bias(p.to.bias, row) : 0.0f;
        }
    }

    // Loads the scales of the thread's tokens that are `column` after its first two, where there are any.
    __device__ __forceinline__ void load_scales(u32 column, float* scales) const {
        if (!p.to.token_scales) return;
        #pragma unroll
        for (int odd = 0; odd < 2; odd++) scales[odd] = p.to.token_scales[min(token + column + odd, p.tokens - 1)];
    }

    // Computes the results of both features, and of the thread's tokens that are `column` after its first two, with an
    // activation or with the launch's.
    template <int ACTIVATION>
    __device__ __forceinline__ void finish(const Sum (&sums)[4], u32 column, Out (&results)[4]) const {
        float values[4];
        if constexpr (!EPILOGUE) {
            #pragma unroll
            for (int i = 0; i < 4; i++) values[i] = (float)sums[i];
        } else {
            float by_token[2] = {1.0f, 1.0f};
            load_scales(column, by_token);
            #pragma unroll
            for (int i = 0; i < 4; i++) values[i] = fmaf((float)sums[i], scale[i / 2] * by_token[i % 2], bias[i / 2]);
            if (p.to.token_bias) {
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    values[i] += Result<OUTPUT>::bias(p.to.token_bias, min(token + column + i % 2, p.tokens - 1));
            }
            const auto activate = [&](auto activation) {
                #pragma unroll
                for (int i = 0; i < 4; i++) values[i] = activated<decltype(activation)::value, OUTPUT>(values[i]);
            };
            if constexpr (ACTIVATION == AT_RUN_TIME) by_activation(p.to, activate);
            else activate(Int<ACTIVATION>());
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) results[i] = Result<OUTPUT>::of(sums[i], values[i]);
    }
};

// Writes eight tokens of the warp's 16 features to a staging buffer for TMA: rows of 64 features, swizzled.
__device__ __forceinline__ void stage_eight_tokens(u32 tile, u32 eight, u32 low, u32 high) {
    const u32 lane = threadIdx.x % 32, row = eight * 8 + lane % 8, column = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    store_transposed(tile + row * 128 + ((column ^ row % 8) << 4), low, high);
}

// Whether accumulators leave few registers: then eight tokens are stored at a time.
constexpr bool FEW_REGISTERS = BLOCKS * TOKENS > 320;
// Iterations of eight tokens of an epilogue that are unrolled.
constexpr int EPILOGUE_UNROLL = FEW_REGISTERS ? 1 : 3;
// Whether they leave none for a second way without scales of tokens.
constexpr bool VERY_FEW_REGISTERS = BLOCKS * TOKENS > 384;

// The epilogue: stores a warpgroup's accumulators, one piece of 64 features and CHUNK tokens after the other.
struct EpilogueStore {
    const Parameters& p;
    const Place& place;
    // The start of the CTA's shared memory, and the index of the warpgroup's next staging buffer.
    u32 shared;
    u32 buffer;
    // With split-K: the numbers of the pieces that this part stores, from `first` up to `last`. The largest tile leaves
    // no registers for them: see `first_own`.
    u32 first, last;

    __device__ __forceinline__ EpilogueStore(const Parameters& p, const Place& place, u32 shared)
        : p(p), place(place), shared(shared), buffer(0), first(0), last(0) {
        if (!SPLIT_K || FEW_REGISTERS) return;
        first = first_number(place.part());
        last = first_number(place.part() + 1);
    }

    __device__ __forceinline__ u32 group() const { return threadIdx.x / 128; }
    // Returns the address of shared memory for the thread's own accumulators.
    __device__ __forceinline__ u32 own() const {
        const u32 of_group =
            STORE == STORE_ONE_BY_ONE ? AT_SUMS + group() * SUM_BYTES : AT_OUT + group() * OUT_BUFFERS * OUT_BYTES;
        return shared + of_group + threadIdx.x % 128 * 16;
    }

    // Writes results to a staging buffer. `words` returns those of eight tokens: of the thread's feature `row`, and of
    // `row + 8`. Features of a token are contiguous or, with STORE_MN_MAJOR, tokens of a feature.
    template <bool IN_PAIRS, class Words> __device__ __forceinline__ void stage_matrices(u32 at, Words words) const {
        const u32 lane = threadIdx.x % 32, column = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
        #pragma unroll
        for (int eight = 0; eight < CHUNK / 8; eight += IN_PAIRS ? 2 : 1) {
            const uint2 first = words(eight);
            if (!IN_PAIRS || eight + 1 == CHUNK / 8) {
                stage_eight_tokens(at, eight, first.x, first.y);
                continue;
            }
            const uint2 second = words(eight + 1);
            if (STORE == STORE_MN_MAJOR) {
                const u32 feature = threadIdx.x % 128 / 32 * 16 + lane % 16, piece = eight + lane / 16;
                store_matrices(at + feature * (CHUNK * 2) + ((piece ^ feature / (64 / CHUNK) % (CHUNK / 8)) << 4),
                    first.x, first.y, second.x, second.y);
                continue;
            }
            const u32 row = eight * 8 + lane / 16 * 8 + lane % 8;
            store_transposed(at + row * 128 + ((column ^ row % 8) << 4), first.x, first.y, second.x, second.y);
        }
    }

    // Writes rounded accumulators to a staging buffer, without an epilogue.
    template <int FIRST> __device__ __forceinline__ void round(const Sum (&all)[TOKENS / 2], u32 at) const {
        stage_matrices<true>(at, [&](int eight) {
            const int sum = FIRST / 2 + 4 * eight;
            return make_uint2(
                rounded((float)all[sum], (float)all[sum + 1]), rounded((float)all[sum + 2], (float)all[sum + 3]));
        });
    }

    // Writes results after scales, a bias for each feature and an activation to a staging buffer, for tokens from the
    // epilogue's on. NONE stands for ReLU, too: without it results are compared with minus infinity. The scales of the
    // chunk's tokens are `of_chunk`, or loaded for eight tokens at a time where registers are few.
    template <int FIRST, int ACTIVATION, bool SCALED> __device__ __forceinline__ void round_finished(
        const Sum (&all)[TOKENS / 2], u32 at, const Epilogue& epilogue, const float (&of_chunk)[CHUNK / 4]) const {
        const u32 least = p.to.activation == RELU ? 0 : OUTPUT == F16 ? 0xFC00FC00u : 0xFF80FF80u;
        stage_matrices<!FEW_REGISTERS>(at, [&](int eight) {
            const int sum = FIRST / 2 + 4 * eight;
            float by_token[2] = {of_chunk[2 * eight], of_chunk[2 * eight + 1]}, value[4];
            if (SCALED && FEW_REGISTERS) epilogue.load_scales(FIRST + eight * 8, by_token);
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const float scale = SCALED ? epilogue.scale[i / 2] * by_token[i % 2] : epilogue.scale[i / 2];
                value[i] = activated<ACTIVATION, OUTPUT>(fmaf((float)all[sum + i], scale, epilogue.bias[i / 2]));
            }
            const uint2 words = make_uint2(rounded(value[0], value[1]), rounded(value[2], value[3]));
            return ACTIVATION == NONE ? make_uint2(larger_two(words.x, least), larger_two(words.y, least)) : words;
        });
    }

    // Writes accumulators to the thread's own shared memory. The code for a result then exists once, in a loop, and not
    // once for every register.
    template <int FIRST> __device__ __forceinline__ void stage_to_shared(const Sum (&all)[TOKENS / 2]) const {
        #pragma unroll
        for (int eight = 0; eight < CHUNK / 8; eight++) {
            const int sum = FIRST / 2 + 4 * eight;
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(own() + eight * 2048), "r"(bits_of(all[sum])),
                "r"(bits_of(all[sum + 1])), "r"(bits_of(all[sum + 2])), "r"(bits_of(all[sum + 3]))
                : "memory");
        }
    }

    template <int ACTIVATION> __device__ __forceinline__ void load_from_shared(u32 at, u32 feature, u32 token) const {
        const u32 lane = threadIdx.x % 32, row = feature + threadIdx.x % 128 / 32 * 16 + lane / 4,
                  column = token + lane % 4 * 2;
        const Epilogue epilogue(p, row, column);
        #pragma unroll EPILOGUE_UNROLL
        for (u32 eight = 0; eight < CHUNK / 8; eight++) {
            u32 words[4];
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                : "r"(own() + eight * 2048)
                : "memory");
            Sum sums[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) of_bits(sums[i], words[i]);
            Out results[4];
            epilogue.finish<ACTIVATION>(sums, eight * 8, results);
            if (STORE == STORE_TILES) {
                stage_eight_tokens(at, eight, pair_of(results[0], results[1]), pair_of(results[2], results[3]));
            } else {
                store(results, row, column + eight * 8);
            }
        }
    }

    // Stores features `row` and `row + 8` of tokens `column` and `column + 1` one element at a time, in any order and
    // for any alignment.
    __device__ __forceinline__ void store(const Out (&results)[4], u32 row, u32 column) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 f = row + i / 2 * 8, t = column + i % 2;
            if (f < p.features && t < p.tokens)
                put<OUTPUT>(p.to, f * p.to.stride_feature + t * p.to.stride_token, results[i]);
        }
    }

    __device__ __forceinline__ u32 begin() const {
        if (threadIdx.x % 128 == 0) stores_have_read<OUT_BUFFERS == 0 ? 0 : OUT_BUFFERS - 1>();
        named_barrier(1 + group(), 128);
        return shared + AT_OUT + (group() * OUT_BUFFERS + buffer) * OUT_BYTES;
    }
    // Waits until all staging buffers are free, for accumulators in the first two, and returns the last.
    __device__ __forceinline__ u32 begin_alone() {
        if (threadIdx.x % 128 == 0) stores_have_read<0>();
        named_barrier(1 + group(), 128);
        buffer = 2;
        return shared + AT_OUT + (group() * OUT_BUFFERS + buffer) * OUT_BYTES;
    }
    __device__ __forceinline__ void end(u32 at, u32 feature, u32 token) {
        show_to_copies();
        named_barrier(1 + group(), 128);
        if (threadIdx.x % 128 == 0) {
            const u32 x = STORE == STORE_MN_MAJOR ? token : feature, y = STORE == STORE_MN_MAJOR ? feature : token;
            if constexpr (ACCUMULATE) add_tile(&p.out, x, y, at);
            else store_tile(&p.out, x, y, at);
        }
        buffer = buffer + 1 == OUT_BUFFERS ? 0 : buffer + 1;
    }

    static constexpr int CHUNKS = TOKENS / CHUNK, PIECES = BLOCKS * CHUNKS;
    static constexpr u32 PIECE_UNITS = CHUNK / 8;

    // Returns how many of the chunks of tokens hold rows of X; only their pieces are stored.
    __device__ __forceinline__ u32 chunks() const { return SPLIT_K ? (place.x_rows + CHUNK - 1) / CHUNK : CHUNKS; }
    __device__ __forceinline__ bool is_stored(u32 piece) const { return !SPLIT_K || piece % CHUNKS < chunks(); }
    // The index of a piece among the stored ones, the part that stores it, and the first index that a part stores.
    __device__ __forceinline__ u32 number(u32 piece) const { return piece / CHUNKS * chunks() + piece % CHUNKS; }
    __device__ __forceinline__ u32 owner(u32 piece) const { return number(piece) * place.parts / (BLOCKS * chunks()); }
    __device__ __forceinline__ u32 first_number(u32 part) const {
        return (part * BLOCKS * chunks() + place.parts - 1) / place.parts;
    }
    __device__ __forceinline__ u32 first_own() const { return FEW_REGISTERS ? first_number(place.part()) : first; }
    __device__ __forceinline__ u32 last_own() const { return FEW_REGISTERS ? first_number(place.part() + 1) : last; }
    __device__ __forceinline__ bool owns(u32 piece) const {
        if (!SPLIT_K) return true;
        return is_stored(piece) &&
               (FEW_REGISTERS ? owner(piece) == place.part() : number(piece) >= first && number(piece) < last);
    }
    // Returns the address at which the accumulators of a piece arrive from another part, at the part that stores pieces
    // from the number `first` on: in the stages, which no warp uses any more.
    __device__ __forceinline__ u32 received(u32 piece, u32 first, u32 slot) const {
        const u32 at = (number(piece) - first) * (place.parts - 1) + slot;
        return shared + (at * WARPGROUPS + group()) * (PIECE_UNITS * 2048) + threadIdx.x % 128 * 16;
    }

    // Sends each other part the accumulators of its pieces, in the registers' layout.
    __device__ __forceinline__ void send(const Sum (&sums)[BLOCKS][TOKENS / 2]) const {
        unrolled<PIECES>([&](auto piece) {
            constexpr int WHICH = decltype(piece)::value, FIRST = WHICH % CHUNKS * CHUNK;
            if (!is_stored(WHICH) || owns(WHICH)) return;
            const u32 part = owner(WHICH), rank = place.of_part(part);
            const u32 there =
                address_at(received(WHICH, first_number(part), place.part() - (place.part() > part)), rank);
            const u32 barrier = address_at(shared + AT_RECEIVED, rank);
            const Sum(&all)[TOKENS / 2] = sums[WHICH / CHUNKS];
            #pragma unroll
            for (int unit = 0; unit < PIECE_UNITS; unit++) {
                const int sum = FIRST / 2 + 4 * unit;
                send_four(there + unit * 2048, bits_of(all[sum]), bits_of(all[sum + 1]), bits_of(all[sum + 2]),
                    bits_of(all[sum + 3]), barrier);
            }
        });
    }

    // Adds the accumulators of a piece that the other parts have sent.
    template <int WHICH> __device__ __forceinline__ void receive(Sum (&sums)[BLOCKS][TOKENS / 2]) const {
        #pragma unroll 1
        for (u32 slot = 1; slot < place.parts; slot++) {
            const u32 here = received(WHICH, first_own(), slot - 1);
            #pragma unroll
            for (int unit = 0; unit < PIECE_UNITS; unit++) {
                add_four((Sum(&)[4])sums[WHICH / CHUNKS][WHICH % CHUNKS * CHUNK / 2 + 4 * unit], here + unit * 2048);
            }
        }
    }

    // Returns the bytes that the other parts send to this CTA.
    __device__ __forceinline__ u32 expected() const {
        return (last_own() - first_own()) * (place.parts - 1) * WARPGROUPS * PIECE_UNITS * 2048;
    }

    // Reduces the parts' accumulators of this CTA's own pieces.
    __device__ __forceinline__ void exchange(Sum (&sums)[BLOCKS][TOKENS / 2]) const {
        // No CTA of the cluster reads its stages any more.
        cluster_arrive_relaxed();
        cluster_wait();
        send(sums);
        barrier_wait_for_cluster(shared + AT_RECEIVED, 0);
        unrolled<PIECES>([&](auto piece) {
            constexpr int WHICH = decltype(piece)::value;
            if (owns(WHICH)) receive<WHICH>(sums);
        });
    }

    // Stores the tile's pieces after scales, bias and activation, which are computed in registers. The scales and bias
    // of 64 features are loaded once for all of their pieces, and the scales of a chunk's tokens at once, because the
    // warpgroup waits for each load.
    template <int ACTIVATION, bool SCALED>
    __device__ __forceinline__ void store_finished(const Sum (&sums)[BLOCKS][TOKENS / 2], u32 feature, u32 token) {
        const u32 lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4;
        unrolled<BLOCKS>([&](auto block) {
            constexpr int BLOCK = decltype(block)::value;
            const Epilogue epilogue(p, feature + BLOCK * 64 + row, token + lane % 4 * 2);
            unrolled<CHUNKS>([&](auto chunk) {
                constexpr int CHUNK_INDEX = decltype(chunk)::value, FIRST = CHUNK_INDEX * CHUNK;
                if (!owns(BLOCK * CHUNKS + CHUNK_INDEX)) return;
                float of_chunk[CHUNK / 4];
                #pragma unroll
                for (int i = 0; i < CHUNK / 4; i++) of_chunk[i] = 1.0f;
                if constexpr (SCALED && !FEW_REGISTERS) {
                    #pragma unroll
                    for (int eight = 0; eight < CHUNK / 8; eight++)
                        epilogue.load_scales(FIRST + eight * 8, of_chunk + 2 * eight);
                }
                const u32 at = begin();
                round_finished<FIRST, ACTIVATION, SCALED>(sums[BLOCK], at, epilogue, of_chunk);
                end(at, feature + BLOCK * 64, token + FIRST);
            });
        });
    }

    // Stores the tile in registers where the kernel has such code for its epilogue. With split-K the largest tile
    // leaves no registers for it, and a bias of tokens is rare where features are contiguous.
    __device__ __forceinline__ bool stores_finished(const Sum (&sums)[BLOCKS][TOKENS / 2], u32 feature, u32 token) {
        if constexpr (EPILOGUE && STORE == STORE_TILES && (!SPLIT_K || !FEW_REGISTERS)) {
            constexpr int ACTIVATION = KERNEL_EPILOGUE == ACTIVATED ? GELU : NONE;
            const bool fits = ACTIVATION == GELU ? p.to.activation == GELU : p.to.activation <= RELU;
            if (fits && !p.to.token_bias) {
                // One way for both where a second one would be too much code, or is computed too seldom.
                constexpr bool ALWAYS = SPLIT_K || VERY_FEW_REGISTERS || ACTIVATION != NONE;
                if (ALWAYS || p.to.token_scales) store_finished<ACTIVATION, true>(sums, feature, token);
                else if constexpr (!ALWAYS) store_finished<ACTIVATION, false>(sums, feature, token);
                return true;
            }
        }
        return false;
    }

    // Stores the tile, or this part's pieces of it: 64 features by CHUNK tokens each.
    __device__ __forceinline__ void operator()(Sum (&sums)[BLOCKS][TOKENS / 2], u32 feature, u32 token) {
        if constexpr (SPLIT_K) {
            if (place.parts != 1) exchange(sums);
        }
        if constexpr (STORE != STORE_ONE_BY_ONE && !EPILOGUE) {
            unrolled<PIECES>([&](auto piece) {
                constexpr int WHICH = decltype(piece)::value, BLOCK = WHICH / CHUNKS, FIRST = WHICH % CHUNKS * CHUNK;
                if (!owns(WHICH)) return;
                const u32 at = begin();
                round<FIRST>(sums[BLOCK], at);
                end(at, feature + BLOCK * 64, token + FIRST);
            });
        } else {
            if (stores_finished(sums, feature, token)) return;
            #pragma unroll 1
            for (u32 piece = 0; piece < PIECES; piece++) {
                if (!owns(piece)) continue;
                u32 at = 0;
                if constexpr (STORE == STORE_TILES) at = begin_alone();
                unrolled<PIECES>([&](auto which) {
                    constexpr int WHICH = decltype(which)::value;
                    if (piece == WHICH) stage_to_shared<WHICH % CHUNKS * CHUNK>(sums[WHICH / CHUNKS]);
                });
                const u32 first_feature = feature + piece / CHUNKS * 64, first_token = token + piece % CHUNKS * CHUNK;
                if (KERNEL_EPILOGUE == ACTIVATED && p.to.activation == GELU)
                    load_from_shared<GELU>(at, first_feature, first_token);
                else load_from_shared<AT_RUN_TIME>(at, first_feature, first_token);
                if constexpr (STORE == STORE_TILES) end(at, first_feature, first_token);
            }
        }
    }
};

// The body of a consumer warpgroup.
__device__ __forceinline__ void multiply(const Parameters& p, u32 shared, const Place& place) {
    const u32 group = uniform(threadIdx.x / 128), thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    Sum sums[BLOCKS][TOKENS / 2];
    const u64 weight = operand<W_ROW>(shared + group * BLOCKS * 64 * W_ROW);
    const u64 x = X_MN_MAJOR ? operand_mn_major(shared + AT_X, PIECE_BYTES) : operand<X_ROW>(shared + AT_X);
    // The thread's metadata of its first atom: see the orders in `twofour::layout::sm90`.
    const u32 row = warp * 16 + lane / 4;
    const u32 word = ELEMENT_BYTES == 2 ? 2 * (warp * 16 + lane % 2 * 8 + lane / 4) + lane / 2 % 2
                                        : 4 * (row + lane % 2 * 8) + lane / 2 % 2;
    const u32 meta = shared + AT_META + group * BLOCKS * META_ATOM_BYTES + 4 * word;
    EpilogueStore store(p, place, shared);
    const u32 steps = place.last_step(p) - place.first_step(p);
    u32 stage = 0, parity = 0;

    // Releases a stage: every thread of the cluster's consumers arrives. One arrival a warp would be enough, but
    // compute-sanitizer's racecheck tracks bulk copies that are no tensor copies, and would not see that the other
    // lanes have read their metadata.
    const auto release = [&](u32 stage) {
        const u32 empty = shared + AT_EMPTY + 8 * stage;
        if (place.sharing == 1) {
            barrier_arrive(empty);
        } else {
            #pragma unroll
            for (u32 to = 0; to < 2; to++) barrier_arrive_at(empty, place.of_member(to));
        }
    };
    constexpr int WORDS = ELEMENT_BYTES == 2 ? 1 : 2;
    // Computes one step. The step before it is complete once this one has begun.
    u32 before = 0;
    const auto step = [&](auto first, u32(&codes)[ATOMS* BLOCKS][WORDS],
                          const u32(&codes_before)[ATOMS* BLOCKS][WORDS]) {
        constexpr bool FIRST = decltype(first)::value;
        barrier_wait(shared + AT_FULL + 8 * stage, parity);
#pragma unroll
        for (int i = 0; i < ATOMS * BLOCKS; i++) {
            const u32 at = meta + stage * META_BYTES + i / BLOCKS * META_ROW_BYTES + i % BLOCKS * META_ATOM_BYTES;
            #pragma unroll
            for (int j = 0; j < WORDS; j++)
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes[i][j]) : "r"(at + 8 * j));
        }
        const u64 w_now = operand_after(weight, stage * W_BYTES), x_now = operand_after(x, stage * X_BYTES);
        products_begin();
        unrolled<2 * ATOMS>([&](auto which) {
            constexpr int HALF = decltype(which)::value, ATOM = HALF / 2, SECOND = HALF % 2;
            constexpr u32 SECOND_BYTES = X_MN_MAJOR ? PIECE_BYTES / 2 : X_ROW / 2;
            const u64 x = operand_after(x_now, ATOM * X_ATOM_BYTES + SECOND * SECOND_BYTES);
            #pragma unroll
            for (int block = 0; block < BLOCKS; block++) {
                const u64 w = operand_after(w_now, block * 64 * W_ROW + HALF * 32);
                if constexpr (FIRST && HALF == 0) {
                    first_product<0>(sums[block], w, x, codes[block][0]);
                } else {
                    product<ELEMENT_BYTES == 2 ? SECOND : 0>(
                        sums[block], w, x, codes[ATOM * BLOCKS + block][SECOND * (WORDS - 1)]);
                }
            }
        });
        products_commit();
        products_wait<1>();
        if (!FIRST) {
            #pragma unroll
            for (int i = 0; i < ATOMS * BLOCKS; i++) fence_operands(codes_before[i]);
            release(before);
        }
        before = stage;
        next_stage<STAGES>(stage, parity);
    };

    const Rasterization& order = p.rasterization;
    for (u32 index = blockIdx.x / place.blocks(); index < order.tiles(); index += gridDim.x / place.blocks()) {
        const Tile tile = order.tile(index);
        const u32 feature = (tile.feature * place.sharing + place.member()) * FEATURES + group * BLOCKS * 64;
        const u32 token = place.token(p, tile);
        if constexpr (EPILOGUE) {
            ask_for_features(p.to, OUTPUT, p.features, feature, BLOCKS * 64, thread);
            ask_for_tokens(p.to, token, min((u32)TOKENS, p.tokens - token), thread);
        }
        // Two sets of metadata registers, used alternately: instructions of a step still read theirs while the next
        // step's is loaded.
        u32 codes[2][ATOMS * BLOCKS][WORDS] = {};
        step(Int<1>(), codes[0], codes[1]);
        for (u32 left = steps - 1; left != 0; left--) {
            step(Int<0>(), codes[1], codes[0]);
            if (--left == 0) break;
            step(Int<0>(), codes[0], codes[1]);
        }
        products_wait<0>();
        #pragma unroll
        for (int i = 0; i < ATOMS * BLOCKS; i++) {
            fence_operands(codes[0][i]);
            fence_operands(codes[1][i]);
        }
        release(before);
        if constexpr (SPLIT_K) {
            #pragma unroll
            for (int block = 0; block < BLOCKS; block++) {
                #pragma unroll
                for (int i = 0; i < TOKENS / 2; i++) fence_accumulator(sums[block][i]);
            }
        }

        store(sums, feature, token);
    }
    if (STORE != STORE_ONE_BY_ONE && thread == 0) stores_are_done();
}

extern "C" __global__ void __launch_bounds__((WARPGROUPS + 1) * 128, 1) gemm(const __grid_constant__ Parameters p) {
    extern __shared__ u8 memory[];
    const u32 shared = (shared_address(memory) + 1023) & ~1023u;
    const Place place(p);
    const bool alone = !SPLIT_K && CLUSTER == 1;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(shared + AT_FULL + 8 * stage, 1);
            barrier_init(shared + AT_EMPTY + 8 * stage, WARPGROUPS * 128 * place.sharing);
        }
        if (SPLIT_K) barrier_init(shared + AT_RECEIVED, 1);
        barriers_are_ready();
        if (SPLIT_K && place.parts != 1)
            barrier_expect(shared + AT_RECEIVED, EpilogueStore(p, place, shared).expected());
    }
    __syncthreads();
    if (!alone) cluster_sync();
    const u32 warp = uniform(threadIdx.x / 32);
    if (warp >= WARPGROUPS * 4) {
        give_registers<REGISTERS_LEFT>();
        if (warp == WARPGROUPS * 4) produce(p, shared, place);
        if (SPLIT_K && place.parts != 1) {
            // The cluster barrier that consumers pass before they send.
            __syncwarp();
            cluster_arrive_relaxed();
            cluster_wait();
        }
    } else {
        take_registers<REGISTERS_TAKEN>();
        multiply(p, shared, place);
    }
    // No CTA exits while another of the cluster may still send to it. With several parts each CTA has already waited
    // for what the others send.
    if (alone || (SPLIT_K && place.parts != 1)) return;
    __syncthreads();
    cluster_sync();
}
