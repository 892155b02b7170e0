// Attention and its gradients without scores in memory (Dao, "FlashAttention-2", 2023): tiles of scores stay in registers, and probabilities are computed again from
// log-sum-exps in the backward pass. One kernel computes the gradients of keys and values for a tile of keys, another those of queries for a tile of queries, so that
// no two CTAs add to one place.
//
// Tensors are [batch, heads, positions, DIM], aligned to 16 bytes; the result and its gradient may also be [batch, positions, heads, DIM]. A CTA of four warps has a tile of ROWS rows, FRAGMENTS times 16 for each warp, and goes through tiles
// of columns. Every fragment of columns that a warp loads from shared memory is multiplied with all of its rows: with one fragment of 16 rows the loads take longer than the
// products.
//
// Defined outside: ELEMENT, DIM.

typedef Bits<ELEMENT>::type Raw;
#define INFINITE __int_as_float(0x7F800000)
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 FRAGMENTS = DIM > 64 ? 1 : 2; // of 16 rows, of a warp
constexpr u32 ROWS = 64 * FRAGMENTS;
constexpr u32 STEPS = DIM / 16;          // steps of a product over DIM
constexpr u32 CHUNKS = DIM / 8;          // pieces of 16 bytes of a row
constexpr u32 COLUMNS = 64;              // of a tile of the forward pass
constexpr u32 SOME = 32;                 // columns of a tile of the backward pass

struct Attention {
    const Raw *q, *k, *v, *out, *dout;
    const float* lse;   // [batch, heads, positions]
    const float* delta; // the same: sums of out dout
    Raw *to_out, *dq, *dk, *dv;
    float *to_lse, *to_delta;
    u32 batch, positions, heads, kv_heads;
    u32 causal;
    float scale;
    // Elements between two positions of the result and of its gradient, between two heads, and between two sequences.
    u32 out_row;
    u64 out_head, out_sequence;
};

// Returns the first element of a head of the result or of its gradient; heads of all sequences are counted.
__device__ __forceinline__ u64 out_at(const Attention& p, u32 head) { return head / p.heads * p.out_sequence + head % p.heads * p.out_head; }

// Rows' tiles, and two stages of columns' tiles.
extern __shared__ __align__(128) u8 shared[];

// Returns where 16 bytes of a tile are in shared memory, in bytes from the tile's begin: neighbouring rows are in different banks.
__device__ __forceinline__ u32 place(u32 row, u32 chunk) {
    const u32 turned = CHUNKS == 4 ? chunk ^ (row / 2 & 3) : chunk ^ (row & 7);
    return (row * CHUNKS + turned) * 16;
}

// Copies rows from `first` on to a tile in shared memory; rows beyond the last are zeros.
template <u32 COUNT> __device__ __forceinline__ void load_tile(u32 to, const Raw* from, u32 first, u32 positions, u32 stride = DIM) {
    #pragma unroll
    for (u32 i = threadIdx.x; i < COUNT * CHUNKS; i += 128) {
        const u32 row = i / CHUNKS, chunk = i % CHUNKS;
        const bool is_there = first + row < positions;
        copy_16(to + place(row, chunk), from + (u64)(is_there ? first + row : 0) * stride + 8 * chunk, is_there);
    }
}

// Loads the fragments of a warp's rows for a step of the product over DIM.
__device__ __forceinline__ void load_rows(u32 (&to)[FRAGMENTS][4], u32 tile, u32 first, u32 step) {
    const u32 lane = threadIdx.x % 32;
    #pragma unroll
    for (u32 f = 0; f < FRAGMENTS; f++) load_matrices(to[f], tile + place(first + 16 * f + (lane / 8 & 1) * 8 + lane % 8, 2 * step + lane / 16));
}

// sums += rows · columnsᵀ, for the warp's rows and N columns.
template <u32 N> __device__ __forceinline__ void multiply_transposed(float (&sums)[FRAGMENTS][N / 8][4], const u32 (&rows)[FRAGMENTS][4], u32 tile, u32 step) {
    const u32 lane = threadIdx.x % 32;
    #pragma unroll
    for (u32 pair = 0; pair < N / 16; pair++) {
        u32 b[4];
        load_matrices(b, tile + place(16 * pair + lane / 16 * 8 + lane % 8, 2 * step + (lane / 8 & 1)));
        #pragma unroll
        for (u32 f = 0; f < FRAGMENTS; f++) {
            multiply<ELEMENT>(sums[f][2 * pair], rows[f], b[0], b[1]);
            multiply<ELEMENT>(sums[f][2 * pair + 1], rows[f], b[2], b[3]);
        }
    }
}

// sums += weights · tile, for weights of the warp's rows and N columns that are rounded, and a tile of N rows.
template <u32 N> __device__ __forceinline__ void multiply_weighted(float (&sums)[FRAGMENTS][DIM / 8][4], const float (&weights)[FRAGMENTS][N / 8][4], u32 tile) {
    const u32 lane = threadIdx.x % 32;
    #pragma unroll
    for (u32 step = 0; step < N / 16; step++) {
        u32 a[FRAGMENTS][4];
        #pragma unroll
        for (u32 f = 0; f < FRAGMENTS; f++) {
            a[f][0] = narrow_pair<ELEMENT>(weights[f][2 * step][0], weights[f][2 * step][1]);
            a[f][1] = narrow_pair<ELEMENT>(weights[f][2 * step][2], weights[f][2 * step][3]);
            a[f][2] = narrow_pair<ELEMENT>(weights[f][2 * step + 1][0], weights[f][2 * step + 1][1]);
            a[f][3] = narrow_pair<ELEMENT>(weights[f][2 * step + 1][2], weights[f][2 * step + 1][3]);
        }
        #pragma unroll
        for (u32 pair = 0; pair < DIM / 16; pair++) {
            u32 b[4];
            load_matrices_transposed(b, tile + place(16 * step + (lane / 8 & 1) * 8 + lane % 8, 2 * pair + lane / 16));
            #pragma unroll
            for (u32 f = 0; f < FRAGMENTS; f++) {
                multiply<ELEMENT>(sums[f][2 * pair], a[f], b[0], b[1]);
                multiply<ELEMENT>(sums[f][2 * pair + 1], a[f], b[2], b[3]);
            }
        }
    }
}

// Stores 16 rows, each times a factor.
__device__ __forceinline__ void store_rows(Raw* to, u32 first, u32 positions, const float (&sums)[DIM / 8][4], float low, float high, u32 stride = DIM) {
    const u32 lane = threadIdx.x % 32, row = first + lane / 4;
    #pragma unroll
    for (u32 i = 0; i < DIM / 8; i++) {
        const u32 col = 8 * i + lane % 4 * 2;
        if (row < positions) *(u32*)(to + (u64)row * stride + col) = narrow_pair<ELEMENT>(sums[i][0] * low, sums[i][1] * low);
        if (row + 8 < positions) *(u32*)(to + (u64)(row + 8) * stride + col) = narrow_pair<ELEMENT>(sums[i][2] * high, sums[i][3] * high);
    }
}

// Returns the sum, or the largest, of the four lanes that share a row.
__device__ __forceinline__ float sum_of_row(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}
__device__ __forceinline__ float largest_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

// The tiles with the most columns come first.
extern "C" __global__ void __launch_bounds__(128) forward(const __grid_constant__ Attention p) {
    constexpr u32 BYTES = COLUMNS * DIM * 2;
    const u32 all = p.batch * p.heads, tiles = gridDim.x / all;
    const u32 head = blockIdx.x % all, first = (tiles - 1 - blockIdx.x / all) * ROWS;
    const u32 kv_head = head / p.heads * p.kv_heads + head % p.heads / (p.heads / p.kv_heads);
    const u64 size = (u64)p.positions * DIM;
    const Raw *k = p.k + kv_head * size, *v = p.v + kv_head * size;
    const u32 q_tile = shared_address(shared), stages = q_tile + ROWS * DIM * 2;
    const u32 lane = threadIdx.x % 32, own = 16 * FRAGMENTS * (threadIdx.x / 32), row = first + own + lane / 4;
    const u32 end = p.causal ? min(first + ROWS, p.positions) : p.positions, count = (end + COLUMNS - 1) / COLUMNS;

    load_tile<ROWS>(q_tile, p.q + head * size, first, p.positions);
    load_tile<COLUMNS>(stages, k, 0, p.positions);
    load_tile<COLUMNS>(stages + BYTES, v, 0, p.positions);
    commit_copies();
    float sums[FRAGMENTS][DIM / 8][4] = {}, largest[FRAGMENTS][2], total[FRAGMENTS][2] = {};
    #pragma unroll
    for (u32 f = 0; f < FRAGMENTS; f++) largest[f][0] = largest[f][1] = -INFINITE;
    const float factor = p.scale * LOG2_E;
    // Fragments of queries: with one for each warp they stay in registers; two are loaded again for every tile.
    constexpr bool STAY = FRAGMENTS == 1;
    u32 q[STAY ? STEPS : 1][FRAGMENTS][4];
    for (u32 tile = 0; tile < count; tile++) {
        if (tile + 1 < count) {
            const u32 to = stages + (tile + 1) % 2 * (2 * BYTES);
            load_tile<COLUMNS>(to, k, (tile + 1) * COLUMNS, p.positions);
            load_tile<COLUMNS>(to + BYTES, v, (tile + 1) * COLUMNS, p.positions);
            commit_copies();
            await_copies<1>();
        } else {
            await_copies<0>();
        }
        __syncthreads();
        if (STAY && tile == 0) {
            #pragma unroll
            for (u32 step = 0; step < STEPS; step++) load_rows(q[STAY ? step : 0], q_tile, own, step);
        }
        const u32 stage = stages + tile % 2 * (2 * BYTES), column = tile * COLUMNS + lane % 4 * 2;
        // Under a causal mask, the last tile may be beyond all of the warp's queries.
        if (FRAGMENTS == 1 || !p.causal || tile * COLUMNS < first + own + 16 * FRAGMENTS) {
            float scores[FRAGMENTS][COLUMNS / 8][4] = {};
            #pragma unroll
            for (u32 step = 0; step < STEPS; step++) {
                if (!STAY) load_rows(q[0], q_tile, own, step);
                multiply_transposed<COLUMNS>(scores, q[STAY ? step : 0], stage, step);
            }
            // Tiles before the diagonal are whole.
            const bool whole = (tile + 1) * COLUMNS <= (p.causal ? first : p.positions);
            #pragma unroll
            for (u32 f = 0; f < FRAGMENTS; f++) {
                if (!whole) {
                    #pragma unroll
                    for (u32 i = 0; i < COLUMNS / 8; i++) {
                        #pragma unroll
                        for (u32 j = 0; j < 4; j++) {
                            const u32 key = column + 8 * i + j % 2, query = row + 16 * f + j / 2 * 8;
                            if (key >= p.positions || (p.causal && key > query)) scores[f][i][j] = -INFINITE;
                        }
                    }
                }
                #pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    float most = largest[f][half];
                    #pragma unroll
                    for (u32 i = 0; i < COLUMNS / 8; i++) most = fmaxf(most, fmaxf(scores[f][i][2 * half], scores[f][i][2 * half + 1]));
                    most = largest_of_row(most);
                    const float less = power_of_two((largest[f][half] - most) * factor), shift = most * factor;
                    largest[f][half] = most;
                    float sum = 0.0f;
                    #pragma unroll
                    for (u32 i = 0; i < COLUMNS / 8; i++) {
                        #pragma unroll
                        for (u32 j = 2 * half; j < 2 * half + 2; j++) {
                            scores[f][i][j] = power_of_two(scores[f][i][j] * factor - shift);
                            sum += scores[f][i][j];
                        }
                    }
                    total[f][half] = total[f][half] * less + sum;
                    #pragma unroll
                    for (u32 i = 0; i < DIM / 8; i++) sums[f][i][2 * half] *= less, sums[f][i][2 * half + 1] *= less;
                }
            }
            multiply_weighted<COLUMNS>(sums, scores, stage + BYTES);
        }
        __syncthreads();
    }
    float* lse = p.to_lse + (u64)head * p.positions;
    #pragma unroll
    for (u32 f = 0; f < FRAGMENTS; f++) {
        total[f][0] = sum_of_row(total[f][0]), total[f][1] = sum_of_row(total[f][1]);
        store_rows(p.to_out + out_at(p, head), first + own + 16 * f, p.positions, sums[f], 1.0f / total[f][0], 1.0f / total[f][1], p.out_row);
        const u32 query = row + 16 * f;
        if (lane % 4 == 0 && query < p.positions) lse[query] = largest[f][0] * p.scale + logf(total[f][0]);
        if (lane % 4 == 0 && query + 8 < p.positions) lse[query + 8] = largest[f][1] * p.scale + logf(total[f][1]);
    }
}

// A warp sums out dout of a query.
extern "C" __global__ void __launch_bounds__(256) sum_products(const __grid_constant__ Attention p) {
    const u64 query = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (query >= (u64)p.batch * p.heads * p.positions) return;
    const u32 head = (u32)(query / p.positions);
    const u64 at = out_at(p, head) + (query - (u64)head * p.positions) * p.out_row;
    float sum = 0.0f;
    #pragma unroll
    for (u32 col = threadIdx.x % 32; col < DIM; col += 32) sum += widen<ELEMENT>(p.out[at + col]) * widen<ELEMENT>(p.dout[at + col]);
    for (u32 distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    if (threadIdx.x % 32 == 0) p.to_delta[query] = sum;
}

// Where rows are keys, scores are transposed: rows · columnsᵀ = k qᵀ and v doutᵀ; otherwise q kᵀ and dout vᵀ.
template <bool KEYS> __device__ __forceinline__ void backward(const Attention& p) {
    __shared__ float lses[2][SOME], deltas[2][SOME];
    constexpr u32 BYTES = SOME * DIM * 2;
    // Steps that are unrolled: with all of them, addresses take more registers than two gradients of 128 columns leave.
    constexpr u32 AT_ONCE = KEYS && DIM > 64 ? 1 : STEPS;
    const u32 all = p.batch * (KEYS ? p.kv_heads : p.heads), tiles = gridDim.x / all, group = p.heads / p.kv_heads;
    // Under a causal mask, the first keys and the last queries have the most work.
    const u32 head = blockIdx.x % all, turn = blockIdx.x / all, first = (KEYS ? turn : tiles - 1 - turn) * ROWS;
    const u64 size = (u64)p.positions * DIM;
    // The first head of the columns.
    const u32 heads = KEYS ? p.kv_heads : p.heads, other = KEYS ? head / heads * p.heads + head % heads * group : head / heads * p.kv_heads + head % heads / group;
    const Raw *x = (KEYS ? p.k : p.q) + head * size, *y = KEYS ? p.v + head * size : p.dout + out_at(p, head);
    const Raw *z = (KEYS ? p.q : p.k) + other * size, *w = KEYS ? p.dout + out_at(p, other) : p.v + other * size;
    const u32 x_tile = shared_address(shared), y_tile = x_tile + ROWS * DIM * 2, stages = y_tile + ROWS * DIM * 2;
    const u32 lane = threadIdx.x % 32, own = 16 * FRAGMENTS * (threadIdx.x / 32), row = first + own + lane / 4;
    const u32 begin = KEYS && p.causal ? first / SOME : 0;
    const u32 end = !KEYS && p.causal ? min(first + ROWS, p.positions) : p.positions;
    const u32 of_head = (end + SOME - 1) / SOME - begin, count = of_head * (KEYS ? group : 1);

    const auto load_columns = [&](u32 tile) {
        const u32 head_of_group = tile / of_head, at = (begin + tile % of_head) * SOME, to = stages + tile % 2 * (2 * BYTES);
        load_tile<SOME>(to, z + head_of_group * size, at, p.positions);
        load_tile<SOME>(to + BYTES, w + head_of_group * (KEYS ? p.out_head : size), at, p.positions, KEYS ? p.out_row : DIM);
        if (KEYS && threadIdx.x < SOME) {
            const u32 query = at + threadIdx.x;
            const u64 index = (u64)(other + head_of_group) * p.positions + query;
            lses[tile % 2][threadIdx.x] = query < p.positions ? p.lse[index] * LOG2_E : 0.0f;
            deltas[tile % 2][threadIdx.x] = query < p.positions ? p.delta[index] : 0.0f;
        }
    };
    load_tile<ROWS>(x_tile, x, first, p.positions);
    load_tile<ROWS>(y_tile, y, first, p.positions, KEYS ? DIM : p.out_row);
    load_columns(0);
    commit_copies();
    // Of each eight rows.
    float row_lse[2 * FRAGMENTS] = {}, row_delta[2 * FRAGMENTS] = {};
    if (!KEYS) {
        #pragma unroll
        for (u32 half = 0; half < 2 * FRAGMENTS; half++) {
            if (row + 8 * half < p.positions) {
                row_lse[half] = p.lse[(u64)head * p.positions + row + 8 * half] * LOG2_E;
                row_delta[half] = p.delta[(u64)head * p.positions + row + 8 * half];
            }
        }
    }
    // The gradients of x, and of y where rows are keys.
    float dx[FRAGMENTS][DIM / 8][4] = {}, dy[KEYS ? FRAGMENTS : 1][KEYS ? DIM / 8 : 1][4] = {};
    const float factor = p.scale * LOG2_E;
    for (u32 tile = 0; tile < count; tile++) {
        if (tile + 1 < count) {
            load_columns(tile + 1);
            commit_copies();
            await_copies<1>();
        } else {
            await_copies<0>();
        }
        __syncthreads();
        const u32 stage = stages + tile % 2 * (2 * BYTES);
        const u32 tile_begin = (begin + tile % of_head) * SOME, column = tile_begin + lane % 4 * 2;
        // Whether there is a probability: under a causal mask, all keys may be after all queries.
        const u32 least_key = KEYS ? first + own : tile_begin, last_query = KEYS ? tile_begin + SOME - 1 : first + own + 16 * FRAGMENTS - 1;
        if (FRAGMENTS == 1 || !p.causal || least_key <= last_query) {
            float scores[FRAGMENTS][SOME / 8][4] = {}, gradients[FRAGMENTS][SOME / 8][4] = {};
            #pragma unroll AT_ONCE
            for (u32 step = 0; step < STEPS; step++) {
                u32 rows[FRAGMENTS][4];
                load_rows(rows, x_tile, own, step);
                multiply_transposed<SOME>(scores, rows, stage, step);
                load_rows(rows, y_tile, own, step);
                multiply_transposed<SOME>(gradients, rows, stage + BYTES, step);
            }
            // The part of the tile beyond the diagonal or the last position has no probabilities.
            const u32 least_query = KEYS ? tile_begin : first, end_of_keys = KEYS ? first + ROWS : tile_begin + SOME;
            const bool whole = first + ROWS <= p.positions && tile_begin + SOME <= p.positions && (!p.causal || end_of_keys <= least_query + 1);
            if (!whole) {
                #pragma unroll
                for (u32 f = 0; f < FRAGMENTS; f++) {
                    #pragma unroll
                    for (u32 i = 0; i < SOME / 8; i++) {
                        #pragma unroll
                        for (u32 j = 0; j < 4; j++) {
                            const u32 mine = row + 16 * f + j / 2 * 8, across = column + 8 * i + j % 2;
                            const u32 key = KEYS ? mine : across, query = KEYS ? across : mine;
                            if (key >= p.positions || query >= p.positions || (p.causal && key > query)) scores[f][i][j] = -INFINITE;
                        }
                    }
                }
            }
            #pragma unroll
            for (u32 i = 0; i < SOME / 8; i++) {
                #pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32 in_tile = 8 * i + lane % 4 * 2 + j % 2;
                    const float column_lse = KEYS ? lses[tile % 2][in_tile] : 0.0f, column_delta = KEYS ? deltas[tile % 2][in_tile] : 0.0f;
                    #pragma unroll
                    for (u32 f = 0; f < FRAGMENTS; f++) {
                        const float lse = KEYS ? column_lse : row_lse[2 * f + j / 2], delta = KEYS ? column_delta : row_delta[2 * f + j / 2];
                        scores[f][i][j] = power_of_two(scores[f][i][j] * factor - lse);
                        gradients[f][i][j] = scores[f][i][j] * (gradients[f][i][j] - delta);
                    }
                }
            }
            if constexpr (KEYS) multiply_weighted<SOME>(dy, scores, stage + BYTES);
            multiply_weighted<SOME>(dx, gradients, stage);
        }
        __syncthreads();
    }
    #pragma unroll
    for (u32 f = 0; f < FRAGMENTS; f++) {
        const u32 at = first + own + 16 * f;
        store_rows((KEYS ? p.dk : p.dq) + head * size, at, p.positions, dx[f], p.scale, p.scale);
        if constexpr (KEYS) store_rows(p.dv + head * size, at, p.positions, dy[f], 1.0f, 1.0f);
    }
}

extern "C" __global__ void __launch_bounds__(128) backward_keys(const __grid_constant__ Attention p) { backward<true>(p); }
extern "C" __global__ void __launch_bounds__(128) backward_queries(const __grid_constant__ Attention p) { backward<false>(p); }
