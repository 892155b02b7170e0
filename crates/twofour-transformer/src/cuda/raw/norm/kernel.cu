// Layer normalization (Ba, Kiros and Hinton, 2016) and RMS normalization (Zhang and Sennrich, 2019) of the rows of a
// matrix, and their gradients. A CTA normalizes a row; a variance is that of differences from the mean. Gradients of
// gain and bias are sums of chunks of rows, which a second kernel adds in a fixed order.
//
// Defined outside: ELEMENT.

struct Norm {
    const void* x;         // [rows, width]
    void* sum;             // what x is added to before, and receives the sum; or null
    const void* gain;      // [width], f32 or ELEMENT
    const void* bias;      // the same, or null
    void* y;
    float* mean;           // [rows]; layer normalization only
    float* rstd;           // [rows]
    const void* dy;
    void* dx;
    float* partial;        // [chunks, 2, width]: partial gradients of gain and bias
    float* dgain;
    float* dbias;          // or null
    u32 rows, width;
    u32 chunk, chunks;     // rows of a chunk, and their number
    u32 wide;              // whether gain and bias are f32
    u32 adds_dx, adds_parameters;
    float epsilon;
};

// Loads N numbers of the gain or the bias.
template <int N> __device__ __forceinline__ void parameter(const Norm& p, const void* from, u32 at, float (&to)[N]) {
    if (p.wide) {
        load_f32<N>((const float*)from + at, to);
    } else {
        const Raw* raw = (const Raw*)from + at;
        unrolled<N>([&](auto i) { to[i.value] = widen<ELEMENT>(raw[i.value]); });
    }
}

template <bool CENTERED> __device__ __forceinline__ void forward(const Norm& p) {
    __shared__ float shared[32];
    const u64 start = (u64)blockIdx.x * p.width;
    const Raw* x = (const Raw*)p.x + start;
    Raw* y = (Raw*)p.y + start;
    bool vectors = alike(x, y);
    float sum = 0.0f;
    if (p.sum) {
        Raw* out = (Raw*)p.sum + start;
        vectors = vectors && alike(x, out);
        across((u64)x, vectors, p.width, [&](u32 at, auto n) {
            constexpr int N = decltype(n)::value;
            float a[N], b[N];
            load<N>(x + at, a);
            load<N>(out + at, b);
            unrolled<N>([&](auto i) {
                a[i.value] = widen<ELEMENT>(narrow<ELEMENT>(a[i.value] + b[i.value]));
                sum += CENTERED ? a[i.value] : a[i.value] * a[i.value];
            });
            store<N>(out + at, a);
        });
        // Each thread reads below what it has written itself.
        x = out;
    } else {
        across((u64)x, vectors, p.width, [&](u32 at, auto n) {
            constexpr int N = decltype(n)::value;
            float a[N];
            load<N>(x + at, a);
            unrolled<N>([&](auto i) { sum += CENTERED ? a[i.value] : a[i.value] * a[i.value]; });
        });
    }
    float mean = 0.0f, square = sum_of_block(sum, shared) / (float)p.width;
    if (CENTERED) {
        mean = square;
        float squares = 0.0f;
        across((u64)x, vectors, p.width, [&](u32 at, auto n) {
            constexpr int N = decltype(n)::value;
            float a[N];
            load<N>(x + at, a);
            unrolled<N>([&](auto i) { squares += (a[i.value] - mean) * (a[i.value] - mean); });
        });
        square = sum_of_block(squares, shared) / (float)p.width;
    }
    const float rstd = 1.0f / sqrtf(square + p.epsilon);
    if (threadIdx.x == 0) {
        if (CENTERED) p.mean[blockIdx.x] = mean;
        p.rstd[blockIdx.x] = rstd;
    }
    across((u64)x, vectors, p.width, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N], gain[N], bias[N] = {};
        load<N>(x + at, a);
        parameter<N>(p, p.gain, at, gain);
        if (p.bias) parameter<N>(p, p.bias, at, bias);
        unrolled<N>([&](auto i) { a[i.value] = (a[i.value] - mean) * rstd * gain[i.value] + bias[i.value]; });
        store<N>(y + at, a);
    });
}

// dx = rstd (g - mean(g) - x̂ mean(g x̂)) with g = dy gain; RMS normalization has no mean(g).
template <bool CENTERED> __device__ __forceinline__ void backward(const Norm& p) {
    __shared__ float shared[32];
    const u64 start = (u64)blockIdx.x * p.width;
    const Raw *x = (const Raw*)p.x + start, *dy = (const Raw*)p.dy + start;
    Raw* dx = (Raw*)p.dx + start;
    const bool vectors = alike(x, dy) && alike(x, dx);
    const float mean = CENTERED ? p.mean[blockIdx.x] : 0.0f, rstd = p.rstd[blockIdx.x];
    float sum = 0.0f, product = 0.0f;
    across((u64)x, vectors, p.width, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N], g[N], gain[N];
        load<N>(x + at, a);
        load<N>(dy + at, g);
        parameter<N>(p, p.gain, at, gain);
        unrolled<N>([&](auto i) {
            const float scaled = __fmul_rn(g[i.value], gain[i.value]);
            sum += scaled;
            product += scaled * (a[i.value] - mean) * rstd;
        });
    });
    product = sum_of_block(product, shared) / (float)p.width;
    sum = CENTERED ? sum_of_block(sum, shared) / (float)p.width : 0.0f;
    across((u64)x, vectors, p.width, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N], g[N], gain[N], before[N] = {};
        load<N>(x + at, a);
        load<N>(dy + at, g);
        parameter<N>(p, p.gain, at, gain);
        if (p.adds_dx) load<N>(dx + at, before);
        unrolled<N>([&](auto i) {
            const float normal = (a[i.value] - mean) * rstd;
            g[i.value] = before[i.value] + rstd * (__fmul_rn(g[i.value], gain[i.value]) - sum - normal * product);
        });
        store<N>(dx + at, g);
    });
}

// A CTA of eight warps sums dy x̂ and dy of COLUMNS columns over a chunk of rows: each warp every eighth row, a lane
// WIDTH neighbouring columns.
constexpr u32 COLUMNS = 32 * WIDTH;
template <bool CENTERED> __device__ __forceinline__ void sum_parameters(const Norm& p) {
    __shared__ float gains[8][COLUMNS], biases[8][COLUMNS];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, from = COLUMNS * blockIdx.x, col = from + WIDTH * lane;
    const u32 first = blockIdx.y * p.chunk, end = min(first + p.chunk, p.rows);
    const bool vectors = p.width % WIDTH == 0 && (((u64)p.x | (u64)p.dy) & 15) == 0;
    float gain[WIDTH] = {}, bias[WIDTH] = {};
    #pragma unroll 2
    for (u32 row = first + warp; row < end; row += 8) {
        const u64 at = (u64)row * p.width + col;
        const float mean = CENTERED ? p.mean[row] : 0.0f, rstd = p.rstd[row];
        float x[WIDTH] = {}, dy[WIDTH] = {};
        if (vectors && col < p.width) {
            load<WIDTH>((const Raw*)p.x + at, x);
            load<WIDTH>((const Raw*)p.dy + at, dy);
        } else if (!vectors) {
            unrolled<WIDTH>([&](auto i) {
                if (col + i.value < p.width) {
                    x[i.value] = widen<ELEMENT>(((const Raw*)p.x)[at + i.value]);
                    dy[i.value] = widen<ELEMENT>(((const Raw*)p.dy)[at + i.value]);
                }
            });
        }
        unrolled<WIDTH>([&](auto i) {
            gain[i.value] += dy[i.value] * ((x[i.value] - mean) * rstd);
            bias[i.value] += dy[i.value];
        });
    }
    unrolled<WIDTH>([&](auto i) {
        gains[warp][WIDTH * lane + i.value] = gain[i.value], biases[warp][WIDTH * lane + i.value] = bias[i.value];
    });
    __syncthreads();
    float* const partial = p.partial + (u64)blockIdx.y * 2 * p.width;
    for (u32 c = threadIdx.x; c < COLUMNS && from + c < p.width; c += 256) {
        float of_gain = gains[0][c], of_bias = biases[0][c];
        for (u32 w = 1; w < 8; w++) of_gain += gains[w][c], of_bias += biases[w][c];
        partial[from + c] = of_gain;
        partial[p.width + from + c] = of_bias;
    }
}

#define NORM(name, CENTERED)                                                                                \
    extern "C" __global__ void __launch_bounds__(1024, 1) name##_forward(const __grid_constant__ Norm p) {  \
        forward<CENTERED>(p);                                                                               \
    }                                                                                                       \
    extern "C" __global__ void __launch_bounds__(1024, 1) name##_backward(const __grid_constant__ Norm p) { \
        backward<CENTERED>(p);                                                                              \
    }                                                                                                       \
    extern "C" __global__ void __launch_bounds__(256) name##_parameters(const __grid_constant__ Norm p) {   \
        sum_parameters<CENTERED>(p);                                                                        \
    }
NORM(layer, true)
NORM(rms, false)

// Adds the chunks' partial gradients of 32 columns: each of eight warps every eighth chunk, and then the warps in
// order.
extern "C" __global__ void __launch_bounds__(256) add_chunks(const __grid_constant__ Norm p) {
    __shared__ float sums[8][32];
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, col = 32 * blockIdx.x + lane;
    float* const to = blockIdx.y == 0 ? p.dgain : p.dbias;
    if (!to) return;
    float sum = 0.0f;
    if (col < p.width) {
        #pragma unroll 8
        for (u32 chunk = warp; chunk < p.chunks; chunk += 8)
            sum += p.partial[((u64)chunk * 2 + blockIdx.y) * p.width + col];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || col >= p.width) return;
    for (u32 w = 1; w < 8; w++) sum += sums[w][lane];
    to[col] = p.adds_parameters ? to[col] + sum : sum;
}
