// Element-wise functions and their gradients. Computed in f32 and rounded to ELEMENT once.
//
// Defined outside: ELEMENT.

struct Elementwise {
    const void* input;    // the function's argument
    const void* gradient; // the gradient of the function's result; read by gradients
    void* out;
    const u16* tiles;     // a mask [ceil(rows / 4), ceil(cols / 4)] outside of which a gradient is zero, or null
    u64 count;
    u32 cols;
};

typedef Bits<ELEMENT>::type Raw;
// Elements of a thread: 16 bytes.
constexpr u32 WIDTH = 16 / sizeof(Raw);
struct __align__(16) Vector { Raw of[WIDTH]; };

// Calls `f` with the index, inputs and output of each element of the thread, in whole vectors where the tensors are
// aligned to them.
template <bool GRADIENT, class F> __device__ __forceinline__ void for_each(const Elementwise& p, F f) {
    const u64 at = (u64)WIDTH * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= p.count) return;
    const Raw *input = (const Raw*)p.input + at, *gradient = (const Raw*)p.gradient + at;
    Raw* out = (Raw*)p.out + at;
    const bool aligned = (((u64)p.input | (GRADIENT ? (u64)p.gradient : 0) | (u64)p.out) & 15) == 0;
    if (aligned && at + WIDTH <= p.count) {
        const Vector in = *(const Vector*)input, dy = GRADIENT ? *(const Vector*)gradient : Vector();
        Vector result;
        unrolled<WIDTH>([&](auto i) { result.of[i.value] = f(at + i.value, in.of[i.value], dy.of[i.value]); });
        *(Vector*)out = result;
        return;
    }
    for (u32 i = 0; i < WIDTH && at + i < p.count; i++) out[i] = f(at + i, input[i], GRADIENT ? gradient[i] : (Raw)0);
}

__device__ __forceinline__ bool is_kept(const Elementwise& p, u64 at) {
    const u64 row = at / p.cols;
    const u32 col = (u32)(at - row * p.cols);
    return p.tiles[row / 4 * ((p.cols + 3) / 4) + col / 4] >> (4 * (row % 4) + col % 4) & 1;
}

template <int F> __device__ __forceinline__ void apply(const Elementwise& p) {
    for_each<false>(p, [&](u64, Raw in, Raw) { return narrow<ELEMENT>(value_in<F, ELEMENT>(widen<ELEMENT>(in))); });
}

template <int F> __device__ __forceinline__ void gradient(const Elementwise& p) {
    for_each<true>(p, [&](u64 at, Raw in, Raw dy) {
        if (p.tiles && !is_kept(p, at)) return (Raw)0;
        return F == IDENTITY ? dy : narrow<ELEMENT>(widen<ELEMENT>(dy) * slope_in<F, ELEMENT>(widen<ELEMENT>(in)));
    });
}

#define FUNCTION(name, F)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) apply_##name(const __grid_constant__ Elementwise p) {    \
        apply<F>(p);                                                                                           \
    }                                                                                                          \
    extern "C" __global__ void __launch_bounds__(256) gradient_##name(const __grid_constant__ Elementwise p) { \
        gradient<F>(p);                                                                                        \
    }
FUNCTION(identity, IDENTITY)
FUNCTION(relu, RELU)
FUNCTION(gelu, GELU)
FUNCTION(silu, SILU)
FUNCTION(squared_relu, SQUARED_RELU)
FUNCTION(tanh_gelu, TANH_GELU)

// Adds an f32 tensor to one of ELEMENT where a mask keeps the element. `input` is the f32 tensor, `out` the other.
extern "C" __global__ void __launch_bounds__(256) add_where_kept(const __grid_constant__ Elementwise p) {
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= p.count || !is_kept(p, at)) return;
    Raw* out = (Raw*)p.out + at;
    *out = narrow<ELEMENT>(widen<ELEMENT>(*out) + ((const float*)p.input)[at]);
}

// Fills a tensor with numbers between -1 and 1 that look random: what GEMMs are timed on.
extern "C" __global__ void __launch_bounds__(256) fill(const __grid_constant__ Elementwise p) {
    const u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= p.count) return;
    u32 bits = (u32)at * 0x9E3779B9u + (u32)(at >> 32);
    bits = (bits ^ bits >> 16) * 0x85EBCA6Bu;
    bits = (bits ^ bits >> 13) * 0xC2B2AE35u;
    ((Raw*)p.out)[at] = narrow<ELEMENT>((float)(int)(bits ^ bits >> 16) * 4.6566129e-10f);
}
