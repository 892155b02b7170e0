// Attention and its gradients without scores in memory (Dao, "FlashAttention-2", 2023): tiles of scores stay in
// registers, and probabilities are computed again from log-sum-exps in the backward pass. One kernel computes the
// gradients of keys and values for a tile of keys, another those of queries for a tile of queries, so that no two CTAs
// add to one place.
//
// Tensors are [batch, heads, positions, DIM] of any layout whose heads are aligned to 16 bytes. A CTA has a tile of
// rows, 16 for each warp, and goes through tiles of columns; `tiles.cuh` copies them, and `mma.cuh` or `wgmma.cuh`
// multiplies them.
//
// With OPTIONS, scores have a window and a soft cap; without, neither costs anything.
//
// Defined outside: ELEMENT, DIM, OPTIONS; FORWARD_ROWS, the rows of a CTA of the forward pass; FORWARD_CTAS, KEYS_CTAS
// and QUERIES_CTAS, at least so many CTAs of each kernel an SM holds.

#define INFINITE __int_as_float(0x7F800000)
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 COLUMNS = 64;              // of a tile of the forward pass
constexpr u32 BACKWARD_ROWS = 64;
constexpr u32 SOME = DIM > 64 ? 32 : 64; // columns of a tile of the backward pass

// Elements between two heads, two sequences and two positions of a tensor.
struct Layout {
    u64 head, sequence;
    u32 row;
};

struct Attention {
    const Raw *q, *k, *v, *out, *dout;
    const float* lse;   // [batch, heads, positions]
    const float* delta; // the same: sums of out dout
    Raw *to_out, *dq, *dk, *dv;
    float *to_lse, *to_delta;
    Layout queries, keys, results; // of q and dq; of k, v, dk and dv; of out and dout
    u32 batch, positions, heads, kv_heads;
    u32 causal;
    float scale;
    u32 window;     // a query attends to keys at a distance below this; at most 2^31 - 1
    float soft_cap; // 0 for none
};

// Returns the first element of a head; heads of all sequences are counted, `heads` each.
__device__ __forceinline__ u64 head_at(const Layout& layout, u32 head, u32 heads) {
    return head / heads * layout.sequence + head % heads * layout.head;
}

// Whether a query does not attend to a key.
__device__ __forceinline__ bool is_masked(const Attention& p, u32 query, u32 key) {
    return (p.causal && key > query) || (OPTIONS && (key + p.window <= query || query + p.window <= key));
}

// Returns the first key, or query, at a distance below the window from a tile of rows that begins at `first`.
__device__ __forceinline__ u32 window_begin(const Attention& p, u32 first) {
    return OPTIONS && first >= p.window ? first - p.window + 1 : 0;
}
// Returns where those end, for rows up to `end`.
__device__ __forceinline__ u32 window_end(const Attention& p, u32 end) {
    return OPTIONS ? min(end - 1 + p.window, p.positions) : p.positions;
}

// Caps products of queries and keys, which become scores; without a cap they stay products, which `unit` makes scores.
template <u32 N> __device__ __forceinline__ void cap_scores(const Attention& p, float (&scores)[N][4]) {
    if (!OPTIONS || p.soft_cap == 0.0f) return;
    const float factor = 2.0f * LOG2_E * p.scale / p.soft_cap;
    #pragma unroll
    for (u32 i = 0; i < 4 * N; i++) {
        float& score = scores[i / 4][i % 4];
        score = p.soft_cap - __fdividef(2.0f * p.soft_cap, 1.0f + power_of_two(score * factor));
    }
}
__device__ __forceinline__ float unit(const Attention& p) { return OPTIONS && p.soft_cap > 0.0f ? 1.0f : p.scale; }

// The tiles with the most columns come first.
extern "C" __global__ void __launch_bounds__(2 * FORWARD_ROWS, FORWARD_CTAS)
    forward(const __grid_constant__ Attention p) {
    constexpr u32 ROWS = FORWARD_ROWS, THREADS = 2 * ROWS, BYTES = COLUMNS * DIM * 2;
    const u32 all = p.batch * p.heads, tiles = gridDim.x / all;
    const u32 head = blockIdx.x % all, first = (tiles - 1 - blockIdx.x / all) * ROWS;
    const u32 kv_head = head / p.heads * p.kv_heads + head % p.heads / (p.heads / p.kv_heads);
    const u64 kv_at = head_at(p.keys, kv_head, p.kv_heads);
    const Raw *k = p.k + kv_at, *v = p.v + kv_at;
    const u32 q_tile = tiles_begin(), stages = q_tile + ROWS * DIM * 2;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = first + 16 * warp + lane / 4;
    const u32 end = p.causal ? min(first + ROWS, p.positions) : window_end(p, first + ROWS);
    const u32 begin = window_begin(p, first) / COLUMNS, count = (end + COLUMNS - 1) / COLUMNS;

    load_tile<ROWS, THREADS>(q_tile, p.q + head_at(p.queries, head, p.heads), first, p.positions, p.queries.row);
    load_tile<COLUMNS, THREADS>(stages + begin % 2 * (2 * BYTES), k, begin * COLUMNS, p.positions, p.keys.row);
    load_tile<COLUMNS, THREADS>(stages + begin % 2 * (2 * BYTES) + BYTES, v, begin * COLUMNS, p.positions, p.keys.row);
    commit_copies();
    float sums[DIM / 8][4] = {}, largest[2] = {-INFINITE, -INFINITE}, total[2] = {};
    const float factor = unit(p) * LOG2_E;
    HeldRows<ROWS> q;
    for (u32 tile = begin; tile < count; tile++) {
        if (tile + 1 < count) {
            const u32 to = stages + (tile + 1) % 2 * (2 * BYTES);
            load_tile<COLUMNS, THREADS>(to, k, (tile + 1) * COLUMNS, p.positions, p.keys.row);
            load_tile<COLUMNS, THREADS>(to + BYTES, v, (tile + 1) * COLUMNS, p.positions, p.keys.row);
            commit_copies();
            await_copies<1>();
        } else {
            await_copies<0>();
        }
        show_tiles();
        __syncthreads();
        if (tile == begin) q.load(q_tile);
        const u32 stage = stages + tile % 2 * (2 * BYTES), column = tile * COLUMNS + lane % 4 * 2;
        float scores[COLUMNS / 8][4];
        multiply_rows<ROWS, COLUMNS>(scores, q, stage);
        cap_scores(p, scores);
        // Tiles before the diagonal are whole, but for a window.
        if (OPTIONS || (tile + 1) * COLUMNS > (p.causal ? first : p.positions)) {
            #pragma unroll
            for (u32 i = 0; i < COLUMNS / 8; i++) {
                #pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32 key = column + 8 * i + j % 2, query = row + j / 2 * 8;
                    if (key >= p.positions || is_masked(p, query, key)) scores[i][j] = -INFINITE;
                }
            }
        }
        #pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float most = largest[half];
            #pragma unroll
            for (u32 i = 0; i < COLUMNS / 8; i++)
                most = fmaxf(most, fmaxf(scores[i][2 * half], scores[i][2 * half + 1]));
            most = largest_of_row(most);
            // With a window a row may have no key yet.
            const float base = OPTIONS && most == -INFINITE ? 0.0f : most;
            const float less = power_of_two((largest[half] - base) * factor), shift = base * factor;
            largest[half] = most;
            float sum = 0.0f;
            #pragma unroll
            for (u32 i = 0; i < COLUMNS / 8; i++) {
                #pragma unroll
                for (u32 j = 2 * half; j < 2 * half + 2; j++) {
                    scores[i][j] = power_of_two(scores[i][j] * factor - shift);
                    sum += scores[i][j];
                }
            }
            total[half] = total[half] * less + sum;
            #pragma unroll
            for (u32 i = 0; i < DIM / 8; i++) sums[i][2 * half] *= less, sums[i][2 * half + 1] *= less;
        }
        multiply_weighted<COLUMNS>(sums, scores, stage + BYTES);
        __syncthreads();
    }
    total[0] = sum_of_row(total[0]), total[1] = sum_of_row(total[1]);
    store_rows(p.to_out + head_at(p.results, head, p.heads), p.results.row, row, p.positions, sums, 1.0f / total[0],
        1.0f / total[1]);
    if (lane % 4 == 0) {
        float* lse = p.to_lse + (u64)head * p.positions;
        if (row < p.positions) lse[row] = largest[0] * unit(p) + logf(total[0]);
        if (row + 8 < p.positions) lse[row + 8] = largest[1] * unit(p) + logf(total[1]);
    }
}

// A warp sums out dout of a query.
extern "C" __global__ void __launch_bounds__(256) sum_products(const __grid_constant__ Attention p) {
    const u64 query = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (query >= (u64)p.batch * p.heads * p.positions) return;
    const u32 head = (u32)(query / p.positions);
    const u64 at = head_at(p.results, head, p.heads) + (query - (u64)head * p.positions) * p.results.row;
    float sum = 0.0f;
    #pragma unroll
    for (u32 col = threadIdx.x % 32; col < DIM; col += 32)
        sum += widen<ELEMENT>(p.out[at + col]) * widen<ELEMENT>(p.dout[at + col]);
    for (u32 distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    if (threadIdx.x % 32 == 0) p.to_delta[query] = sum;
}

// Where rows are keys, scores are transposed: rows · columnsᵀ = k qᵀ and v doutᵀ; otherwise q kᵀ and dout vᵀ.
template <bool KEYS> __device__ __forceinline__ void backward(const Attention& p) {
    __shared__ float lses[2][SOME], deltas[2][SOME];
    constexpr u32 ROWS = BACKWARD_ROWS, THREADS = 2 * ROWS, BYTES = SOME * DIM * 2;
    // Steps that are unrolled: with all of them, addresses take more registers than two gradients of 128 columns leave.
    constexpr u32 AT_ONCE = KEYS && DIM > 64 ? 1 : STEPS;
    const u32 all = p.batch * (KEYS ? p.kv_heads : p.heads), tiles = gridDim.x / all, group = p.heads / p.kv_heads;
    // Under a causal mask, the first keys and the last queries have the most work.
    const u32 head = blockIdx.x % all, turn = blockIdx.x / all, first = (KEYS ? turn : tiles - 1 - turn) * ROWS;
    // The first head of the columns.
    const u32 own = KEYS ? p.kv_heads : p.heads,
              other = KEYS ? head / own * p.heads + head % own * group : head / own * p.kv_heads + head % own / group;
    const Layout &own_layout = KEYS ? p.keys : p.queries, &other_layout = KEYS ? p.queries : p.keys;
    const u64 own_at = head_at(own_layout, head, own),
              other_at = head_at(other_layout, other, KEYS ? p.heads : p.kv_heads);
    const u64 out_at = head_at(p.results, KEYS ? other : head, p.heads);
    const Raw *x = (KEYS ? p.k : p.q) + own_at, *y = KEYS ? p.v + own_at : p.dout + out_at;
    const Raw *z = (KEYS ? p.q : p.k) + other_at, *w = KEYS ? p.dout + out_at : p.v + other_at;
    const u32 x_tile = tiles_begin(), y_tile = x_tile + ROWS * DIM * 2, stages = y_tile + ROWS * DIM * 2;
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = first + 16 * warp + lane / 4;
    const u32 begin = (KEYS && p.causal ? first : window_begin(p, first)) / SOME;
    const u32 end = !KEYS && p.causal ? min(first + ROWS, p.positions) : window_end(p, first + ROWS);
    const u32 of_head = (end + SOME - 1) / SOME - begin, count = of_head * (KEYS ? group : 1);

    const auto load_columns = [&](u32 tile) {
        const u32 head_of_group = tile / of_head, at = (begin + tile % of_head) * SOME,
                  to = stages + tile % 2 * (2 * BYTES);
        load_tile<SOME, THREADS>(to, z + head_of_group * other_layout.head, at, p.positions, other_layout.row);
        load_tile<SOME, THREADS>(to + BYTES, w + head_of_group * (KEYS ? p.results.head : other_layout.head), at,
            p.positions, KEYS ? p.results.row : other_layout.row);
        if (KEYS && threadIdx.x < SOME) {
            const u32 query = at + threadIdx.x;
            const u64 index = (u64)(other + head_of_group) * p.positions + query;
            lses[tile % 2][threadIdx.x] = query < p.positions ? p.lse[index] * LOG2_E : 0.0f;
            deltas[tile % 2][threadIdx.x] = query < p.positions ? p.delta[index] : 0.0f;
        }
    };
    load_tile<ROWS, THREADS>(x_tile, x, first, p.positions, own_layout.row);
    load_tile<ROWS, THREADS>(y_tile, y, first, p.positions, KEYS ? own_layout.row : p.results.row);
    load_columns(0);
    commit_copies();
    float row_lse[2] = {}, row_delta[2] = {};
    if (!KEYS) {
        #pragma unroll
        for (u32 half = 0; half < 2; half++) {
            if (row + 8 * half < p.positions) {
                row_lse[half] = p.lse[(u64)head * p.positions + row + 8 * half] * LOG2_E;
                row_delta[half] = p.delta[(u64)head * p.positions + row + 8 * half];
            }
        }
    }
    // The gradients of x, and of y where rows are keys.
    float dx[DIM / 8][4] = {}, dy[KEYS ? DIM / 8 : 1][4] = {};
    const float factor = unit(p) * LOG2_E;
    for (u32 tile = 0; tile < count; tile++) {
        if (tile + 1 < count) {
            load_columns(tile + 1);
            commit_copies();
            await_copies<1>();
        } else {
            await_copies<0>();
        }
        show_tiles();
        __syncthreads();
        const u32 stage = stages + tile % 2 * (2 * BYTES);
        const u32 column = (begin + tile % of_head) * SOME + lane % 4 * 2;
        float scores[SOME / 8][4], gradients[SOME / 8][4];
        multiply_both<ROWS, SOME, AT_ONCE>(scores, gradients, x_tile, y_tile, stage, stage + BYTES);
        cap_scores(p, scores);
        // The part of the tile beyond the diagonal or the last position has no probabilities.
        const u32 tile_begin = (begin + tile % of_head) * SOME, least_query = KEYS ? tile_begin : first,
                  end_of_keys = KEYS ? first + ROWS : tile_begin + SOME;
        const bool whole = !OPTIONS && first + ROWS <= p.positions && tile_begin + SOME <= p.positions &&
                           (!p.causal || end_of_keys <= least_query + 1);
        if (!whole) {
            #pragma unroll
            for (u32 i = 0; i < SOME / 8; i++) {
                #pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32 mine = row + j / 2 * 8, across = column + 8 * i + j % 2;
                    const u32 key = KEYS ? mine : across, query = KEYS ? across : mine;
                    if (key >= p.positions || query >= p.positions || is_masked(p, query, key))
                        scores[i][j] = -INFINITE;
                }
            }
        }
        #pragma unroll
        for (u32 i = 0; i < SOME / 8; i++) {
            #pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 in_tile = 8 * i + lane % 4 * 2 + j % 2;
                const float lse = KEYS ? lses[tile % 2][in_tile] : row_lse[j / 2];
                const float delta = KEYS ? deltas[tile % 2][in_tile] : row_delta[j / 2];
                const float score = scores[i][j];
                scores[i][j] = power_of_two(score * factor - lse);
                gradients[i][j] = scores[i][j] * (gradients[i][j] - delta);
                if (OPTIONS && p.soft_cap > 0.0f) {
                    const float t = fmaxf(score, -p.soft_cap) / p.soft_cap;
                    gradients[i][j] *= 1.0f - t * t;
                }
            }
        }
        if constexpr (KEYS) multiply_weighted<SOME>(dy, scores, stage + BYTES);
        multiply_weighted<SOME>(dx, gradients, stage);
        __syncthreads();
    }
    store_rows((KEYS ? p.dk : p.dq) + own_at, own_layout.row, row, p.positions, dx, p.scale, p.scale);
    if constexpr (KEYS) store_rows(p.dv + own_at, own_layout.row, row, p.positions, dy, 1.0f, 1.0f);
}

extern "C" __global__ void __launch_bounds__(128, KEYS_CTAS) backward_keys(const __grid_constant__ Attention p) {
    backward<true>(p);
}
extern "C" __global__ void __launch_bounds__(128, QUERIES_CTAS) backward_queries(const __grid_constant__ Attention p) {
    backward<false>(p);
}
