// The backward pass: `backward_queries` computes the gradients of queries, and what `backward_keys` reads beside its
// operands; that one computes the gradients of keys and values. Each warpgroup has 64 rows, whose gradients stay in
// registers; all share the tiles of columns. Scores are computed in both, so that no sum depends on the order in which
// CTAs finish.

constexpr u32 BACKWARD_STAGES = 4;
constexpr u32 BACKWARD_AHEAD = 2;            // tiles that are copied ahead
constexpr u32 COLUMNS = 64;                  // of a tile
constexpr u32 FEW_COLUMNS = 16;              // the last tile's products are over so many where it has no more
constexpr u32 COLUMNS_BYTES = COLUMNS * DIM * 2;
constexpr u32 SUMS_BYTES = 1024;             // of a stage for log-sum-exps and deltas; half of it is alignment
constexpr bool ROWS_IN_REGISTERS = DIM <= 64; // as operands of products

__device__ __forceinline__ void read_two(float (&to)[2], u32 address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(to[0]), "=f"(to[1]) : "r"(address) : "memory");
}

// Adds the products of the thread's elements of out and dout to the sums of its two rows: elements of the fragments of
// a step are two of each row, and two 8 columns on.
__device__ __forceinline__ void add_products(
    float (&sums)[2], const u32 (&dout)[4], const Raw* out, u64 stride, const bool (&is_there)[2]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 half = i % 2;
        const u32 there = is_there[half] ? *(const u32*)(out + half * 8 * stride + i / 2 * 8) : 0;
        sums[half] += widen<ELEMENT>((Raw)there) * widen<ELEMENT>((Raw)dout[i]) +
                      widen<ELEMENT>((Raw)(there >> 16)) * widen<ELEMENT>((Raw)(dout[i] >> 16));
    }
}

// What a warpgroup computes. Where rows are keys, scores are transposed: rows · columnsᵀ = k qᵀ and v doutᵀ; otherwise
// q kᵀ and dout vᵀ.
template <bool KEYS> struct Gradients {
    Rows<ROWS_IN_REGISTERS> x, y;
    // The gradients of x, and of y where rows are keys; rounded weights of both, the products' operands.
    float dx[DIM / 8][4], dy[KEYS ? DIM / 8 : 1][4];
    u32 x_weights[COLUMNS / 16][4], y_weights[KEYS ? COLUMNS / 16 : 1][4];
    float row_lse[2], row_delta[2]; // where rows are queries
    u32 own_first, row;             // of the warpgroup, and of the thread
    u32 x_tile, y_tile;             // where the rows are in shared memory

    __device__ __forceinline__ void load_rows() { x.load(x_tile), y.load(y_tile); }

    // Adds the products over the first N columns of a tile from position `first` on, in `stage`. `release_before`
    // releases the stage of the tile before.
    template <u32 N, class F>
    __device__ __forceinline__ void add(const Attention& p, u32 stage, u32 first, const F& release_before) {
        const u32 lane = threadIdx.x % 32;
        float scores[N / 8][4], gradients[N / 8][4];
        // Keys stay in registers, which saves reads of shared memory. Queries do not: ptxas before 13.1 gives their
        // registers to weights in this loop.
        if constexpr (!KEYS) load_rows();
        products_begin();
        issue_scores<N, COLUMNS>(scores, x, stage);
        issue_scores<N, COLUMNS>(gradients, y, stage + COLUMNS_BYTES);
        products_wait<1>();
        fence_accumulators(scores);
        // Rows are last used by these products where they are loaded for each tile, and in the last call.
        x.fence_operands();
        fence_operands(x_weights), fence_operands(y_weights);
        release_before();
        // Queries beyond the last have an infinite log-sum-exp, and gradients of keys beyond the last are not stored.
        const u32 least_query = KEYS ? first : own_first, end_of_keys = KEYS ? own_first + GROUP_ROWS : first + N;
        if ((!KEYS && end_of_keys > p.positions) || (p.causal && end_of_keys > least_query + 1)) {
            #pragma unroll
            for (u32 i = 0; i < N / 8; i++) {
                #pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32 mine = row + j / 2 * 8, across = first + 8 * i + lane % 4 * 2 + j % 2;
                    const u32 key = KEYS ? mine : across, query = KEYS ? across : mine;
                    if (key >= p.positions || (p.causal && key > query)) scores[i][j] = -INFINITE;
                }
            }
        }
        const float factor = p.scale * LOG2_E;
        const u32 lses = stage + 2 * COLUMNS_BYTES + lane % 4 * 8, deltas = lses + 4 * COLUMNS;
        #pragma unroll
        for (u32 i = 0; i < N / 8; i++) {
            float lse[2];
            if (KEYS) read_two(lse, lses + 32 * i);
            #pragma unroll
            for (u32 j = 0; j < 4; j++)
                scores[i][j] = power_of_two(scores[i][j] * factor - (KEYS ? lse[j % 2] : row_lse[j / 2]));
        }
        if constexpr (KEYS) {
            narrow_all<N>(y_weights, scores);
            products_begin();
            issue_weighted<N, COLUMNS>(dy, y_weights, stage + COLUMNS_BYTES);
            products_wait<1>();
        } else {
            products_wait<0>();
        }
        fence_accumulators(gradients);
        y.fence_operands();
        #pragma unroll
        for (u32 i = 0; i < N / 8; i++) {
            float delta[2];
            if (KEYS) read_two(delta, deltas + 32 * i);
            #pragma unroll
            for (u32 j = 0; j < 4; j++)
                gradients[i][j] = scores[i][j] * (gradients[i][j] - (KEYS ? delta[j % 2] : row_delta[j / 2]));
        }
        narrow_all<N>(x_weights, gradients);
        products_begin();
        issue_weighted<N, COLUMNS>(dx, x_weights, stage);
        // Not left to the next tile: the compiler may copy weights for the next iteration, and reuse registers that
        // `wgmma` still reads.
        finish();
    }

    __device__ __forceinline__ void finish() {
        products_wait<0>();
        fence_accumulators(dx), fence_accumulators(dy);
        fence_operands(x_weights), fence_operands(y_weights);
    }

    // Zeros sums. They are in their registers before the first product: otherwise the compiler serializes all of them
    // (C7515).
    __device__ __forceinline__ void clear() {
        #pragma unroll
        for (u32 i = 0; i < 4 * (DIM / 8); i++) dx[i / 4][i % 4] = 0.0f;
        #pragma unroll
        for (u32 i = 0; i < 4 * (KEYS ? DIM / 8 : 1); i++) dy[i / 4][i % 4] = 0.0f;
        #pragma unroll
        for (u32 i = 0; i < 4 * (COLUMNS / 16); i++) x_weights[i / 4][i % 4] = 0;
        #pragma unroll
        for (u32 i = 0; i < 4 * (KEYS ? COLUMNS / 16 : 1); i++) y_weights[i / 4][i % 4] = 0;
        fence_accumulators(dx), fence_accumulators(dy);
    }
};

template <bool KEYS, u32 GROUPS> __device__ __forceinline__ void backward(const Attention& p) {
    constexpr u32 ROWS = GROUPS * GROUP_ROWS, STAGE_BYTES = 2 * COLUMNS_BYTES + (KEYS ? SUMS_BYTES : 0);
    __shared__ u64 rows_full;
    __shared__ Stages<BACKWARD_STAGES, KEYS ? 32 : 1> stages;
    const u32 share = p.heads / p.kv_heads;
    const Turn turn = turn_of_cta(p, KEYS ? p.kv_heads : p.heads);
    // Under a causal mask, the first keys and the last queries have the most work, and come first.
    const u32 first = (KEYS ? turn.tile : turn.tiles - 1 - turn.tile) * ROWS;
    // The first head of the columns.
    const u32 other = KEYS ? turn.head * share : turn.head / share;
    const u32 group = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const u32 groups = min(GROUPS, (p.positions - first + GROUP_ROWS - 1) / GROUP_ROWS);
    const u32 x_tile = tiles_begin(), y_tile = x_tile + GROUPS * GROUP_BYTES, tiles = y_tile + GROUPS * GROUP_BYTES;
    const u32 own_first = first + GROUP_ROWS * group, row = own_first + warp % 4 * 16 + lane / 4;
    // Tiles of columns of a head, from `begin` on, and of all heads that share the rows' head.
    const u32 begin = KEYS && p.causal ? first / COLUMNS : 0;
    const u32 end = !KEYS && p.causal ? min(first + GROUP_ROWS * groups, p.positions) : p.positions;
    const u32 of_head = (end + COLUMNS - 1) / COLUMNS - begin, count = of_head * (KEYS ? share : 1);

    const auto load_columns = [&](u32 tile) {
        if (tile >= count) return;
        const u32 head = other + tile / of_head, at = (begin + tile % of_head) * COLUMNS,
                  to = tiles + tile % BACKWARD_STAGES * STAGE_BYTES;
        const u32 barrier = stages.begin(tile, 2 * COLUMNS_BYTES + (KEYS ? 8 * COLUMNS : 0));
        copy_positions<COLUMNS>(to, KEYS ? &p.q : &p.k, at, head, turn.sequence, barrier);
        copy_positions<COLUMNS>(to + COLUMNS_BYTES, KEYS ? &p.dout : &p.v, at, head, turn.sequence, barrier);
        if (KEYS) {
            const u64 index = (u64)(turn.sequence * p.heads + head) * p.padded + at;
            copy_bytes(to + 2 * COLUMNS_BYTES, p.padded_lse + index, 4 * COLUMNS, barrier);
            copy_bytes(to + 2 * COLUMNS_BYTES + 4 * COLUMNS, p.padded_delta + index, 4 * COLUMNS, barrier);
        }
    };
    if (threadIdx.x == 0) {
        barrier_init(shared_address(&rows_full), 1);
        stages.init(4 * groups);
        barriers_are_ready();
    }
    __syncthreads();
    if (warp == 0 && elected()) {
        const u32 barrier = shared_address(&rows_full);
        barrier_expect(barrier, 2 * groups * GROUP_BYTES);
        for (u32 i = 0; i < groups; i++) {
            const u32 at = first + i * GROUP_ROWS, to = i * GROUP_BYTES;
            copy_positions<GROUP_ROWS>(x_tile + to, KEYS ? &p.k : &p.q, at, turn.head, turn.sequence, barrier);
            copy_positions<GROUP_ROWS>(y_tile + to, KEYS ? &p.v : &p.dout, at, turn.head, turn.sequence, barrier);
        }
        for (u32 tile = 0; tile < BACKWARD_AHEAD; tile++) load_columns(tile);
    }
    if (group >= groups) return;
    barrier_wait(shared_address(&rows_full), 0);
    Gradients<KEYS> own;
    own.own_first = own_first, own.row = row;
    own.x_tile = x_tile + group * GROUP_BYTES, own.y_tile = y_tile + group * GROUP_BYTES;
    if constexpr (KEYS) {
        own.load_rows();
    } else {
        const bool is_there[2] = {row < p.positions, row + 8 < p.positions};
        const u64 index = (u64)(turn.sequence * p.heads + turn.head) * p.positions + row, stride = p.results.row;
        const Raw* out = p.out + head_at(p.results, turn.sequence, turn.head) + row * stride + lane % 4 * 2;
        float sums[2] = {};
        Rows<true> dout;
        dout.load(own.y_tile);
        #pragma unroll
        for (u32 step = 0; step < STEPS; step++) add_products(sums, dout.at[step], out + 16 * step, stride, is_there);
        #pragma unroll
        for (u32 half = 0; half < 2; half++) {
            own.row_lse[half] = is_there[half] ? p.lse[index + 8 * half] * LOG2_E : INFINITE;
            own.row_delta[half] = sum_of_row(sums[half]);
            // Every row of a warpgroup's 64 has a place.
            const u64 padded = (u64)(turn.sequence * p.heads + turn.head) * p.padded + row + 8 * half;
            if (lane % 4 == 0) p.padded_lse[padded] = own.row_lse[half], p.padded_delta[padded] = own.row_delta[half];
        }
    }

    own.clear();
    const auto next = [&](u32 tile) {
        if (warp == 0 && elected()) load_columns(tile + BACKWARD_AHEAD);
        __syncwarp();
        stages.wait(tile);
        return tiles + tile % BACKWARD_STAGES * STAGE_BYTES;
    };
    // Tiles before the last one, where that one has few columns. With several heads of queries, each has such a tile,
    // and all are whole. So they are where rows are queries: three warpgroups have no registers for another product.
    const bool few = KEYS && share == 1 && end - (begin + count - 1) * COLUMNS <= FEW_COLUMNS;
    const u32 whole = few ? count - 1 : count;
    #pragma unroll 1
    for (u32 tile = 0; tile < whole; tile++) {
        const u32 at = (begin + (KEYS ? tile % of_head : tile)) * COLUMNS;
        own.template add<COLUMNS>(p, next(tile), at, [&] {
            if (tile > 0) stages.release(tile - 1);
        });
    }
    if constexpr (KEYS) {
        if (few) own.template add<FEW_COLUMNS>(p, next(whole), (begin + whole) * COLUMNS, [] {});
    }
    own.finish();

    const Layout& layout = KEYS ? p.keys : p.queries;
    const u64 at = head_at(layout, turn.sequence, turn.head);
    store_rows((KEYS ? p.dk : p.dq) + at, layout.row, row, p.positions, own.dx, p.scale, p.scale);
    if constexpr (KEYS) store_rows(p.dv + at, layout.row, row, p.positions, own.dy, 1.0f, 1.0f);
}
