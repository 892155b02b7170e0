// The sum of the losses of rows.

// One CTA of 1024 threads adds the rows' losses in f64: each thread every 1024th, then the threads as a tree. Adds the
// sum to what is there, or writes it.
__device__ __forceinline__ void add_rows(const float* losses, u32 rows, bool adds, float* to) {
    __shared__ double shared[1024];
    double sum = 0.0;
    for (u32 row = threadIdx.x; row < rows; row += 1024) sum += (double)losses[row];
    shared[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = 512; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *to = (adds ? *to : 0.0f) + (float)shared[0];
}
