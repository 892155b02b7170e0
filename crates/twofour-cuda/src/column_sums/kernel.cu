// Sums of the columns of a matrix `[rows, cols]` of ELEMENT, in f32: blocks sum chunks of rows, and the chunks are summed in order, so that the
// result is the same each time.
//
// Defined outside: ELEMENT.

struct ColumnSums {
    const void* matrix;
    float* partial; // [chunks, cols]
    void* out;      // [cols]
    u32 rows, cols;
    u32 chunk;      // rows of a chunk
    u32 chunks;
    u32 output;     // the data type of `out`
    u32 accumulate;
};

typedef Bits<ELEMENT>::type Raw;
struct __align__(2 * sizeof(Raw)) Two { Raw first, second; };

// A block of eight warps sums 64 columns of a chunk of rows; a lane two of its warp's rows' columns.
extern "C" __global__ void __launch_bounds__(256) sum_chunks(const __grid_constant__ ColumnSums p) {
    __shared__ float2 sums[8][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = 64 * blockIdx.x + 2 * lane;
    const u32 first = blockIdx.y * p.chunk, end = min(first + p.chunk, p.rows);
    const Raw* from = (const Raw*)p.matrix + (u64)(first + warp) * p.cols + col;
    const bool pairs = p.cols % 2 == 0 && (u64)p.matrix % sizeof(Two) == 0;
    float2 sum = make_float2(0.0f, 0.0f);
    if (col < p.cols) {
        if (pairs) {
            #pragma unroll 8
            for (u32 row = first + warp; row < end; row += 8, from += 8 * (u64)p.cols) {
                const Two two = *(const Two*)from;
                sum.x += widen<ELEMENT>(two.first);
                sum.y += widen<ELEMENT>(two.second);
            }
        } else {
            #pragma unroll 4
            for (u32 row = first + warp; row < end; row += 8, from += 8 * (u64)p.cols) {
                sum.x += widen<ELEMENT>(from[0]);
                if (col + 1 < p.cols) sum.y += widen<ELEMENT>(from[1]);
            }
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || col >= p.cols) return;
    for (u32 w = 1; w < 8; w++) {
        sum.x += sums[w][lane].x;
        sum.y += sums[w][lane].y;
    }
    float* to = p.partial + (u64)blockIdx.y * p.cols + col;
    to[0] = sum.x;
    if (col + 1 < p.cols) to[1] = sum.y;
}

template <int E> __device__ __forceinline__ void finish(const ColumnSums& p, u32 col, float sum) {
    typedef typename Bits<E>::type Out;
    Out* to = (Out*)p.out + col;
    *to = narrow<E>(p.accumulate ? widen<E>(*to) + sum : sum);
}

extern "C" __global__ void __launch_bounds__(256) sum_of_chunks(const __grid_constant__ ColumnSums p) {
    const u32 col = blockIdx.x * blockDim.x + threadIdx.x;
    if (col >= p.cols) return;
    float sum = 0.0f;
    #pragma unroll 8
    for (u32 chunk = 0; chunk < p.chunks; chunk++) sum += p.partial[(u64)chunk * p.cols + col];
    if (p.output == F32) finish<F32>(p, col, sum);
    else if (p.output == F16) finish<F16>(p, col, sum);
    else finish<BF16>(p, col, sum);
}
