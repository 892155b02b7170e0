// A gated activation (Shazeer, "GLU Variants Improve Transformer", 2020) whose results are quantized to 8-bit integers with a scale for each token, the input of an int8
// GEMM. Results are rounded to ELEMENT first, as gated/kernel.cu stores them. A CTA has a token, and computes its elements twice rather than keep them.
//
// Defined outside: ELEMENT.

struct Gate {
    const void* x;  // [rows, 2 width]: gate, then up
    u8* y;          // [rows, width]
    float* scales;  // [rows]
    u32 width;
};

template <int F> __device__ __forceinline__ float gated(const Raw* x, u32 width, u32 at) {
    return widen<ELEMENT>(narrow<ELEMENT>(value<F>(widen<ELEMENT>(x[at])) * widen<ELEMENT>(x[width + at])));
}

template <int F> __device__ __forceinline__ void to_i8(const Gate& p) {
    __shared__ u32 shared[32];
    const Raw* const x = (const Raw*)p.x + (u64)blockIdx.x * 2 * p.width;
    u32 amax = 0;
    #pragma unroll 4
    for (u32 at = threadIdx.x; at < p.width; at += blockDim.x) amax = max(amax, magnitude(gated<F>(x, p.width, at)));
    const RowScale scale(amax, shared);
    if (threadIdx.x == 0) p.scales[blockIdx.x] = scale.stored();
    u8* const y = p.y + (u64)blockIdx.x * p.width;
    #pragma unroll 4
    for (u32 at = threadIdx.x; at < p.width; at += blockDim.x) y[at] = scale.quantized(gated<F>(x, p.width, at));
}

extern "C" __global__ void __launch_bounds__(1024) silu(const __grid_constant__ Gate p) { to_i8<SILU>(p); }
extern "C" __global__ void __launch_bounds__(1024) gelu(const __grid_constant__ Gate p) { to_i8<GELU>(p); }
extern "C" __global__ void __launch_bounds__(1024) tanh_gelu(const __grid_constant__ Gate p) { to_i8<TANH_GELU>(p); }
extern "C" __global__ void __launch_bounds__(1024) relu(const __grid_constant__ Gate p) { to_i8<RELU>(p); }
