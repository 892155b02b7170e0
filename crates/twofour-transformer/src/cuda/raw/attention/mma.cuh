// Products of attention by `mma.sync`, from sm_80 on. A warp multiplies its 16 rows of a tile; fragments come from
// shared memory by `ldmatrix`.

// The warp's 16 rows of a tile, in registers.
template <u32 ROWS> struct HeldRows {
    u32 at[STEPS][4];
    // The tile has been copied.
    __device__ __forceinline__ void load(u32 tile) {
        #pragma unroll
        for (u32 step = 0; step < STEPS; step++) load_step(at[step], tile, step);
    }
    static __device__ __forceinline__ void load_step(u32 (&to)[4], u32 tile, u32 step) {
        const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + (lane / 8 & 1) * 8 + lane % 8;
        load_matrices(to, tile + place<ROWS>(row, 2 * step + lane / 16));
    }
};

// sums += rows · columnsᵀ, for a step of the product over DIM and N columns.
template <u32 N>
__device__ __forceinline__ void multiply_step(float (&sums)[N / 8][4], const u32 (&rows)[4], u32 tile, u32 step) {
    const u32 lane = threadIdx.x % 32;
    #pragma unroll
    for (u32 pair = 0; pair < N / 16; pair++) {
        u32 b[4];
        load_matrices(b, tile + place<N>(16 * pair + lane / 16 * 8 + lane % 8, 2 * step + (lane / 8 & 1)));
        multiply<ELEMENT>(sums[2 * pair], rows, b[0], b[1]);
        multiply<ELEMENT>(sums[2 * pair + 1], rows, b[2], b[3]);
    }
}

// scores = rows · columnsᵀ for the N columns of a tile.
template <u32 ROWS, u32 N>
__device__ __forceinline__ void multiply_rows(float (&scores)[N / 8][4], const HeldRows<ROWS>& rows, u32 tile) {
#pragma unroll
    for (u32 i = 0; i < N / 8 * 4; i++) scores[i / 4][i % 4] = 0.0f;
    #pragma unroll
    for (u32 step = 0; step < STEPS; step++) multiply_step<N>(scores, rows.at[step], tile, step);
}

// Two such products, of rows that stay in shared memory. AT_ONCE steps are unrolled.
template <u32 ROWS, u32 N, u32 AT_ONCE> __device__ __forceinline__ void multiply_both(float (&first)[N / 8][4],
    float (&second)[N / 8][4], u32 first_rows, u32 second_rows, u32 first_tile, u32 second_tile) {
#pragma unroll
    for (u32 i = 0; i < N / 8 * 4; i++) first[i / 4][i % 4] = second[i / 4][i % 4] = 0.0f;
    #pragma unroll AT_ONCE
    for (u32 step = 0; step < STEPS; step++) {
        u32 rows[4];
        HeldRows<ROWS>::load_step(rows, first_rows, step);
        multiply_step<N>(first, rows, first_tile, step);
        HeldRows<ROWS>::load_step(rows, second_rows, step);
        multiply_step<N>(second, rows, second_tile, step);
    }
}

// sums += weights · tile, for weights of 16 rows and N columns that are rounded, and a tile of N rows.
template <u32 N> __device__ __forceinline__ void multiply_weighted(
    float (&sums)[DIM / 8][4], const float (&weights)[N / 8][4], u32 tile) {
    const u32 lane = threadIdx.x % 32;
    #pragma unroll
    for (u32 step = 0; step < N / 16; step++) {
        u32 a[4];
        narrow_step<N>(a, weights, step);
        #pragma unroll
        for (u32 pair = 0; pair < DIM / 16; pair++) {
            u32 b[4];
            load_matrices_transposed(
                b, tile + place<N>(16 * step + (lane / 8 & 1) * 8 + lane % 8, 2 * pair + lane / 16));
            multiply<ELEMENT>(sums[2 * pair], a, b[0], b[1]);
            multiply<ELEMENT>(sums[2 * pair + 1], a, b[2], b[3]);
        }
    }
}

// Copies are visible to `ldmatrix` once they have been waited for.
__device__ __forceinline__ void show_tiles() {}
