// Softmax of the rows of attention scores, and its gradient. A CTA computes a row. Under a causal mask, row `position` has position + 1 scores, and the rest of its
// probabilities are zeros; scores beyond are not read.
//
// Defined outside: ELEMENT.

struct Softmax {
    const float* scores;  // [rows, positions]: scores, or the gradient of probabilities
    void* probabilities;  // [rows, positions]; may be `scores` for f32
    float* lse;           // [rows]: log-sum-exp of scaled scores
    u32 positions;
    float scale;
    u32 causal;
};

extern "C" __global__ void __launch_bounds__(256) forward(const __grid_constant__ Softmax p) {
    __shared__ float shared[32];
    const u64 start = (u64)blockIdx.x * p.positions;
    const u32 position = blockIdx.x % p.positions, kept = p.causal ? position + 1 : p.positions;
    const float* scores = p.scores + start;
    Raw* to = (Raw*)p.probabilities + start;
    float most = -INFINITE;
    for (u32 i = threadIdx.x; i < kept; i += blockDim.x) most = fmaxf(most, scores[i] * p.scale);
    most = largest_of_block(most, shared);
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < kept; i += blockDim.x) sum += __expf(scores[i] * p.scale - most);
    sum = sum_of_block(sum, shared);
    const float inverse = 1.0f / sum;
    for (u32 i = threadIdx.x; i < p.positions; i += blockDim.x) {
        to[i] = narrow<ELEMENT>(i < kept ? __expf(scores[i] * p.scale - most) * inverse : 0.0f);
    }
    if (threadIdx.x == 0) p.lse[blockIdx.x] = most + logf(sum);
}

// probabilities ← scale probabilities (gradient - Σ probabilities gradient)
extern "C" __global__ void __launch_bounds__(256) backward(const __grid_constant__ Softmax p) {
    __shared__ float shared[32];
    const u64 start = (u64)blockIdx.x * p.positions;
    const u32 position = blockIdx.x % p.positions, kept = p.causal ? position + 1 : p.positions;
    const float* gradient = p.scores + start;
    Raw* probabilities = (Raw*)p.probabilities + start;
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < kept; i += blockDim.x) sum += widen<ELEMENT>(probabilities[i]) * gradient[i];
    sum = sum_of_block(sum, shared);
    for (u32 i = threadIdx.x; i < kept; i += blockDim.x) {
        probabilities[i] = narrow<ELEMENT>(p.scale * widen<ELEMENT>(probabilities[i]) * (gradient[i] - sum));
    }
}
