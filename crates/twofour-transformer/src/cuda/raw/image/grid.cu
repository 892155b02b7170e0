// Passes over the tokens of a grid.
//
// Defined outside: ELEMENT.

struct Grid {
    const void* x;
    void* y;
    const float* factors; // [channels]
    u32 rows, columns, channels;
};

// The values at each place of [images, rows, columns, channels] and around it, [images, rows, columns, 9 channels], row
// by row; zeros beyond the image. A CTA has one place.
template <int N> __device__ __forceinline__ void around(const Grid& p) {
    const u32 column = blockIdx.x % p.columns, above = blockIdx.x / p.columns, row = above % p.rows,
              image = above / p.rows;
    const u32 runs = p.channels / N;
    for (u32 index = threadIdx.x; index < 9 * runs; index += blockDim.x) {
        const u32 place = index / runs, i = (index - place * runs) * N;
        // Numbers below 0 wrap around, beyond every row and column.
        const u32 from_row = row + place / 3 - 1, from_column = column + place % 3 - 1;
        float x[N] = {};
        if (from_row < p.rows && from_column < p.columns) {
            load<N>((const Raw*)p.x + (((u64)image * p.rows + from_row) * p.columns + from_column) * p.channels + i, x);
        }
        store<N>((Raw*)p.y + ((u64)blockIdx.x * 9 + place) * p.channels + i, x);
    }
}

extern "C" __global__ void __launch_bounds__(256) around_vectors(const __grid_constant__ Grid p) { around<WIDTH>(p); }
extern "C" __global__ void __launch_bounds__(256) around_one_by_one(const __grid_constant__ Grid p) { around<1>(p); }

// Multiplies each row of `y` [rows, channels] by the factors, in place. A CTA has one row.
extern "C" __global__ void __launch_bounds__(256) scale(const __grid_constant__ Grid p) {
    Raw* const row = (Raw*)p.y + (u64)blockIdx.x * p.channels;
    for (u32 i = threadIdx.x; i < p.channels; i += blockDim.x)
        row[i] = narrow<ELEMENT>(widen<ELEMENT>(row[i]) * p.factors[i]);
}
