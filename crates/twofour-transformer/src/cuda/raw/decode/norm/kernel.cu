// Normalization of a few tokens for inference: the residual stream, in f32, takes up a block's output and is normalized
// (RMS normalization: Zhang and Sennrich, 2019; layer normalization: Ba, Kiros and Hinton, 2016) to ELEMENT, or to
// 8-bit integers with a scale for each token. A CTA has a token, and a thread up to N of its elements.
//
// Defined outside: ELEMENT.

struct TokenNorm {
    float* x;            // [rows, width]: the residual stream
    const void* delta;   // [rows, width]: added to x, or null
    const float* gain;   // [width]
    const float* bias;   // [width], or null
    void* y;             // [normalized rows, width]: ELEMENT, or integers
    float* scales;       // [normalized rows]: of integers
    u32 width;
    u32 first, stride;   // the rows of x that are normalized: first, first + stride, ...
    float epsilon;
    u32 replaces;        // whether normalized values become the residual stream
};

// Returns the sum over the CTA's threads, to the bit that of `sum_of_block`: the warps' sums are added one by one, but
// loaded four at a time. `shared` has room for three more than there are warps.
__device__ __forceinline__ float sum_of_token(float value, float* shared) {
    for (u32 distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    __syncthreads();
    const u32 warps = blockDim.x / 32;
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    // Zeros complete the last four, and change no sum.
    if (threadIdx.x < 3) shared[warps + threadIdx.x] = 0.0f;
    __syncthreads();
    float sum = 0.0f;
    for (u32 warp = 0; warp < warps; warp += 4) {
        const float4 four = *(const float4*)(shared + warp);
        sum += four.x, sum += four.y, sum += four.z, sum += four.w;
    }
    return sum;
}

template <bool CENTERED, bool QUANTIZES, int N> __device__ __forceinline__ void normalize(const TokenNorm& p) {
    __shared__ __align__(16) float shared[36];
    const u64 row = p.first + (u64)blockIdx.x * p.stride, from = row * p.width, to = (u64)blockIdx.x * p.width;
    // Few elements' gains and biases are on their way with them; of many there is no room for these in registers.
    constexpr bool AHEAD = N <= 4;
    float x[N], gain[AHEAD ? N : 1], bias[AHEAD ? N : 1];
    float sum = 0.0f;
    unrolled<N>([&](auto i) {
        const u32 at = threadIdx.x + i.value * blockDim.x;
        const bool in = at < p.width;
        x[i.value] = in ? p.x[from + at] : 0.0f;
        if (in && p.delta) x[i.value] += widen<ELEMENT>(((const Raw*)p.delta)[from + at]);
        if constexpr (AHEAD) {
            gain[i.value] = in ? p.gain[at] : 0.0f;
            bias[i.value] = in && p.bias ? p.bias[at] : 0.0f;
        }
    });
    unrolled<N>([&](auto i) {
        const u32 at = threadIdx.x + i.value * blockDim.x;
        if (at < p.width && p.delta) p.x[from + at] = x[i.value];
        sum += CENTERED ? x[i.value] : x[i.value] * x[i.value];
    });
    float mean = 0.0f, square = sum_of_token(sum, shared) / (float)p.width;
    if (CENTERED) {
        mean = square;
        float squares = 0.0f;
        unrolled<N>([&](auto i) {
            const float difference = threadIdx.x + i.value * blockDim.x < p.width ? x[i.value] - mean : 0.0f;
            squares += difference * difference;
        });
        square = sum_of_token(squares, shared) / (float)p.width;
    }
    const float rstd = 1.0f / sqrtf(square + p.epsilon);
    unrolled<N>([&](auto i) {
        const u32 at = threadIdx.x + i.value * blockDim.x;
        const float normal = (x[i.value] - mean) * rstd;
        if constexpr (AHEAD) x[i.value] = normal * gain[i.value] + bias[i.value];
        else if (at < p.width) x[i.value] = normal * p.gain[at] + (p.bias ? p.bias[at] : 0.0f);
    });
    if (p.replaces) {
        unrolled<N>([&](auto i) {
            const u32 at = threadIdx.x + i.value * blockDim.x;
            if (at < p.width) p.x[from + at] = x[i.value];
        });
    }
    if constexpr (QUANTIZES) {
        unrolled<N>([&](auto i) { x[i.value] = widen<ELEMENT>(narrow<ELEMENT>(x[i.value])); });
        u32 amax = 0;
        unrolled<N>([&](auto i) {
            if (threadIdx.x + i.value * blockDim.x < p.width) amax = max(amax, magnitude(x[i.value]));
        });
        const RowScale scale(amax_of_block(amax, (u32*)shared));
        if (threadIdx.x == 0) p.scales[blockIdx.x] = scale.stored();
        unrolled<N>([&](auto i) {
            const u32 at = threadIdx.x + i.value * blockDim.x;
            if (at < p.width) ((u8*)p.y)[to + at] = scale.quantized(x[i.value]);
        });
    } else {
        unrolled<N>([&](auto i) {
            const u32 at = threadIdx.x + i.value * blockDim.x;
            if (at < p.width) ((Raw*)p.y)[to + at] = narrow<ELEMENT>(x[i.value]);
        });
    }
}

#define NORMALIZE(name, CENTERED, QUANTIZES)                                                              \
    extern "C" __global__ void __launch_bounds__(1024, 1) name##_4(const __grid_constant__ TokenNorm p) { \
        normalize<CENTERED, QUANTIZES, 4>(p);                                                             \
    }                                                                                                     \
    extern "C" __global__ void __launch_bounds__(512, 1) name##_16(const __grid_constant__ TokenNorm p) { \
        normalize<CENTERED, QUANTIZES, 16>(p);                                                            \
    }
NORMALIZE(rms, false, false)
NORMALIZE(rms_to_i8, false, true)
NORMALIZE(layer, true, false)
NORMALIZE(layer_to_i8, true, true)
