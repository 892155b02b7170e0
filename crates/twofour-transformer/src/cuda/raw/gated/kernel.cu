// Gated activations (Shazeer, "GLU Variants Improve Transformer", 2020): y = f(gate) up for rows [gate, up] of 2 width
// elements, and their gradient.
//
// Defined outside: ELEMENT.

struct Gated {
    const void* x;  // [rows, 2 width]: gate, then up
    const void* dy; // [rows, width]
    void* out;      // y [rows, width], or dx [rows, 2 width]
    u64 count;      // rows * width
    u32 width;
    float slope, limit; // of the clamped gate
};

// The gate of gpt-oss: gate sigmoid(slope gate) (up + 1) with the gate clamped to at most the limit and `up`
// to plus or minus the limit. NaN stays NaN.
constexpr int CLAMPED = -1;

template <int F> __device__ __forceinline__ float joined(const Gated& p, float gate, float up) {
    if (F != CLAMPED) return value<F>(gate) * up;
    gate = gate > p.limit ? p.limit : gate;
    up = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
    return (up + 1.0f) * gate * sigmoid(p.slope * gate);
}

template <int F, bool GRADIENT, int N> __device__ __forceinline__ void some(const Gated& p, u64 at) {
    const u64 row = at / p.width, gate_at = at + row * p.width;
    float gate[N], up[N], y[N];
    load<N>((const Raw*)p.x + gate_at, gate);
    load<N>((const Raw*)p.x + gate_at + p.width, up);
    if (GRADIENT) {
        float dy[N];
        load<N>((const Raw*)p.dy + at, dy);
        unrolled<N>([&](auto i) {
            const float f = value<F>(gate[i.value]);
            gate[i.value] = dy[i.value] * up[i.value] * slope<F>(gate[i.value]);
            up[i.value] = dy[i.value] * f;
        });
        store<N>((Raw*)p.out + gate_at, gate);
        store<N>((Raw*)p.out + gate_at + p.width, up);
    } else {
        unrolled<N>([&](auto i) { y[i.value] = joined<F>(p, gate[i.value], up[i.value]); });
        store<N>((Raw*)p.out + at, y);
    }
}

template <int F, bool GRADIENT> __device__ __forceinline__ void gated(const Gated& p) {
    const u64 at = (u64)WIDTH * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (p.width % WIDTH == 0 && (((u64)p.x | (u64)p.out | (GRADIENT ? (u64)p.dy : 0)) & 15) == 0) {
        if (at < p.count) some<F, GRADIENT, WIDTH>(p, at);
        return;
    }
    for (u32 i = 0; i < WIDTH && at + i < p.count; i++) some<F, GRADIENT, 1>(p, at + i);
}

#define GATED(name, F)                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) apply_##name(const __grid_constant__ Gated p) {    \
        gated<F, false>(p);                                                                              \
    }                                                                                                    \
    extern "C" __global__ void __launch_bounds__(256) gradient_##name(const __grid_constant__ Gated p) { \
        gated<F, true>(p);                                                                               \
    }
GATED(silu, SILU)
GATED(gelu, GELU)
GATED(tanh_gelu, TANH_GELU)
GATED(relu, RELU)

extern "C" __global__ void __launch_bounds__(256) apply_clamped(const __grid_constant__ Gated p) {
    gated<CLAMPED, false>(p);
}
