// Column sums of a matrix `[rows, cols]` of ELEMENT, in f32; also of a gradient that is first taken through an
// activation and stored. CTAs sum chunks of rows, and a second kernel adds the chunks in a fixed order, so that results
// repeat bit for bit.
//
// Defined outside: ELEMENT.

struct ColumnSums {
    void* matrix;      // overwritten by the passes through an activation only
    const void* input; // the activation's argument, [rows, cols]; read by those passes only
    float* partial; // [chunks, cols]
    void* out;      // [cols]
    u32 rows, cols;
    u32 chunk;      // rows of a chunk
    u32 chunks;
    u32 output;     // the data type of `out`
    u32 accumulate;
};

typedef Bits<ELEMENT>::type Raw;
// Elements that a lane loads at once: 16 bytes.
constexpr u32 WIDTH = 16 / sizeof(Raw);
struct __align__(16) Vector { Raw of[WIDTH]; };
constexpr u32 COLUMNS = 32 * WIDTH;

// A CTA of eight warps sums COLUMNS columns of a chunk of rows: each warp every eighth row, a lane WIDTH neighbouring
// columns of it.
extern "C" __global__ void __launch_bounds__(256) sum_chunks(const __grid_constant__ ColumnSums p) {
    __shared__ float sums[8][COLUMNS];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = COLUMNS * blockIdx.x + WIDTH * lane;
    const u32 first = blockIdx.y * p.chunk, end = min(first + p.chunk, p.rows);
    const Raw* from = (const Raw*)p.matrix + (u64)(first + warp) * p.cols + col;
    const bool vectors = p.cols % WIDTH == 0 && (u64)p.matrix % sizeof(Vector) == 0;
    float sum[WIDTH] = {};
    if (vectors && col < p.cols) {
        #pragma unroll 8
        for (u32 row = first + warp; row < end; row += 8, from += 8 * (u64)p.cols) {
            const Vector vector = *(const Vector*)from;
            unrolled<WIDTH>([&](auto i) { sum[i.value] += widen<ELEMENT>(vector.of[i.value]); });
        }
    } else if (!vectors) {
        #pragma unroll 2
        for (u32 row = first + warp; row < end; row += 8, from += 8 * (u64)p.cols) {
            unrolled<WIDTH>([&](auto i) {
                if (col + i.value < p.cols) sum[i.value] += widen<ELEMENT>(from[i.value]);
            });
        }
    }
    unrolled<WIDTH>([&](auto i) { sums[warp][WIDTH * lane + i.value] = sum[i.value]; });
    __syncthreads();
    for (u32 c = threadIdx.x; c < COLUMNS && COLUMNS * blockIdx.x + c < p.cols; c += 256) {
        float total = sums[0][c];
        for (u32 w = 1; w < 8; w++) total += sums[w][c];
        p.partial[(u64)blockIdx.y * p.cols + COLUMNS * blockIdx.x + c] = total;
    }
}

template <int E> __device__ __forceinline__ void finish(const ColumnSums& p, u32 col, float sum) {
    typedef typename Bits<E>::type Out;
    Out* to = (Out*)p.out + col;
    *to = narrow<E>(p.accumulate ? widen<E>(*to) + sum : sum);
}

// Multiplies a chunk of the matrix by the derivative of F at `input`, stores it, rounded, in its place, and sums the
// stored numbers as `sum_chunks` does.
template <int F> __device__ __forceinline__ void gradient_chunks(const ColumnSums& p) {
    __shared__ float sums[8][COLUMNS];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = COLUMNS * blockIdx.x + WIDTH * lane;
    const u32 first = blockIdx.y * p.chunk, end = min(first + p.chunk, p.rows);
    const u64 begin = (u64)(first + warp) * p.cols + col, step = 8 * (u64)p.cols;
    Raw* at = (Raw*)p.matrix + begin;
    const Raw* input = (const Raw*)p.input + begin;
    // The precise functions of f32 leave no registers for vectors.
    const bool vectors = ELEMENT != F32 && p.cols % WIDTH == 0 && ((u64)p.matrix | (u64)p.input) % sizeof(Vector) == 0;
    float sum[WIDTH] = {};
    const auto through = [&](Raw gradient, Raw in) {
        return narrow<ELEMENT>(widen<ELEMENT>(gradient) * slope_in<F, ELEMENT>(widen<ELEMENT>(in)));
    };
    if (vectors && col < p.cols) {
        #pragma unroll 4
        for (u32 row = first + warp; row < end; row += 8, at += step, input += step) {
            Vector vector = *(const Vector*)at;
            const Vector in = *(const Vector*)input;
            unrolled<WIDTH>([&](auto i) {
                vector.of[i.value] = through(vector.of[i.value], in.of[i.value]);
                sum[i.value] += widen<ELEMENT>(vector.of[i.value]);
            });
            *(Vector*)at = vector;
        }
    } else if (!vectors) {
        for (u32 row = first + warp; row < end; row += 8, at += step, input += step) {
            #pragma unroll 1
            for (u32 i = 0; i < WIDTH; i++) {
                if (col + i < p.cols) {
                    at[i] = through(at[i], input[i]);
                    sum[i] += widen<ELEMENT>(at[i]);
                }
            }
        }
    }
    unrolled<WIDTH>([&](auto i) { sums[warp][WIDTH * lane + i.value] = sum[i.value]; });
    __syncthreads();
    for (u32 c = threadIdx.x; c < COLUMNS && COLUMNS * blockIdx.x + c < p.cols; c += 256) {
        float total = sums[0][c];
        for (u32 w = 1; w < 8; w++) total += sums[w][c];
        p.partial[(u64)blockIdx.y * p.cols + COLUMNS * blockIdx.x + c] = total;
    }
}
extern "C" __global__ void __launch_bounds__(256) relu_chunks(const __grid_constant__ ColumnSums p) {
    gradient_chunks<RELU>(p);
}
extern "C" __global__ void __launch_bounds__(256) gelu_chunks(const __grid_constant__ ColumnSums p) {
    gradient_chunks<GELU>(p);
}
extern "C" __global__ void __launch_bounds__(256) silu_chunks(const __grid_constant__ ColumnSums p) {
    gradient_chunks<SILU>(p);
}

// A CTA adds the chunks of 32 columns: each of eight warps every eighth chunk.
extern "C" __global__ void __launch_bounds__(256) sum_of_chunks(const __grid_constant__ ColumnSums p) {
    __shared__ float sums[8][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = 32 * blockIdx.x + lane;
    float sum = 0.0f;
    if (col < p.cols) {
        #pragma unroll 8
        for (u32 chunk = warp; chunk < p.chunks; chunk += 8) sum += p.partial[(u64)chunk * p.cols + col];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || col >= p.cols) return;
    for (u32 w = 1; w < 8; w++) sum += sums[w][lane];
    if (p.output == F32) finish<F32>(p, col, sum);
    else if (p.output == F16) finish<F16>(p, col, sum);
    else finish<BF16>(p, col, sum);
}
