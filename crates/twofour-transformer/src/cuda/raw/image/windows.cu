// Attention over the tokens of images, whole or cut into square windows: tokens of a fused projection to heads, and
// back.
//
// Heads are as wide as the kernels of attention need them, `dim` elements. Terms for the distance of query and key
// (rows and columns apart) are part of the product of queries and keys: behind its own elements a query has its term
// for each row and for each column, and a key is 1 at its own row and column and 0 elsewhere. A window's positions
// beyond the image are those of a token of zeros: their projection is the bias.
//
// Defined outside: ELEMENT.

struct Windows {
    const void* fused;    // [images * tokens, 3 heads own]
    const void* bias;     // [3 heads own], or null for zeros
    const float* rows;    // [2 span_rows - 1, own], or null for no terms
    const float* columns; // [2 span_columns - 1, own]
    void* q;              // [sequences, heads, positions, dim]
    void* k;
    void* v;
    const void* out;      // [sequences, heads, positions, dim]
    void* merged;         // [images * tokens, heads own]
    u32 tokens;           // of an image
    u32 grid_rows, grid_columns;
    u32 side;             // of a window, or 0: a sequence is a whole image
    u32 windows;          // of an image: 1 where a sequence is a whole image
    u32 positions;        // of a sequence
    u32 span_rows, span_columns; // of a sequence's grid; 0 without terms
    u32 heads, own, dim;
    float query_factor, term_factor;
};

// Returns the token at a position of a sequence, or ~0 beyond the image.
__device__ __forceinline__ u32 token_at(const Windows& p, u32 sequence, u32 position) {
    const u32 image = sequence / p.windows;
    if (p.side == 0) return image * p.tokens + position;
    const u32 window = sequence - image * p.windows, across = (p.grid_columns + p.side - 1) / p.side;
    const u32 row = window / across * p.side + position / p.side, column = window % across * p.side + position % p.side;
    return row < p.grid_rows && column < p.grid_columns ? image * p.tokens + row * p.grid_columns + column : ~0u;
}

// Returns where the projection of a token is, or of a token of zeros; null for zeros.
__device__ __forceinline__ const Raw* projection(const Windows& p, u32 token) {
    return token == ~0u ? (const Raw*)p.bias : (const Raw*)p.fused + (u64)token * 3 * p.heads * p.own;
}

// A CTA moves one position of one sequence: N elements of a head for each thread at a time. The terms of queries are
// left 0.
template <int N> __device__ __forceinline__ void split(const Windows& p) {
    const u32 sequence = blockIdx.x / p.positions, position = blockIdx.x - sequence * p.positions;
    const Raw* const from = projection(p, token_at(p, sequence, position));
    const u32 runs = p.dim / N, row = p.span_columns ? position / p.span_columns : 0,
              column = p.span_columns ? position % p.span_columns : 0;
    for (u32 index = threadIdx.x; index < 3 * p.heads * runs; index += blockDim.x) {
        const u32 head_of_all = index / runs, i = (index - head_of_all * runs) * N;
        const u32 part = head_of_all / p.heads, head = head_of_all - part * p.heads;
        float x[N];
        if (i < p.own && from) {
            load<N>(from + (u64)head_of_all * p.own + i, x);
            const float factor = part == 0 ? p.query_factor : 1.0f;
            unrolled<N>([&](auto j) { x[j.value] *= factor; });
        } else {
            unrolled<N>([&](auto j) {
                const u32 at = i + j.value - p.own;
                const bool is_one = part == 1 && i >= p.own && p.span_columns &&
                                    (at < p.span_rows ? at == row : at - p.span_rows == column);
                x[j.value] = is_one ? 1.0f : 0.0f;
            });
        }
        void* const to = part == 0 ? p.q : part == 1 ? p.k : p.v;
        store<N>((Raw*)to + (((u64)sequence * p.heads + head) * p.positions + position) * p.dim + i, x);
    }
}

// Queries that a thread multiplies with one vector at a time.
constexpr u32 QUERIES = 16;
// Most elements of a head.
constexpr u32 MAX_OWN = 256;

// A CTA computes the terms of the queries of one row (lines 0 to span_rows - 1) or one column of one sequence's head. A
// thread has a key's row or column, whose vector is the same for all of these queries.
extern "C" __global__ void __launch_bounds__(128) terms(const __grid_constant__ Windows p) {
    __shared__ __align__(16) float queries[QUERIES][MAX_OWN];
    const u32 lines = p.span_rows + p.span_columns, line = blockIdx.x % lines, head_of_all = blockIdx.x / lines;
    const u32 sequence = head_of_all / p.heads, head = head_of_all - sequence * p.heads;
    const bool is_row = line < p.span_rows;
    // The line's number, the keys' rows or columns, and the queries of the line.
    const u32 at = is_row ? line : line - p.span_rows, span = is_row ? p.span_rows : p.span_columns,
              count = is_row ? p.span_columns : p.span_rows;
    const float* const table = is_row ? p.rows : p.columns;
    const u32 padded = (p.own + 3) / 4 * 4;
    for (u32 first = 0; first < count; first += QUERIES) {
        __syncthreads();
        for (u32 index = threadIdx.x; index < QUERIES * padded; index += blockDim.x) {
            const u32 query = index / padded, i = index - query * padded, other = first + query;
            float value = 0.0f;
            if (i < p.own && other < count) {
                const Raw* const from = projection(
                    p, token_at(p, sequence, is_row ? at * p.span_columns + other : other * p.span_columns + at));
                if (from) value = widen<ELEMENT>(from[(u64)head * p.own + i]);
            }
            queries[query][i] = value;
        }
        __syncthreads();
        for (u32 key = threadIdx.x; key < span; key += blockDim.x) {
            const float* const vector = table + (u64)(at + span - 1 - key) * p.own;
            float sums[QUERIES] = {};
            for (u32 i = 0; i < padded; i += 4) {
                float of_key[4];
                unrolled<4>([&](auto j) { of_key[j.value] = i + j.value < p.own ? vector[i + j.value] : 0.0f; });
                unrolled<QUERIES>([&](auto query) {
                    const float4 q = *(const float4*)&queries[query.value][i];
                    sums[query.value] += q.x * of_key[0] + q.y * of_key[1] + q.z * of_key[2] + q.w * of_key[3];
                });
            }
            unrolled<QUERIES>([&](auto query) {
                const u32 other = first + query.value;
                if (other >= count) return;
                const u32 position = is_row ? at * p.span_columns + other : other * p.span_columns + at;
                const u64 to = (((u64)sequence * p.heads + head) * p.positions + position) * p.dim + p.own +
                               (is_row ? 0 : p.span_rows) + key;
                ((Raw*)p.q)[to] = narrow<ELEMENT>(sums[query.value] * p.term_factor);
            });
        }
    }
}

// A CTA moves the heads of one position of one sequence, unless it lies beyond the image.
template <int N> __device__ __forceinline__ void merge(const Windows& p) {
    const u32 sequence = blockIdx.x / p.positions, position = blockIdx.x - sequence * p.positions;
    const u32 token = token_at(p, sequence, position);
    if (token == ~0u) return;
    const u32 runs = p.own / N;
    for (u32 index = threadIdx.x; index < p.heads * runs; index += blockDim.x) {
        const u32 head = index / runs, i = (index - head * runs) * N;
        float x[N];
        load<N>((const Raw*)p.out + (((u64)sequence * p.heads + head) * p.positions + position) * p.dim + i, x);
        store<N>((Raw*)p.merged + ((u64)token * p.heads + head) * p.own + i, x);
    }
}

#define MOVES(name)                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) name##_vectors(const __grid_constant__ Windows p) {    \
        name<WIDTH>(p);                                                                                      \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256) name##_one_by_one(const __grid_constant__ Windows p) { \
        name<1>(p);                                                                                          \
    }
MOVES(split)
MOVES(merge)
