// Pairs of numbers in a register or in memory: rounding, byte permutation and stores, as in crate twofour's
// compressed/mod.rs.

// Two numbers of BYTES bytes each, side by side; and the pairs of four groups.
template <int BYTES> struct Pair;
template <> struct Pair<1> { typedef u16 type; };
template <> struct Pair<2> { typedef u32 type; };
template <> struct Pair<4> { typedef u64 type; };
template <class P> struct __align__(4 * sizeof(P)) FourPairs { P of[4]; };

// Returns four of the eight bytes of two words.
__device__ __forceinline__ u32 permute(u32 low, u32 high, u32 bytes) {
    u32 result;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(bytes));
    return result;
}

// Rounds two f32s as `narrow` does, the first into the lower part.
template <int E>
__device__ __forceinline__ typename Pair<sizeof(typename Bits<E>::type)>::type narrow_two(float first, float second) {
    typename Pair<sizeof(typename Bits<E>::type)>::type bits;
    if constexpr (E == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    if constexpr (E == F16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    if constexpr (E == E4M3) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
    if constexpr (E == E5M2) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
    return bits;
}

// Replaces -0.0 by +0.0 in 16-bit numbers: x * 1 + 0 is x for all others.
template <int E> __device__ __forceinline__ u32 plus_zeros(u32 pair) {
    if constexpr (E == BF16) asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(0x3F803F80u), "r"(0u));
    else asm("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(0x3C003C00u), "r"(0u));
    return pair;
}
