// Products of attention by `wgmma`, on sm_90a. A warpgroup multiplies 64 rows; a warp has the same 16 rows, in the same
// registers, as with `mma.sync`. Tiles are swizzled as `place` has them, which is what descriptors describe: K-major
// where the product is over DIM, MN-major where it is over a tile's rows.

// The rows of a tile, which stay in shared memory.
template <u32 ROWS> struct HeldRows {
    u32 tile;
    __device__ __forceinline__ void load(u32 at) { tile = at; }
};

constexpr u32 ROW_BYTES = DIM < 64 ? 64 : 128;

// Returns where a step over DIM is in a tile of COUNT rows.
template <u32 COUNT> __device__ __forceinline__ u32 step_at(u32 step) {
    return 32 * step / ROW_BYTES * COUNT * ROW_BYTES + 32 * step % ROW_BYTES;
}

// Issues scores = rows · columnsᵀ for the N columns of a tile. The tile of rows has ROWS of them.
template <u32 ROWS, u32 N> __device__ __forceinline__ void issue_rows(float (&scores)[N / 8][4], u32 rows, u32 tile) {
    const u64 a = operand<ROW_BYTES>(uniform(rows + threadIdx.x / 128 * 64 * ROW_BYTES)),
              b = operand<ROW_BYTES>(uniform(tile));
#pragma unroll
    for (u32 step = 0; step < STEPS; step++)
        product(scores, operand_after(a, step_at<ROWS>(step)), operand_after(b, step_at<N>(step)), step > 0);
}

template <u32 COUNT> __device__ __forceinline__ void fence_accumulators(float (&sums)[COUNT][4]) {
    #pragma unroll
    for (u32 i = 0; i < 4 * COUNT; i++) fence_accumulator(sums[i / 4][i % 4]);
}

template <u32 ROWS, u32 N>
__device__ __forceinline__ void multiply_rows(float (&scores)[N / 8][4], const HeldRows<ROWS>& rows, u32 tile) {
    products_begin();
    issue_rows<ROWS, N>(scores, rows.tile, tile);
    products_commit();
    products_wait<0>();
    fence_accumulators(scores);
}

// Two such products.
template <u32 ROWS, u32 N, u32 AT_ONCE> __device__ __forceinline__ void multiply_both(float (&first)[N / 8][4],
    float (&second)[N / 8][4], u32 first_rows, u32 second_rows, u32 first_tile, u32 second_tile) {
    products_begin();
    issue_rows<ROWS, N>(first, first_rows, first_tile);
    issue_rows<ROWS, N>(second, second_rows, second_tile);
    products_commit();
    products_wait<0>();
    fence_accumulators(first);
    fence_accumulators(second);
}

// sums += weights · tile, for weights of N columns that are rounded, and a tile of N rows.
template <u32 N> __device__ __forceinline__ void multiply_weighted(
    float (&sums)[DIM / 8][4], const float (&weights)[N / 8][4], u32 tile) {
    u32 a[N / 16][4];
    #pragma unroll
    for (u32 step = 0; step < N / 16; step++) narrow_step<N>(a[step], weights, step);
    const u64 b = DIM < 64 ? operand_mn_major_narrow(uniform(tile)) : operand_mn_major(uniform(tile), N * ROW_BYTES);
    fence_accumulators(sums);
    products_begin();
    #pragma unroll
    for (u32 step = 0; step < N / 16; step++) product(sums, a[step], operand_after(b, step * 16 * ROW_BYTES));
    products_commit();
    products_wait<0>();
    fence_accumulators(sums);
    #pragma unroll
    for (u32 step = 0; step < N / 16; step++) fence_operands(a[step]);
}

// Makes this thread's copies visible to `wgmma`.
__device__ __forceinline__ void show_tiles() { show_to_copies(); }
