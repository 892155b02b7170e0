// act(alpha * scales * W X^T + bias) with a 2:4 W on the tensor cores of sm_90a (`wgmma.sp`).
//
// A block takes a tile of FEATURES rows of W and TOKENS rows of X, and goes on to its next tile: there are as many blocks as run at once. One
// warp of a warpgroup feeds STAGES buffers of shared memory through the copy engine; two other warpgroups multiply, each 64 * BLOCKS features.
// CLUSTER blocks with neighbouring features share the rows of X: each reads a part of them and sends it to all.
//
// A step of 128 bytes of X's rows (K_STEP elements) needs 64 bytes of W's rows, and an atom of metadata for every 64 features, in CUTLASS's order for
// that step, which lie one after the other. Of 16-bit weights a thread loads one word of metadata a step: lanes with bit 1 unset hold that of
// the first product, the others that of the second, and the selector says which it is.
//
// X comes as [tokens, reduction], or, X_ACROSS, as [reduction, tokens] of 16-bit elements: then a step's rows of X lie in pieces of 64 tokens.
//
// Defined outside: ELEMENT, OUTPUT, BLOCKS, TOKENS, STAGES, CLUSTER, CHUNK, X_ACROSS, STORE, EPILOGUE, REGISTERS_LEFT, REGISTERS_TAKEN, `first_product`
// and `product` for ELEMENT and TOKENS.

constexpr int WARPGROUPS = 2;
constexpr int FEATURES = 64 * BLOCKS * WARPGROUPS;
constexpr int ELEMENT_BYTES = sizeof(Bits<ELEMENT>::type);
constexpr int K_STEP = 128 / ELEMENT_BYTES;
constexpr int K_PRODUCT = K_STEP / 2;
constexpr int W_ROW = 64, X_ROW = 128;
constexpr int W_BYTES = FEATURES * W_ROW, X_BYTES = TOKENS * X_ROW;
constexpr int ATOM_BYTES = 64 * K_STEP / 8;
constexpr int META_BYTES = FEATURES / 64 * ATOM_BYTES;
// Rows of X that the first block of a cluster reads; whole groups of eight, as swizzling has them.
constexpr int FIRST_PART = CLUSTER == 1 ? TOKENS : (TOKENS / 2 + 7) / 8 * 8;
// Of X across: 64 tokens of all of a step's rows, and how many such pieces the first block of a cluster reads.
constexpr u32 PIECE_TOKENS = 64, PIECE_BYTES = K_STEP * PIECE_TOKENS * ELEMENT_BYTES, PIECES = TOKENS / PIECE_TOKENS, FIRST_PIECES = CLUSTER == 1 ? PIECES : (PIECES + 1) / 2;
static_assert(!X_ACROSS || (ELEMENT_BYTES == 2 && TOKENS % PIECE_TOKENS == 0), "whole pieces of 16-bit elements");

// Results on their way out: CHUNK tokens of 64 features at a time.
constexpr u32 OUT_BUFFERS = STORE == STORE_ONE_BY_ONE ? 0 : 3;
constexpr u32 OUT_BYTES = CHUNK * 128;
// Sums that go through shared memory.
constexpr u32 SUM_BYTES = EPILOGUE || STORE == STORE_ONE_BY_ONE ? CHUNK * 64 * 4 : 0;

constexpr int AT_X = STAGES * W_BYTES;
constexpr int AT_OUT = AT_X + STAGES * X_BYTES;
constexpr int AT_SUMS = AT_OUT + WARPGROUPS * OUT_BUFFERS * OUT_BYTES;
constexpr int AT_META = AT_SUMS + WARPGROUPS * SUM_BYTES;
constexpr int AT_FULL = AT_META + STAGES * META_BYTES;
constexpr int AT_EMPTY = AT_FULL + STAGES * 8;
constexpr int SHARED_BYTES = AT_EMPTY + STAGES * 8;
// The host asks for 1024 more, to round up the start.
static_assert(SHARED_BYTES + 1024 == SHARED_BYTES_ASKED, "the host's sum of shared memory");
static_assert(TOKENS % CHUNK == 0 && CHUNK % 8 == 0, "pieces of a tile, which start where swizzling does");
static_assert(STORE != STORE_ACROSS || (!EPILOGUE && (CHUNK == 16 || CHUNK == 32 || CHUNK == 64)), "rows of 32, 64 or 128 bytes, as swizzling has them");

struct Parameters {
    TensorMap weight;
    TensorMap x[2];
    TensorMap out;
    const u8* meta;
    Output to;
    u32 features, tokens, steps;
    // Tiles of features are those of clusters.
    Panels panels;
};

// What a block has of its tile, and how much metadata.
struct Taken { u32 feature, token, first_atom, meta_bytes; };

// Asks for a step.
__device__ __forceinline__ void ask(const Parameters& p, u32 shared, u32 rank, const Taken& taken, u32 step, u32 stage) {
    const u32 full = shared + AT_FULL + 8 * stage;
    barrier_expect(full, W_BYTES + X_BYTES + taken.meta_bytes);
    copy_tile(shared + stage * W_BYTES, &p.weight, step * (K_STEP / 2), taken.feature, full);
    if (taken.meta_bytes != 0) {
        const u64 atom = (u64)step * (p.features / 64) + taken.first_atom;
        copy_bytes(shared + AT_META + stage * META_BYTES, p.meta + atom * ATOM_BYTES, taken.meta_bytes, full);
    }
    const u32 x = shared + AT_X + stage * X_BYTES;
    if (X_ACROSS) {
        #pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            const u32 to = x + i * PIECE_BYTES, first = taken.token + i * PIECE_TOKENS;
            if (CLUSTER == 1) copy_tile(to, &p.x[0], first, step * K_STEP, full);
            else if (rank == (i < FIRST_PIECES ? 0 : 1)) copy_tile_to_many(to, &p.x[0], first, step * K_STEP, full, 3);
        }
    } else if (CLUSTER == 1) {
        copy_tile(x, &p.x[0], step * K_STEP, taken.token, full);
    } else if (rank == 0) {
        copy_tile_to_many(x, &p.x[0], step * K_STEP, taken.token, full, 3);
    } else {
        copy_tile_to_many(x + FIRST_PART * X_ROW, &p.x[1], step * K_STEP, taken.token + FIRST_PART, full, 3);
    }
}

// The warp that feeds the others.
__device__ __forceinline__ void feed(const Parameters& p, u32 shared, u32 rank) {
    const u32 atoms = p.features / 64;
    u32 stage = 0, parity = 1;
    for (u32 index = blockIdx.x / CLUSTER; index < p.panels.tiles(); index += gridDim.x / CLUSTER) {
        const Tile tile = p.panels.tile(index);
        const u32 feature = (tile.feature * CLUSTER + rank) * FEATURES, token = tile.token * TOKENS;
        const u32 first_atom = min(feature / 64, atoms);
        const u32 meta_bytes = min(FEATURES / 64u, atoms - first_atom) * ATOM_BYTES;
        for (u32 step = 0; step < p.steps; step++) {
            barrier_wait(shared + AT_EMPTY + 8 * stage, parity);
            if (elected()) ask(p, shared, rank, Taken{feature, token, first_atom, meta_bytes}, step, stage);
            next_stage<STAGES>(stage, parity);
        }
    }
}

typedef Result<OUTPUT>::Type Out;

__device__ __forceinline__ u32 pair_of(Out low, Out high) { return low | (u32)high << 16; }
__device__ __forceinline__ u32 rounded(Sum low, Sum high) { return pair_of(Result<OUTPUT>::of(low, (float)low), Result<OUTPUT>::of(high, (float)high)); }

// Scales, bias and activation for the thread's two features of a block, which are 8 apart.
struct Finisher {
    const Parameters& p;
    u32 token;
    float scale[2], bias[2];

    __device__ __forceinline__ Finisher(const Parameters& p, u32 feature, u32 token) : p(p), token(token) {
        #pragma unroll
        for (int high = 0; high < 2; high++) {
            const u32 row = feature + 8 * high;
            const bool inside = row < p.features;
            scale[high] = p.to.alpha * (p.to.feature_scales && inside ? p.to.feature_scales[row] : 1.0f);
            bias[high] = p.to.bias && inside ? Result<OUTPUT>::bias(p.to.bias, row) : 0.0f;
        }
    }

    // Of the sums of both features and of the thread's tokens that are `column` after its first two.
    template <int ACTIVATION> __device__ __forceinline__ void finish(const Sum (&sums)[4], u32 column, Out (&results)[4]) const {
        float by_token[2] = {1.0f, 1.0f};
        if (EPILOGUE && p.to.token_scales) {
            #pragma unroll
            for (int odd = 0; odd < 2; odd++) by_token[odd] = p.to.token_scales[min(token + column + odd, p.tokens - 1)];
        }
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            float value = (float)sums[i];
            if (EPILOGUE) value = activated<ACTIVATION>(fmaf(value, scale[i / 2] * by_token[i % 2], bias[i / 2]));
            results[i] = Result<OUTPUT>::of(sums[i], value);
        }
    }
};

// Eight tokens of the warp's sixteen features, to their place in a tile for the copy engine: rows of 64 features, swizzled.
__device__ __forceinline__ void place(u32 tile, u32 eight, u32 low, u32 high) {
    const u32 lane = threadIdx.x % 32, row = eight * 8 + lane % 8, column = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
    store_transposed(tile + row * 128 + ((column ^ row % 8) << 4), low, high);
}

// Takes results out of a warpgroup's registers, a piece of 64 features and CHUNK tokens after the other.
struct Storer {
    const Parameters& p;
    // Of the block's shared memory, the start; of the warpgroup's buffers, the next one.
    u32 shared;
    u32 buffer;

    __device__ __forceinline__ u32 group() const { return threadIdx.x / 128; }
    // Shared memory for the thread's own sums.
    __device__ __forceinline__ u32 own() const { return shared + AT_SUMS + group() * SUM_BYTES + threadIdx.x % 128 * 16; }

    // From registers at once; features of a token are contiguous, or, STORE_ACROSS, tokens of a feature.
    template <int FIRST> __device__ __forceinline__ void round(const Sum (&all)[TOKENS / 2], u32 at) const {
        const u32 lane = threadIdx.x % 32, column = threadIdx.x % 128 / 32 * 2 + lane / 8 % 2;
        #pragma unroll
        for (int eight = 0; eight < CHUNK / 8; eight += 2) {
            const int sum = FIRST / 2 + 4 * eight;
            const u32 low = rounded(all[sum], all[sum + 1]), high = rounded(all[sum + 2], all[sum + 3]);
            if (eight + 1 == CHUNK / 8) {
                place(at, eight, low, high);
                break;
            }
            const u32 next_low = rounded(all[sum + 4], all[sum + 5]), next_high = rounded(all[sum + 6], all[sum + 7]);
            if (STORE == STORE_ACROSS) {
                const u32 feature = threadIdx.x % 128 / 32 * 16 + lane % 16, piece = eight + lane / 16;
                store_matrices(at + feature * (CHUNK * 2) + ((piece ^ feature / (64 / CHUNK) % (CHUNK / 8)) << 4), low, high, next_low, next_high);
                continue;
            }
            const u32 row = eight * 8 + lane / 16 * 8 + lane % 8;
            store_transposed(at + row * 128 + ((column ^ row % 8) << 4), low, high, next_low, next_high);
        }
    }

    // To the thread's own shared memory: so the code for one result is there once, not once for every register.
    template <int FIRST> __device__ __forceinline__ void set_down(const Sum (&all)[TOKENS / 2]) const {
        #pragma unroll
        for (int eight = 0; eight < CHUNK / 8; eight++) {
            const int sum = FIRST / 2 + 4 * eight;
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(own() + eight * 2048), "r"(bits_of(all[sum])), "r"(bits_of(all[sum + 1])),
                         "r"(bits_of(all[sum + 2])), "r"(bits_of(all[sum + 3]))
                         : "memory");
        }
    }

    template <int ACTIVATION> __device__ __forceinline__ void pick_up(u32 at, u32 feature, u32 token) const {
        const u32 lane = threadIdx.x % 32, row = feature + threadIdx.x % 128 / 32 * 16 + lane / 4, column = token + lane % 4 * 2;
        const Finisher finisher(p, row, column);
        #pragma unroll 3
        for (u32 eight = 0; eight < CHUNK / 8; eight++) {
            u32 words[4];
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(own() + eight * 2048) : "memory");
            Sum sums[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) of_bits(sums[i], words[i]);
            Out results[4];
            finisher.finish<ACTIVATION>(sums, eight * 8, results);
            if (STORE == STORE_TILES) {
                place(at, eight, pair_of(results[0], results[1]), pair_of(results[2], results[3]));
            } else {
                store(results, row, column + eight * 8);
            }
        }
    }

    __device__ __forceinline__ void pick_up_finished(u32 at, u32 feature, u32 token) const {
        if (EPILOGUE && p.to.activation == RELU) return pick_up<RELU>(at, feature, token);
        if (EPILOGUE && p.to.activation == GELU) return pick_up<GELU>(at, feature, token);
        if (EPILOGUE && p.to.activation == SILU) return pick_up<SILU>(at, feature, token);
        pick_up<NONE>(at, feature, token);
    }

    // Of features `row` and `row + 8`, and of tokens `column` and `column + 1`, in any order and for any alignment.
    __device__ __forceinline__ void store(const Out (&results)[4], u32 row, u32 column) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 f = row + i / 2 * 8, t = column + i % 2;
            if (f < p.features && t < p.tokens) ((Out*)p.to.data)[f * p.to.stride_feature + t * p.to.stride_token] = results[i];
        }
    }

    __device__ __forceinline__ u32 begin() const {
        if (threadIdx.x % 128 == 0) stores_have_read<OUT_BUFFERS == 0 ? 0 : OUT_BUFFERS - 1>();
        named_barrier(1 + group(), 128);
        return shared + AT_OUT + (group() * OUT_BUFFERS + buffer) * OUT_BYTES;
    }
    __device__ __forceinline__ void end(u32 at, u32 feature, u32 token) {
        show_to_copies();
        named_barrier(1 + group(), 128);
        if (threadIdx.x % 128 == 0) store_tile(&p.out, STORE == STORE_ACROSS ? token : feature, STORE == STORE_ACROSS ? feature : token, at);
        buffer = buffer + 1 == OUT_BUFFERS ? 0 : buffer + 1;
    }

    // Everything: 64 features for each block.
    __device__ __forceinline__ void operator()(const Sum (&sums)[BLOCKS][TOKENS / 2], u32 feature, u32 token) {
        constexpr int CHUNKS = TOKENS / CHUNK;
        if constexpr (STORE != STORE_ONE_BY_ONE && !EPILOGUE) {
            unrolled<BLOCKS * CHUNKS>([&](auto piece) {
                constexpr int BLOCK = decltype(piece)::value / CHUNKS, FIRST = decltype(piece)::value % CHUNKS * CHUNK;
                const u32 at = begin();
                round<FIRST>(sums[BLOCK], at);
                end(at, feature + BLOCK * 64, token + FIRST);
            });
        } else {
            #pragma unroll 1
            for (u32 piece = 0; piece < BLOCKS * CHUNKS; piece++) {
                unrolled<BLOCKS * CHUNKS>([&](auto which) {
                    constexpr int WHICH = decltype(which)::value;
                    if (piece == WHICH) set_down<WHICH % CHUNKS * CHUNK>(sums[WHICH / CHUNKS]);
                });
                const u32 first_feature = feature + piece / CHUNKS * 64, first_token = token + piece % CHUNKS * CHUNK;
                if constexpr (STORE == STORE_TILES) {
                    const u32 at = begin();
                    pick_up_finished(at, first_feature, first_token);
                    end(at, first_feature, first_token);
                } else {
                    pick_up_finished(0, first_feature, first_token);
                }
            }
        }
    }
};

// A warpgroup that multiplies.
__device__ __forceinline__ void multiply(const Parameters& p, u32 shared, u32 rank) {
    const u32 group = uniform(threadIdx.x / 128), thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
    Sum sums[BLOCKS][TOKENS / 2];
    const u64 weight = operand<W_ROW>(shared + group * BLOCKS * 64 * W_ROW);
    const u64 x = X_ACROSS ? operand_across(shared + AT_X, PIECE_BYTES) : operand<X_ROW>(shared + AT_X);
    // The thread's metadata of its first atom: see the orders in `twofour::layout::sm90`.
    const u32 row = warp * 16 + lane / 4;
    const u32 word = ELEMENT_BYTES == 2 ? 2 * (warp * 16 + lane % 2 * 8 + lane / 4) + lane / 2 % 2 : 4 * (row + lane % 2 * 8) + lane / 2 % 2;
    const u32 meta = shared + AT_META + group * BLOCKS * ATOM_BYTES + 4 * word;
    Storer store{p, shared, 0};
    u32 stage = 0, parity = 0;

    // A stage may be filled again once every thread of the cluster has said so. One for all lanes of its warp would be enough, but compute-sanitizer's racecheck, which follows
    // copies that are no tensors', would not know that the others have read their metadata.
    const auto release = [&](u32 stage) {
        const u32 empty = shared + AT_EMPTY + 8 * stage;
        if (CLUSTER == 1) {
            barrier_arrive(empty);
        } else {
            #pragma unroll
            for (u32 to = 0; to < CLUSTER; to++) barrier_arrive_at(empty, to);
        }
    };
    constexpr int WORDS = ELEMENT_BYTES == 2 ? 1 : 2;
    // One step; the one before it is over once this one has begun.
    u32 before = 0;
    const auto step = [&](auto first, u32 (&codes)[BLOCKS][WORDS], const u32 (&codes_before)[BLOCKS][WORDS]) {
        constexpr bool FIRST = decltype(first)::value;
        barrier_wait(shared + AT_FULL + 8 * stage, parity);
        #pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            const u32 at = meta + stage * META_BYTES + block * ATOM_BYTES;
            #pragma unroll
            for (int i = 0; i < WORDS; i++) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(codes[block][i]) : "r"(at + 8 * i));
        }
        const u64 w_now = operand_after(weight, stage * W_BYTES), x_now = operand_after(x, stage * X_BYTES);
        products_begin();
        #pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            const u64 w = operand_after(w_now, block * 64 * W_ROW);
            if constexpr (FIRST) {
                first_product<0>(sums[block], w, x_now, codes[block][0]);
            } else {
                product<0>(sums[block], w, x_now, codes[block][0]);
            }
        }
        #pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            const u64 w = operand_after(w_now, block * 64 * W_ROW + W_ROW / 2);
            const u64 x = operand_after(x_now, X_ACROSS ? PIECE_BYTES / 2 : X_ROW / 2);
            product<ELEMENT_BYTES == 2 ? 1 : 0>(sums[block], w, x, codes[block][WORDS - 1]);
        }
        products_commit();
        products_wait<1>();
        if (!FIRST) {
            #pragma unroll
            for (int block = 0; block < BLOCKS; block++) held(codes_before[block]);
            release(before);
        }
        before = stage;
        next_stage<STAGES>(stage, parity);
    };

    for (u32 index = blockIdx.x / CLUSTER; index < p.panels.tiles(); index += gridDim.x / CLUSTER) {
        const Tile tile = p.panels.tile(index);
        // Two sets of metadata by turns: products of a step still read theirs while the next step's is loaded.
        u32 codes[2][BLOCKS][WORDS] = {};
        step(Int<1>(), codes[0], codes[1]);
        for (u32 left = p.steps - 1; left != 0; left--) {
            step(Int<0>(), codes[1], codes[0]);
            if (--left == 0) break;
            step(Int<0>(), codes[0], codes[1]);
        }
        products_wait<0>();
        #pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            held(codes[0][block]);
            held(codes[1][block]);
        }
        release(before);

        store(sums, (tile.feature * CLUSTER + rank) * FEATURES + group * BLOCKS * 64, tile.token * TOKENS);
    }
    if (STORE != STORE_ONE_BY_ONE && thread == 0) stores_are_done();
}

extern "C" __global__ void __launch_bounds__((WARPGROUPS + 1) * 128, 1) gemm(const __grid_constant__ Parameters p) {
    extern __shared__ u8 memory[];
    const u32 shared = (shared_address(memory) + 1023) & ~1023u;
    const u32 rank = CLUSTER == 1 ? 0 : cluster_rank();
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            barrier_init(shared + AT_FULL + 8 * stage, 1);
            barrier_init(shared + AT_EMPTY + 8 * stage, WARPGROUPS * 128 * CLUSTER);
        }
        barriers_are_ready();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
    const u32 warp = uniform(threadIdx.x / 32);
    if (warp >= WARPGROUPS * 4) {
        give_registers<REGISTERS_LEFT>();
        if (warp == WARPGROUPS * 4) feed(p, shared, rank);
    } else {
        take_registers<REGISTERS_TAKEN>();
        multiply(p, shared, rank);
    }
    // Nobody goes while another of the cluster may still send to it.
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();
}
