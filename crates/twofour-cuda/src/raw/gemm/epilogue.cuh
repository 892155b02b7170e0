// The epilogue of a GEMM: scales, bias, activation and stores. `Sum`, the type of an accumulator, is defined outside.

// The output and the epilogue. Pointers are null where there are no scales or no bias.
struct Output {
    void* data;
    const void* bias;        // bias of each feature
    const float* feature_scales;
    const float* token_scales;
    u64 stride_feature, stride_token;
    float alpha;
    u32 activation;
    // One of `StoreKind`.
    u32 store_kind;
    const void* token_bias;  // bias of each token
    // Whether results are added to the output: each is rounded first, and then the sum of both.
    u32 accumulate;
};

// PLAIN: without an epilogue. BIAS: its only operation is to add a bias of features. FINISHED: any other. In vectors of
// 8: eight features can be stored at once where they are contiguous. Odd values are plain.
enum StoreKind {
    FINISHED_EACH = 0,
    PLAIN_VECTORS_OF_8 = 1,
    BIAS_VECTORS_OF_8 = 2,
    PLAIN_EACH = 3,
    FINISHED_VECTORS_OF_8 = 4
};

// The epilogues that a kernel has fast code for: it computes any other one result at a time. WITHOUT is for none.
// LINEAR: scales, biases and ReLU. ACTIVATED: the same with GELU or SiLU. Kernels are compiled for one, because code
// that a launch does not run slows it down, too (docs/explanation/kernels/cuda-gemm.md).
enum KernelEpilogue { WITHOUT = 0, LINEAR = 1, ACTIVATED = 2, EVERY = 3 };
// In place of the results' type where it comes with the launch.
constexpr u32 ANY_OUTPUT = 99;

enum Activation { NONE = 0, RELU = 1, GELU = 2, SILU = 3 };

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The larger number, or NaN where one is.
__device__ __forceinline__ float larger(float a, float b) {
    float most;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
    return most;
}

// GELU as max(x, 0) - |x| Φ(-|x|), which has no cancellation for negative x. Φ(-|x|) is half of erfc(|x| / sqrt 2) by
// Abramowitz and Stegun 7.1.26, whose error is at most 1.5e-7. The factor is never infinite, because Φ is 0 there.
__device__ __forceinline__ float gelu(float x) {
    const float away = fminf(fabsf(x), 128.0f), t = reciprocal(fmaf(away, 0.3275911f * 0.70710678f, 1.0f));
    float series = fmaf(1.061405429f, t, -1.453152027f);
    series = fmaf(series, t, 1.421413741f);
    series = fmaf(series, t, -0.284496736f);
    series = fmaf(series, t, 0.254829592f);
    // `away` is a number for NaN, too; the maximum is NaN.
    return fmaf(-0.5f * away, series * t * power_of_two(away * away * -0.72134752f), larger(x, 0.0f));
}

// GELU for results of 16 bits in two thirds of the instructions: the base-2 logarithm of Φ(-|x|) is the polynomial of
// degree 7 with the least maximum error from 0 to 8, 4.6e-5, so 3.2e-5 of Φ (f16 rounds by 2.4e-4). Further out, where
// Φ is below 1e-15, it falls faster than Φ.
__device__ __forceinline__ float short_gelu(float x) {
    const float away = fminf(fabsf(x), 128.0f);
    float power = fmaf(-1.26245743e-06f, away, 4.82032774e-05f);
    power = fmaf(power, away, -0.000807248231f);
    power = fmaf(power, away, 0.00794457924f);
    power = fmaf(power, away, -0.0526353866f);
    power = fmaf(power, away, -0.459956825f);
    power = fmaf(power, away, -1.15060997f);
    power = fmaf(power, away, -1.00004303f);
    return fmaf(-away, power_of_two(power), larger(x, 0.0f));
}

// The activation for results of type E. The template is for unrolled code over many accumulators, the overload with a
// runtime argument for loops over few.
template <int A, int E> __device__ __forceinline__ float activated(float x) {
    if (A == RELU) return x < 0.0f ? 0.0f : x;
    if (A == GELU) return E == F32 ? gelu(x) : short_gelu(x);
    if (A == SILU) return x * reciprocal(1.0f + power_of_two(x * -1.44269504f));
    return x;
}

template <int E> __device__ __forceinline__ float activated(u32 activation, float x) {
    if (activation == RELU) return activated<RELU, E>(x);
    if (activation == GELU) return activated<GELU, E>(x);
    if (activation == SILU) return activated<SILU, E>(x);
    return x;
}

// Calls `f` with the activation as a compile-time constant, so that it is tested once for many results, and so that a
// call fetches the instructions of its activation only.
template <class F> __device__ __forceinline__ void by_activation(const Output& to, F f) {
    if (to.activation == RELU) f(Int<RELU>());
    else if (to.activation == GELU) f(Int<GELU>());
    else if (to.activation == SILU) f(Int<SILU>());
    else f(Int<NONE>());
}

__device__ __forceinline__ bool has_epilogue(const Output& to) { return to.store_kind % 2 == 0; }
// Whether results have an epilogue and can be stored in vectors of 8 elements of 16 bits.
__device__ __forceinline__ bool is_finished_in_vectors(const Output& to, u32 output) {
    return (to.store_kind == BIAS_VECTORS_OF_8 || to.store_kind == FINISHED_VECTORS_OF_8) && to.stride_feature == 1 &&
           (output == F16 || output == BF16);
}

// Returns the product of an accumulator's scales.
__device__ __forceinline__ float scale_of(const Output& to, u32 f, u32 t) {
    float scale = to.alpha;
    if (to.feature_scales) scale *= to.feature_scales[f];
    if (to.token_scales) scale *= to.token_scales[t];
    return scale;
}

// Accumulators as 32-bit words.
__device__ __forceinline__ u32 bits_of(float sum) { return __float_as_uint(sum); }
__device__ __forceinline__ u32 bits_of(int sum) { return sum; }
__device__ __forceinline__ void of_bits(float& sum, u32 bits) { sum = __uint_as_float(bits); }
__device__ __forceinline__ void of_bits(int& sum, u32 bits) { sum = bits; }

// Returns four contiguous words of shared memory.
__device__ __forceinline__ uint4 four_words(u32 address) {
    uint4 four;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
        : "r"(address)
        : "memory");
    return four;
}

// Adds four contiguous accumulators of shared memory to four in registers.
__device__ __forceinline__ void add_four(Sum (&sums)[4], u32 address) {
    const uint4 four = four_words(address);
    const u32 bits[4] = {four.x, four.y, four.z, four.w};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        Sum part;
        of_bits(part, bits[i]);
        sums[i] += part;
    }
}

// Conversions of accumulators to results of type E.
template <int E> struct Result {
    typedef typename Bits<E>::type Type;
    static __device__ __forceinline__ Type of(Sum, float finished) { return narrow<E>(finished); }
    static __device__ __forceinline__ float bias(const void* bias, u32 row) {
        return widen<E>(((const Type*)bias)[row]);
    }
    static __device__ __forceinline__ Type plus(Type there, Type result) {
        return narrow<E>(widen<E>(there) + widen<E>(result));
    }
};
template <> struct Result<I32> {
    typedef u32 Type;
    static __device__ __forceinline__ Type of(Sum sum, float) { return sum; }
    static __device__ __forceinline__ float bias(const void*, u32) { return 0.0f; }
    static __device__ __forceinline__ u32 plus(u32 there, u32 result) { return there + result; }
};

__device__ __forceinline__ float bias_at(const void* bias, u32 output, u32 at) {
    return output == F16    ? Result<F16>::bias(bias, at)
           : output == BF16 ? Result<BF16>::bias(bias, at)
                            : Result<F32>::bias(bias, at);
}

// Returns an accumulator times its scales, plus its biases.
__device__ __forceinline__ float scaled(const Output& to, u32 output, float sum, u32 f, u32 t) {
    const float result = fmaf(sum, scale_of(to, f, t), to.bias ? bias_at(to.bias, output, f) : 0.0f);
    return to.token_bias ? result + bias_at(to.token_bias, output, t) : result;
}

// Stores a result, or adds it to the output.
template <int E> __device__ __forceinline__ void put(const Output& to, u64 at, typename Result<E>::Type result) {
    typename Result<E>::Type* there = (typename Result<E>::Type*)to.data + at;
    *there = to.accumulate ? Result<E>::plus(*there, result) : result;
}

// Stores the result of one accumulator. The output type is a runtime argument, because there are few. PLAIN is a
// template argument, so that calls without an epilogue need not fetch its instructions.
template <bool PLAIN> __device__ __forceinline__ void store(const Output& to, u32 output, Sum sum, u32 f, u32 t) {
    const u64 at = f * to.stride_feature + t * to.stride_token;
    if (output == I32) return put<I32>(to, at, Result<I32>::of(sum, 0.0f));
    const float result = PLAIN ? (float)sum : activated<F32>(to.activation, scaled(to, output, (float)sum, f, t));
    if (output == F32) return put<F32>(to, at, __float_as_uint(result));
    u16* there = (u16*)to.data + at;
    u16 bits = output == F16 ? narrow<F16>(result) : narrow<BF16>(result);
    if (to.accumulate) bits = output == F16 ? Result<F16>::plus(*there, bits) : Result<BF16>::plus(*there, bits);
    *there = bits;
}
__device__ __forceinline__ void store(const Output& to, u32 output, Sum sum, u32 f, u32 t) {
    if (!has_epilogue(to)) store<true>(to, output, sum, f, t);
    else store<false>(to, output, sum, f, t);
}

// Results that one vector store can write, in vectors of 8 contiguous features: with which epilogue and of which type;
// or ANY for all others, and ANY_PLAIN for those without an epilogue.
enum Kind { ANY, ANY_PLAIN, PLAIN_F16, PLAIN_BF16, PLAIN_32_BITS, BIAS_F16, BIAS_BF16, FINISHED_F16, FINISHED_BF16 };

__device__ constexpr bool is_plain(int kind) { return kind == PLAIN_F16 || kind == PLAIN_BF16; }
__device__ constexpr bool is_biased(int kind) { return kind == BIAS_F16 || kind == BIAS_BF16; }
__device__ constexpr bool is_finished(int kind) { return kind == FINISHED_F16 || kind == FINISHED_BF16; }
__device__ constexpr bool is_of_f16(int kind) { return kind == PLAIN_F16 || kind == BIAS_F16 || kind == FINISHED_F16; }

// Calls `f` with the kind as a compile-time constant, so that it is tested once and not for every result, and so that a
// call fetches the instructions of its kind only.
template <class F> __device__ __forceinline__ void by_kind(const Output& to, u32 output, F f) {
    const bool halves = output == F16 || output == BF16, plain = to.store_kind == PLAIN_VECTORS_OF_8;
    if (to.stride_feature != 1 || to.store_kind == FINISHED_EACH || to.store_kind == PLAIN_EACH || (!halves && !plain))
        f(Int<ANY>());
    else if (!halves) f(Int<PLAIN_32_BITS>());
    else if (to.store_kind == FINISHED_VECTORS_OF_8 && output == F16) f(Int<FINISHED_F16>());
    else if (to.store_kind == FINISHED_VECTORS_OF_8) f(Int<FINISHED_BF16>());
    else if (to.store_kind == BIAS_VECTORS_OF_8 && output == F16) f(Int<BIAS_F16>());
    else if (to.store_kind == BIAS_VECTORS_OF_8) f(Int<BIAS_BF16>());
    else if (output == F16) f(Int<PLAIN_F16>());
    else f(Int<PLAIN_BF16>());
}

// Calls `f` with the kind of 16-bit results and an activation.
template <int OF_F16, int OF_BF16, int A, class F> __device__ __forceinline__ void by_half(u32 output, F f) {
    if (output == F16) f(Int<OF_F16>(), Int<A>());
    else f(Int<OF_BF16>(), Int<A>());
}

// As `by_kind`, for a kernel with fast code for some epilogues: calls `f` with the kind, and with the activation, where
// NONE stands for ReLU, too. What is rare is tested first: the compiler places what is tested last next to the main
// loop.
template <int KERNEL, class F> __device__ __forceinline__ void by_epilogue(const Output& to, u32 output, F f) {
    const bool each = to.stride_feature != 1 || to.store_kind == FINISHED_EACH || to.store_kind == PLAIN_EACH,
               halves = output == F16 || output == BF16;
    if constexpr (KERNEL == WITHOUT) {
        if (each) f(Int<ANY_PLAIN>(), Int<NONE>());
        else if (!halves) f(Int<PLAIN_32_BITS>(), Int<NONE>());
        else by_half<PLAIN_F16, PLAIN_BF16, NONE>(output, f);
    } else {
        const bool fast =
            (KERNEL != LINEAR || to.activation <= RELU) && (KERNEL != ACTIVATED || to.activation > RELU);
        if (KERNEL == EVERY && to.store_kind == PLAIN_VECTORS_OF_8 && !each && !halves)
            return f(Int<PLAIN_32_BITS>(), Int<NONE>());
        if (each || !halves || !fast) return f(Int<ANY>(), Int<NONE>());
        if constexpr (KERNEL != LINEAR) {
            if (to.activation == SILU) return by_half<FINISHED_F16, FINISHED_BF16, SILU>(output, f);
            if (KERNEL == ACTIVATED || to.activation == GELU)
                return by_half<FINISHED_F16, FINISHED_BF16, GELU>(output, f);
        }
        if constexpr (KERNEL != ACTIVATED) {
            if (to.store_kind == FINISHED_VECTORS_OF_8) return by_half<FINISHED_F16, FINISHED_BF16, NONE>(output, f);
            // Without an epilogue the bias is null.
            by_half<BIAS_F16, BIAS_BF16, NONE>(output, f);
        }
    }
}

// Asks L2 for the biases and scales of `rows` features, and of `tokens` tokens: at the end of the main loop they are
// then near. Each of the first threads takes eight features and 32 tokens.
__device__ __forceinline__ void ask_for_features(
    const Output& to, u32 output, u32 features, u32 feature, u32 rows, u32 thread) {
    const u32 f = feature + thread * 8;
    if (!has_epilogue(to) || thread * 8 >= rows || f >= features) return;
    if (to.bias) asm volatile("prefetch.global.L2 [%0];" ::"l"((const u8*)to.bias + (u64)f * (output == F32 ? 4 : 2)));
    if (to.feature_scales) asm volatile("prefetch.global.L2 [%0];" ::"l"(to.feature_scales + f));
}
__device__ __forceinline__ void ask_for_tokens(const Output& to, u32 token, u32 tokens, u32 thread) {
    if (to.token_scales && thread * 32 < tokens)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(to.token_scales + token + thread * 32));
}

// What the epilogue of 16-bit results does with a feature, and with a token: 1 and 0 past the end.
struct Factors { float scale, bias; };
template <int KIND> __device__ __forceinline__ float half_at(const void* values, u32 at) {
    return widen<is_of_f16(KIND) ? F16 : BF16>(((const u16*)values)[at]);
}
template <int KIND> __device__ __forceinline__ Factors factors_of_feature(const Output& to, u32 features, u32 f) {
    if (f >= features) return {1.0f, 0.0f};
    return {to.feature_scales ? to.alpha * to.feature_scales[f] : to.alpha, to.bias ? half_at<KIND>(to.bias, f) : 0.0f};
}
template <int KIND> __device__ __forceinline__ Factors factors_of_token(const Output& to, u32 tokens, u32 t) {
    if (t >= tokens) return {1.0f, 0.0f};
    return {to.token_scales ? to.token_scales[t] : 1.0f, to.token_bias ? half_at<KIND>(to.token_bias, t) : 0.0f};
}
// Returns an accumulator times its scales, plus its biases.
__device__ __forceinline__ float scaled(float sum, const Factors& feature, const Factors& token) {
    return fmaf(sum, feature.scale * token.scale, feature.bias) + token.bias;
}

// Returns two results as neighbours in one word.
template <int KIND> __device__ __forceinline__ u32 narrow_two(float first, float second) {
    u32 two;
    if (is_of_f16(KIND)) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(second), "f"(first));
    return two;
}

// Stores four neighbouring results, or as many as there are features: without an epilogue or, with ANY, after whichever
// there is. The first feature is a multiple of four.
template <int KIND> __device__ __forceinline__ void store_neighbours(
    const Output& to, u32 output, const Sum (&sums)[4], u32 features, u32 f, u32 t) {
    const u64 at = f + t * to.stride_token;
    if (KIND == ANY || KIND == ANY_PLAIN) {
        #pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (f + i >= features) continue;
            if (KIND == ANY_PLAIN) store<true>(to, output, sums[i], f + i, t);
            else store(to, output, sums[i], f + i, t);
        }
    } else if (KIND == PLAIN_32_BITS) {
        *(uint4*)((u32*)to.data + at) =
            make_uint4(bits_of(sums[0]), bits_of(sums[1]), bits_of(sums[2]), bits_of(sums[3]));
    } else {
        *(uint2*)((u16*)to.data + at) = make_uint2(
            narrow_two<KIND>((float)sums[0], (float)sums[1]), narrow_two<KIND>((float)sums[2], (float)sums[3]));
    }
}
