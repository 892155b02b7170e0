// Sums, conversions, constants and soft caps, element by element.
//
// Defined outside: ELEMENT.

struct Pointwise {
    const void* a;
    const void* b;
    void* out;
    u64 count;
    float value;
};

// Calls `f` with an index and a number of elements, WIDTH where all tensors are `aligned`.
template <class F> __device__ __forceinline__ void each(u64 count, bool aligned, F f) {
    const u64 at = (u64)WIDTH * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (aligned && at + WIDTH <= count) {
        f(at, Int<WIDTH>());
        return;
    }
    for (u32 i = 0; i < WIDTH && at + i < count; i++) f(at + i, Int<1>());
}

extern "C" __global__ void __launch_bounds__(256) add(const __grid_constant__ Pointwise p) {
    each(p.count, (((u64)p.a | (u64)p.b | (u64)p.out) & 15) == 0, [&](u64 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N], b[N];
        load<N>((const Raw*)p.a + at, a);
        load<N>((const Raw*)p.b + at, b);
        unrolled<N>([&](auto i) { a[i.value] += b[i.value]; });
        store<N>((Raw*)p.out + at, a);
    });
}

extern "C" __global__ void __launch_bounds__(256) from_f32(const __grid_constant__ Pointwise p) {
    each(p.count, ((u64)p.out & 15) == 0, [&](u64 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N];
        load_f32<N>((const float*)p.a + at, a);
        store<N>((Raw*)p.out + at, a);
    });
}

extern "C" __global__ void __launch_bounds__(256) to_f32(const __grid_constant__ Pointwise p) {
    each(p.count, ((u64)p.a & 15) == 0, [&](u64 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N];
        load<N>((const Raw*)p.a + at, a);
        store_f32<N>((float*)p.out + at, a);
    });
}

extern "C" __global__ void __launch_bounds__(256) scale(const __grid_constant__ Pointwise p) {
    each(p.count, (((u64)p.a | (u64)p.out) & 15) == 0, [&](u64 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N];
        load<N>((const Raw*)p.a + at, a);
        unrolled<N>([&](auto i) { a[i.value] *= p.value; });
        store<N>((Raw*)p.out + at, a);
    });
}

__device__ __forceinline__ float tanh_of(float x) { return 1.0f - 2.0f / (1.0f + expf(2.0f * x)); }

extern "C" __global__ void __launch_bounds__(256) bound(const __grid_constant__ Pointwise p) {
    each(p.count, (((u64)p.a | (u64)p.out) & 15) == 0, [&](u64 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N];
        load<N>((const Raw*)p.a + at, a);
        unrolled<N>([&](auto i) { a[i.value] = p.value * tanh_of(a[i.value] / p.value); });
        store<N>((Raw*)p.out + at, a);
    });
}

extern "C" __global__ void __launch_bounds__(256) bound_gradient(const __grid_constant__ Pointwise p) {
    each(p.count, (((u64)p.a | (u64)p.b | (u64)p.out) & 15) == 0, [&](u64 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N], b[N];
        load<N>((const Raw*)p.a + at, a);
        load<N>((const Raw*)p.b + at, b);
        unrolled<N>([&](auto i) {
            const float t = tanh_of(a[i.value] / p.value);
            b[i.value] *= 1.0f - t * t;
        });
        store<N>((Raw*)p.out + at, b);
    });
}

extern "C" __global__ void __launch_bounds__(256) fill(const __grid_constant__ Pointwise p) {
    each(p.count, ((u64)p.out & 15) == 0, [&](u64 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N];
        unrolled<N>([&](auto i) { a[i.value] = p.value; });
        store<N>((Raw*)p.out + at, a);
    });
}
