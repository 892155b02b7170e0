// What the kernels of attention share of the softmax and of storing results. In the accumulator layout of `mma` and
// `wgmma` four lanes share a row, and a lane has rows r and r + 8 of its warp's 16.

// Returns the sum, or the largest, of the four lanes that share a row.
__device__ __forceinline__ float sum_of_row(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}
__device__ __forceinline__ float largest_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

// Stores the warp's 16 rows, the first of which is of position `row` - lane / 4, each times a factor.
__device__ __forceinline__ void store_rows(
    Raw* to, u32 stride, u32 row, u32 positions, const float (&sums)[DIM / 8][4], float low, float high) {
#pragma unroll
    for (u32 i = 0; i < DIM / 8; i++) {
        const u32 col = 8 * i + threadIdx.x % 4 * 2;
        if (row < positions)
            *(u32*)(to + (u64)row * stride + col) = narrow_pair<ELEMENT>(sums[i][0] * low, sums[i][1] * low);
        if (row + 8 < positions)
            *(u32*)(to + (u64)(row + 8) * stride + col) = narrow_pair<ELEMENT>(sums[i][2] * high, sums[i][3] * high);
    }
}
