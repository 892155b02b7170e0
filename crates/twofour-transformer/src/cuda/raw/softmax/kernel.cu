// Softmax of the rows of attention scores, and its gradient. A CTA computes a row. A query attends to the keys from
// `begin` to `end`: under a causal mask none behind it, and with a window none at a distance of `window` or more. The
// rest of its probabilities are zeros; their scores are not read.
//
// Defined outside: ELEMENT.

struct Softmax {
    const float* scores;  // [rows, positions]: scores, or the gradient of probabilities
    void* probabilities;  // [rows, positions]; may be `scores` for f32
    float* lse;           // [rows]: log-sum-exp of scaled and capped scores
    // [rows, positions]: scores again, for the gradient through a soft cap; may be null without one
    const float* capped;
    u32 positions;
    float scale;
    u32 causal;
    u32 window;           // at most 2^31 - 1
    float soft_cap;       // 0 for none
};

__device__ __forceinline__ u32 begin_of(const Softmax& p, u32 position) {
    return position >= p.window ? position - p.window + 1 : 0;
}
__device__ __forceinline__ u32 end_of(const Softmax& p, u32 position) {
    return p.causal ? position + 1 : min(position + p.window, p.positions);
}

__device__ __forceinline__ float tanh_of(float x) { return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x)); }

// Returns a score, scaled and capped.
__device__ __forceinline__ float score_of(const Softmax& p, float product) {
    const float score = product * p.scale;
    return p.soft_cap > 0.0f ? p.soft_cap * tanh_of(score / p.soft_cap) : score;
}

extern "C" __global__ void __launch_bounds__(256) forward(const __grid_constant__ Softmax p) {
    __shared__ float shared[32];
    const u64 start = (u64)blockIdx.x * p.positions;
    const u32 position = blockIdx.x % p.positions, begin = begin_of(p, position), end = end_of(p, position);
    const float* scores = p.scores + start;
    Raw* to = (Raw*)p.probabilities + start;
    float most = -INFINITE;
    for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) most = fmaxf(most, score_of(p, scores[i]));
    most = largest_of_block(most, shared);
    float sum = 0.0f;
    for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) sum += __expf(score_of(p, scores[i]) - most);
    sum = sum_of_block(sum, shared);
    const float inverse = 1.0f / sum;
    for (u32 i = threadIdx.x; i < p.positions; i += blockDim.x) {
        to[i] = narrow<ELEMENT>(i >= begin && i < end ? __expf(score_of(p, scores[i]) - most) * inverse : 0.0f);
    }
    if (threadIdx.x == 0) p.lse[blockIdx.x] = most + logf(sum);
}

// probabilities ← scale probabilities (gradient - Σ probabilities gradient) (1 - (score / soft_cap)²)
extern "C" __global__ void __launch_bounds__(256) backward(const __grid_constant__ Softmax p) {
    __shared__ float shared[32];
    const u64 start = (u64)blockIdx.x * p.positions;
    const u32 position = blockIdx.x % p.positions, begin = begin_of(p, position), end = end_of(p, position);
    const float* gradient = p.scores + start;
    Raw* probabilities = (Raw*)p.probabilities + start;
    float sum = 0.0f;
    for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) sum += widen<ELEMENT>(probabilities[i]) * gradient[i];
    sum = sum_of_block(sum, shared);
    for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) {
        float slope = p.scale * widen<ELEMENT>(probabilities[i]) * (gradient[i] - sum);
        if (p.soft_cap > 0.0f) {
            const float t = tanh_of(p.capped[start + i] * p.scale / p.soft_cap);
            slope *= 1.0f - t * t;
        }
        probabilities[i] = narrow<ELEMENT>(slope);
    }
}
