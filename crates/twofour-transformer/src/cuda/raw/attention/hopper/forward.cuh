// The forward pass. Each warpgroup has 64 queries; all share the tiles of keys and values. The scores of a tile are
// issued before the weighted sum of the tile before, so that a softmax runs while the tensor cores multiply.

constexpr u32 FORWARD_ROWS = GROUP_ROWS * FORWARD_GROUPS;
constexpr u32 FORWARD_KEYS = 128;   // of a tile
constexpr u32 FEW_KEYS = 32;        // the last tile's product is over so many where it has no more
constexpr u32 FORWARD_STAGES = 3;   // of keys, and of values
constexpr u32 FORWARD_BYTES = FORWARD_KEYS * DIM * 2;

// Turns scores to weights relative to the largest score so far; `less` is what sums so far are to be multiplied by.
template <u32 N> __device__ __forceinline__ void soften(
    float (&scores)[N / 8][4], float (&largest)[2], float (&total)[2], float (&less)[2], float factor) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float most = largest[half];
        #pragma unroll
        for (u32 i = 0; i < N / 8; i++) most = fmaxf(most, fmaxf(scores[i][2 * half], scores[i][2 * half + 1]));
        most = largest_of_row(most);
        less[half] = power_of_two((largest[half] - most) * factor);
        const float shift = most * factor;
        largest[half] = most;
        float sum = 0.0f;
        #pragma unroll
        for (u32 i = 0; i < N / 8; i++) {
            #pragma unroll
            for (u32 j = 2 * half; j < 2 * half + 2; j++) {
                scores[i][j] = power_of_two(scores[i][j] * factor - shift);
                sum += scores[i][j];
            }
        }
        total[half] = total[half] * less[half] + sum;
    }
}

// Removes scores of keys beyond the last position or the diagonal. `key` and `row` are those of the thread's first
// score.
template <u32 N>
__device__ __forceinline__ void mask_keys(float (&scores)[N / 8][4], const Attention& p, u32 key, u32 row) {
#pragma unroll
    for (u32 i = 0; i < N / 8; i++) {
        #pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u32 its_key = key + 8 * i + j % 2, query = row + j / 2 * 8;
            if (its_key >= p.positions || (p.causal && its_key > query)) scores[i][j] = -INFINITE;
        }
    }
}

__device__ __forceinline__ void scale_rows(float (&sums)[DIM / 8][4], const float (&by)[2]) {
    #pragma unroll
    for (u32 i = 0; i < 4 * (DIM / 8); i++) sums[i / 4][i % 4] *= by[i % 4 / 2];
}

__device__ __forceinline__ void attend(const Attention& p) {
    __shared__ u64 q_full;
    __shared__ Stages<FORWARD_STAGES> k_stages, v_stages;
    const Turn turn = turn_of_cta(p, p.heads);
    // Under a causal mask, the last queries have the most work, and come first.
    const u32 first = (turn.tiles - 1 - turn.tile) * FORWARD_ROWS;
    const u32 kv_head = turn.head / (p.heads / p.kv_heads);
    const u32 group = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    // Warpgroups that have queries.
    const u32 groups = min(FORWARD_GROUPS, (p.positions - first + GROUP_ROWS - 1) / GROUP_ROWS);
    const u32 q_tile = tiles_begin(), k_tiles = q_tile + FORWARD_GROUPS * GROUP_BYTES,
              v_tiles = k_tiles + FORWARD_STAGES * FORWARD_BYTES;
    const u32 own_first = first + GROUP_ROWS * group, row = own_first + warp % 4 * 16 + lane / 4;
    // Keys and their tiles for the CTA, and for the warpgroup.
    const u32 end = p.causal ? min(first + GROUP_ROWS * groups, p.positions) : p.positions,
              count = (end + FORWARD_KEYS - 1) / FORWARD_KEYS;
    const u32 own_end = p.causal ? min(own_first + GROUP_ROWS, p.positions) : p.positions,
              own = (own_end + FORWARD_KEYS - 1) / FORWARD_KEYS;

    const auto load_keys = [&](u32 tile) {
        if (tile >= count) return;
        const u32 barrier = k_stages.begin(tile, FORWARD_BYTES);
        copy_positions<FORWARD_KEYS>(k_tiles + tile % FORWARD_STAGES * FORWARD_BYTES, &p.k, tile * FORWARD_KEYS,
            kv_head, turn.sequence, barrier);
    };
    const auto load_values = [&](u32 tile) {
        if (tile >= count) return;
        const u32 barrier = v_stages.begin(tile, FORWARD_BYTES);
        copy_positions<FORWARD_KEYS>(v_tiles + tile % FORWARD_STAGES * FORWARD_BYTES, &p.v, tile * FORWARD_KEYS,
            kv_head, turn.sequence, barrier);
    };
    // Before a tile: its values and the keys of the next. Their stages were released one iteration ago or earlier, so
    // that this warpgroup seldom waits for others.
    const auto load_ahead = [&](u32 tile) {
        if (warp == 0 && elected()) load_keys(tile + 1), load_values(tile);
        __syncwarp();
    };

    if (threadIdx.x == 0) {
        barrier_init(shared_address(&q_full), 1);
        k_stages.init(4 * groups);
        v_stages.init(4 * groups);
        barriers_are_ready();
    }
    __syncthreads();
    if (warp == 0 && elected()) {
        const u32 barrier = shared_address(&q_full);
        barrier_expect(barrier, groups * GROUP_BYTES);
        for (u32 i = 0; i < groups; i++)
            copy_positions<GROUP_ROWS>(
                q_tile + i * GROUP_BYTES, &p.q, first + i * GROUP_ROWS, turn.head, turn.sequence, barrier);
        load_keys(0), load_keys(1), load_values(0);
    }
    if (group >= groups) return;

    // Tiles before the last one, where that one has few keys.
    const bool few = own_end - (own - 1) * FORWARD_KEYS <= FEW_KEYS;
    const u32 whole = few ? own - 1 : own;
    const float factor = p.scale * LOG2_E;
    float sums[DIM / 8][4] = {}, largest[2] = {-INFINITE, -INFINITE}, total[2] = {}, less[2];
    Rows<false> q;
    q.load(q_tile + group * GROUP_BYTES);
    barrier_wait(shared_address(&q_full), 0);

    if (whole > 0) {
        float scores[FORWARD_KEYS / 8][4];
        u32 weights[FORWARD_KEYS / 16][4];
        const auto mask = [&](u32 tile) {
            if ((tile + 1) * FORWARD_KEYS > (p.causal ? own_first : p.positions))
                mask_keys<FORWARD_KEYS>(scores, p, tile * FORWARD_KEYS + lane % 4 * 2, row);
        };
        k_stages.wait(0);
        products_begin();
        issue_scores<FORWARD_KEYS, FORWARD_KEYS>(scores, q, k_tiles);
        products_wait<0>();
        fence_accumulators(scores);
        k_stages.release(0);
        mask(0);
        soften<FORWARD_KEYS>(scores, largest, total, less, factor);
        narrow_all<FORWARD_KEYS>(weights, scores);
        #pragma unroll 1
        for (u32 tile = 1; tile < whole; tile++) {
            const u32 before = tile - 1;
            load_ahead(tile);
            k_stages.wait(tile);
            v_stages.wait(before);
            fence_accumulators(sums);
            products_begin();
            issue_scores<FORWARD_KEYS, FORWARD_KEYS>(scores, q, k_tiles + tile % FORWARD_STAGES * FORWARD_BYTES);
            issue_weighted<FORWARD_KEYS, FORWARD_KEYS>(
                sums, weights, v_tiles + before % FORWARD_STAGES * FORWARD_BYTES);
            products_wait<1>();
            fence_accumulators(scores);
            k_stages.release(tile);
            mask(tile);
            soften<FORWARD_KEYS>(scores, largest, total, less, factor);
            products_wait<0>();
            fence_accumulators(sums);
            fence_operands(weights);
            v_stages.release(before);
            scale_rows(sums, less);
            narrow_all<FORWARD_KEYS>(weights, scores);
        }
        v_stages.wait(whole - 1);
        fence_accumulators(sums);
        products_begin();
        issue_weighted<FORWARD_KEYS, FORWARD_KEYS>(
            sums, weights, v_tiles + (whole - 1) % FORWARD_STAGES * FORWARD_BYTES);
        products_wait<0>();
        fence_accumulators(sums);
        fence_operands(weights);
        v_stages.release(whole - 1);
    }
    if (few) {
        float scores[FEW_KEYS / 8][4];
        u32 weights[FEW_KEYS / 16][4];
        if (whole > 0) load_ahead(whole);
        k_stages.wait(whole);
        products_begin();
        issue_scores<FEW_KEYS, FORWARD_KEYS>(scores, q, k_tiles + whole % FORWARD_STAGES * FORWARD_BYTES);
        products_wait<0>();
        fence_accumulators(scores);
        k_stages.release(whole);
        mask_keys<FEW_KEYS>(scores, p, whole * FORWARD_KEYS + lane % 4 * 2, row);
        soften<FEW_KEYS>(scores, largest, total, less, factor);
        scale_rows(sums, less);
        narrow_all<FEW_KEYS>(weights, scores);
        v_stages.wait(whole);
        fence_accumulators(sums);
        products_begin();
        issue_weighted<FEW_KEYS, FORWARD_KEYS>(sums, weights, v_tiles + whole % FORWARD_STAGES * FORWARD_BYTES);
        products_wait<0>();
        fence_accumulators(sums);
        fence_operands(weights);
        v_stages.release(whole);
    }
    // Tiles that only later warpgroups need.
    for (u32 tile = own; tile < count; tile++) {
        load_ahead(tile);
        k_stages.wait(tile);
        k_stages.release(tile);
        v_stages.wait(tile);
        v_stages.release(tile);
    }
    total[0] = sum_of_row(total[0]), total[1] = sum_of_row(total[1]);
    store_rows(p.to_out + head_at(p.results, turn.sequence, turn.head), p.results.row, row, p.positions, sums,
        1.0f / total[0], 1.0f / total[1]);
    if (lane % 4 == 0) {
        float* lse = p.to_lse + (u64)(turn.sequence * p.heads + turn.head) * p.positions;
        if (row < p.positions) lse[row] = largest[0] * p.scale + logf(total[0]);
        if (row + 8 < p.positions) lse[row + 8] = largest[1] * p.scale + logf(total[1]);
    }
}
