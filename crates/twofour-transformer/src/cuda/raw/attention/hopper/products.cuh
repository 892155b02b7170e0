// Products of a warpgroup's 64 rows. They run while the warpgroup goes on: each function issues one group of `wgmma`,
// and groups complete in order.

// A tile of 64 rows, in registers or in shared memory.
template <bool IN_REGISTERS> struct Rows;

template <> struct Rows<true> {
    u32 at[STEPS][4];
    __device__ __forceinline__ void load(u32 tile) {
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + (lane / 8 & 1) * 8 + lane % 8;
        #pragma unroll
        for (u32 step = 0; step < STEPS; step++)
            load_matrices(at[step], tile + place<GROUP_ROWS>(row, 2 * step + lane / 16));
    }
    // Called after the wait for products of these rows: see `fence_operands`.
    __device__ __forceinline__ void fence_operands() const {
        #pragma unroll
        for (u32 step = 0; step < STEPS; step++) ::fence_operands(at[step]);
    }
};

template <> struct Rows<false> {
    u64 at;
    __device__ __forceinline__ void load(u32 tile) { at = operand<ROW_BYTES>(uniform(tile)); }
    __device__ __forceinline__ void fence_operands() const {}
};

// Returns where a step over DIM is in a tile of COUNT rows.
template <u32 COUNT> __device__ __forceinline__ u32 step_at(u32 step) {
    return 32 * step / ROW_BYTES * COUNT * ROW_BYTES + 32 * step % ROW_BYTES;
}

// Issues scores = rows · columnsᵀ for the first N columns of a tile of COUNT.
template <u32 N, u32 COUNT>
__device__ __forceinline__ void issue_scores(float (&scores)[N / 8][4], const Rows<true>& rows, u32 tile) {
    const u64 b = operand<ROW_BYTES>(tile);
    #pragma unroll
    for (u32 step = 0; step < STEPS; step++)
        product(scores, rows.at[step], operand_after(b, step_at<COUNT>(step)), step > 0);
    products_commit();
}
template <u32 N, u32 COUNT>
__device__ __forceinline__ void issue_scores(float (&scores)[N / 8][4], const Rows<false>& rows, u32 tile) {
    const u64 b = operand<ROW_BYTES>(tile);
    #pragma unroll
    for (u32 step = 0; step < STEPS; step++)
        product(scores, operand_after(rows.at, step_at<GROUP_ROWS>(step)), operand_after(b, step_at<COUNT>(step)),
            step > 0);
    products_commit();
}

// Issues sums += weights · tile, for rounded weights of the first N rows of a tile of COUNT. Registers of weights are
// free once the product is complete.
template <u32 N, u32 COUNT, u32 STEPS_OF_WEIGHTS> __device__ __forceinline__ void issue_weighted(
    float (&sums)[DIM / 8][4], const u32 (&weights)[STEPS_OF_WEIGHTS][4], u32 tile) {
    const u64 b = DIM < 64 ? operand_mn_major_narrow(tile) : operand_mn_major(tile, COUNT * ROW_BYTES);
    #pragma unroll
    for (u32 step = 0; step < N / 16; step++) product(sums, weights[step], operand_after(b, step * 16 * ROW_BYTES));
    products_commit();
}

template <u32 COUNT> __device__ __forceinline__ void fence_accumulators(float (&sums)[COUNT][4]) {
    #pragma unroll
    for (u32 i = 0; i < 4 * COUNT; i++) fence_accumulator(sums[i / 4][i % 4]);
}
template <u32 COUNT> __device__ __forceinline__ void fence_operands(const u32 (&weights)[COUNT][4]) {
    #pragma unroll
    for (u32 step = 0; step < COUNT; step++) fence_operands(weights[step]);
}

// Rounds the weights of N columns.
template <u32 N, u32 COUNT>
__device__ __forceinline__ void narrow_all(u32 (&to)[COUNT][4], const float (&weights)[N / 8][4]) {
#pragma unroll
    for (u32 step = 0; step < N / 16; step++) narrow_step<N>(to[step], weights, step);
}
