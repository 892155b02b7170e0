// Rows of a table by ids, and the table's gradient. Tokens are sorted by id: a counting sort with integer atomics puts
// them into buckets in any order, and then each token's rank in its bucket is counted, so that sums have a fixed order
// and repeat bit for bit.
//
// Defined outside: ELEMENT.

struct Embedding {
    const u32* ids;        // [tokens]
    const void* table;     // [vocabulary, width]
    const void* positions; // [count of positions, width], or null
    void* out;             // [tokens, width]
    const void* dy;        // [tokens, width]
    float* gradient;       // [vocabulary, width]
    u32* counts;           // [vocabulary]: tokens of an id
    u32* starts;           // [vocabulary]: where an id's tokens begin
    u32* filled;           // [vocabulary]: tokens that have been put there
    u32* cursor;           // where the next bucket begins
    u32* unordered;        // [tokens]
    u32* ordered;          // [tokens]
    u32* status;           // the largest token with an id beyond the table, plus 1
    u32 tokens, width, vocabulary, position_count;
    u32 adds;
};

// A CTA copies a token's row.
extern "C" __global__ void __launch_bounds__(1024, 1) gather(const __grid_constant__ Embedding p) {
    const u32 token = blockIdx.x, id = p.ids[token];
    const bool valid = id < p.vocabulary;
    if (!valid && threadIdx.x == 0) atomicMax(p.status, token + 1);
    const Raw* row = (const Raw*)p.table + (u64)(valid ? id : 0) * p.width;
    const Raw* position = p.positions ? (const Raw*)p.positions + (u64)(token % p.position_count) * p.width : row;
    Raw* out = (Raw*)p.out + (u64)token * p.width;
    across((u64)out, alike(row, out) && alike(position, out), p.width, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float x[N] = {}, more[N];
        if (valid) load<N>(row + at, x);
        if (p.positions) {
            load<N>(position + at, more);
            unrolled<N>([&](auto i) { x[i.value] += more[i.value]; });
        }
        store<N>(out + at, x);
    });
}

// Ids beyond the table have no bucket.
extern "C" __global__ void __launch_bounds__(256) count(const __grid_constant__ Embedding p) {
    const u32 token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= p.tokens) return;
    const u32 id = p.ids[token];
    if (id < p.vocabulary) atomicAdd(p.counts + id, 1u);
    else atomicMax(p.status, token + 1);
}

// Buckets lie in any order.
extern "C" __global__ void __launch_bounds__(256) allocate(const __grid_constant__ Embedding p) {
    const u32 id = blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= p.vocabulary) return;
    const u32 count = p.counts[id];
    if (count > 0) p.starts[id] = atomicAdd(p.cursor, count);
}

extern "C" __global__ void __launch_bounds__(256) fill_buckets(const __grid_constant__ Embedding p) {
    const u32 token = blockIdx.x * blockDim.x + threadIdx.x;
    if (token >= p.tokens) return;
    const u32 id = p.ids[token];
    if (id < p.vocabulary) p.unordered[p.starts[id] + atomicAdd(p.filled + id, 1u)] = token;
}

// A thread moves one token of a bucket to its rank: the number of smaller tokens there.
extern "C" __global__ void __launch_bounds__(256) order(const __grid_constant__ Embedding p) {
    const u32 at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= *p.cursor) return;
    const u32 token = p.unordered[at], id = p.ids[token], start = p.starts[id], count = p.counts[id];
    u32 rank = 0;
    #pragma unroll 8
    for (u32 i = 0; i < count; i++) rank += p.unordered[start + i] < token;
    p.ordered[start + rank] = token;
}

// A CTA of eight warps sums 32 * WIDTH columns of an id's tokens: each warp every eighth token, a lane WIDTH
// neighbouring columns.
extern "C" __global__ void __launch_bounds__(256) sum_buckets(const __grid_constant__ Embedding p) {
    __shared__ float sums[8][32 * WIDTH];
    const u32 id = blockIdx.x, count = p.counts[id], lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (count == 0 && p.adds) return;
    const u32* tokens = p.ordered + (count > 0 ? p.starts[id] : 0);
    const u32 first = 32 * WIDTH * blockIdx.y, col = first + WIDTH * lane;
    const bool vectors = p.width % WIDTH == 0 && (u64)p.dy % sizeof(Vector) == 0;
    float sum[WIDTH] = {};
    #pragma unroll 4
    for (u32 i = warp; i < count; i += 8) {
        const Raw* from = (const Raw*)p.dy + (u64)tokens[i] * p.width + col;
        if (vectors && col < p.width) {
            const Vector vector = *(const Vector*)from;
            unrolled<WIDTH>([&](auto k) { sum[k.value] += widen<ELEMENT>(vector.of[k.value]); });
        } else {
            unrolled<WIDTH>([&](auto k) {
                if (col + k.value < p.width) sum[k.value] += widen<ELEMENT>(from[k.value]);
            });
        }
    }
    unrolled<WIDTH>([&](auto k) { sums[warp][WIDTH * lane + k.value] = sum[k.value]; });
    __syncthreads();
    for (u32 c = threadIdx.x; c < 32 * WIDTH && first + c < p.width; c += 256) {
        float total = sums[0][c];
        for (u32 w = 1; w < 8; w++) total += sums[w][c];
        float* to = p.gradient + (u64)id * p.width + first + c;
        *to = p.adds ? *to + total : total;
    }
}
