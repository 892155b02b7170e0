// Data types, conversions and compile-time loops that all kernels use. No header is included, because NVRTC compiles
// this without a CUDA toolkit.
//
// Elements are raw bits here, with the numbers of `twofour_cuda::DataType`.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum Element { F32 = 0, F16 = 1, BF16 = 2, E4M3 = 3, E5M2 = 4, I8 = 5, I32 = 6 };

template <int E> struct Bits;
template <> struct Bits<F32> { typedef u32 type; };
template <> struct Bits<F16> { typedef u16 type; };
template <> struct Bits<BF16> { typedef u16 type; };
template <> struct Bits<E4M3> { typedef u8 type; };
template <> struct Bits<E5M2> { typedef u8 type; };
template <> struct Bits<I8> { typedef u8 type; };
template <> struct Bits<I32> { typedef u32 type; };

// Returns an element as f32; exact.
template <int E> __device__ __forceinline__ float widen(typename Bits<E>::type bits);
template <> __device__ __forceinline__ float widen<F32>(u32 bits) { return __uint_as_float(bits); }
template <> __device__ __forceinline__ float widen<BF16>(u16 bits) { return __uint_as_float((u32)bits << 16); }
template <> __device__ __forceinline__ float widen<F16>(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Returns the element nearest to an f32, ties to even.
template <int E> __device__ __forceinline__ typename Bits<E>::type narrow(float value);
template <> __device__ __forceinline__ u32 narrow<F32>(float value) { return __float_as_uint(value); }
template <> __device__ __forceinline__ u16 narrow<BF16>(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
template <> __device__ __forceinline__ u16 narrow<F16>(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// 8-bit floats saturate; before sm_89 there is no conversion.
template <> __device__ __forceinline__ u8 narrow<E4M3>(float value) {
    u16 bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(value));
    return (u8)bits;
}
template <> __device__ __forceinline__ u8 narrow<E5M2>(float value) {
    u16 bits;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(value));
    return (u8)bits;
}

// Runs `f(Int<0>)`, `f(Int<1>)`, ..., so that every index is a compile-time constant and arrays stay in registers.
template <int I> struct Int { static constexpr int value = I; };
template <int I, int N> struct Unrolled {
    template <class F> __device__ __forceinline__ static void run(F& f) {
        f(Int<I>());
        Unrolled<I + 1, N>::run(f);
    }
};
template <int N> struct Unrolled<N, N> {
    template <class F> __device__ __forceinline__ static void run(F&) {}
};
template <int N, class F> __device__ __forceinline__ void unrolled(F f) { Unrolled<0, N>::run(f); }

// Returns the address of shared memory as instructions take it.
__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
