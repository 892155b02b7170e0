// Activations and their derivatives, in f32. GELU is x Φ(x), and TANH_GELU its approximation by tanh (Hendrycks and
// Gimpel, "Gaussian Error Linear Units", 2016).

enum Function { IDENTITY = 0, RELU = 1, GELU = 2, SILU = 3, SQUARED_RELU = 4, TANH_GELU = 5 };

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
// Returns the cumulative distribution function of the normal distribution.
__device__ __forceinline__ float cumulative(float x) { return 0.5f * (1.0f + erff(x * 0.70710678f)); }

// Returns the argument of the tanh of GELU's approximation.
__device__ __forceinline__ float inner(float x) { return 0.79788456f * (x + 0.044715f * x * x * x); }

template <int F> __device__ __forceinline__ float value(float x) {
    if (F == RELU) return x < 0.0f ? 0.0f : x;
    if (F == GELU) return x * cumulative(x);
    if (F == SILU) return x * sigmoid(x);
    if (F == SQUARED_RELU) return x < 0.0f ? 0.0f : x * x;
    if (F == TANH_GELU) return 0.5f * x * (1.0f + tanhf(inner(x)));
    return x;
}

template <int F> __device__ __forceinline__ float slope(float x) {
    if (F == RELU) return x > 0.0f ? 1.0f : 0.0f;
    if (F == GELU) {
        const float density = 0.39894228f * expf(-0.5f * x * x);
        return density == 0.0f ? cumulative(x) : cumulative(x) + x * density;
    }
    if (F == SILU) {
        const float s = sigmoid(x), rise = s * (1.0f - s);
        return rise == 0.0f ? s : s + x * rise;
    }
    if (F == SQUARED_RELU) return x < 0.0f ? 0.0f : 2.0f * x;
    if (F == TANH_GELU) {
        const float t = tanhf(inner(x)), rise = 1.0f - t * t;
        const float half = 0.5f * (1.0f + t);
        return rise == 0.0f ? half : half + 0.5f * x * rise * 0.79788456f * (1.0f + 0.134145f * x * x);
    }
    return 1.0f;
}

// Returns half of erfc(|x| / sqrt 2) by Abramowitz and Stegun 7.1.26, whose error is at most 7.5e-8, and exp(-x²/2),
// which it is a multiple of.
__device__ __forceinline__ float quick_tail(float x, float& power) {
    float t;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(fabsf(x), 0.3275911f * 0.70710678f, 1.0f)));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * x * -0.72134752f));
    float series = fmaf(1.061405429f, t, -1.453152027f);
    series = fmaf(series, t, 1.421413741f);
    series = fmaf(series, t, -0.284496736f);
    series = fmaf(series, t, 0.254829592f);
    return 0.5f * (series * t * power);
}

// The function and its derivative with errors far below the rounding of 16-bit types. GELU in this form takes a third
// of the instructions of erff and expf, which keep a pass from the bandwidth limit.
template <int F> __device__ __forceinline__ float quick_value(float x) {
    if (F != GELU) return value<F>(x);
    float power;
    const float tail = quick_tail(x, power);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}
template <int F> __device__ __forceinline__ float quick_slope(float x) {
    if (F != GELU) return slope<F>(x);
    float power;
    const float tail = quick_tail(x, power), cumulative = x < 0.0f ? tail : 1.0f - tail;
    return power == 0.0f ? cumulative : fmaf(x * 0.39894228f, power, cumulative);
}

// The same for numbers of a type: f32 has the precise functions.
template <int F, int E> __device__ __forceinline__ float value_in(float x) {
    return E == F32 ? value<F>(x) : quick_value<F>(x);
}
template <int F, int E> __device__ __forceinline__ float slope_in(float x) {
    return E == F32 ? slope<F>(x) : quick_slope<F>(x);
}
