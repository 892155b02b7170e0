// A step of stochastic gradient descent with momentum on f32 weights, with decay of the elements that a mask of 4x4
// tiles prunes, in one pass. Results are bit for bit those of twofour-nn on the CPU, because no operations are
// contracted to FMA.

struct Sgd {
    float* weight;
    const float* gradient;
    float* momentum;
    const u16* tiles;            // [rows / 4, cols / 4], or null
    const float* gradient_scale; // or null
    u16* copy;                   // the weight in 16 bits, written in the same pass, or null
    const u32* skip;             // where it is not 0, nothing is written; or null
    u64 count;
    u32 cols;
    u32 copy_is_bf16;
    float weight_decay, pruned_decay; // added to the gradient: of all elements, and of pruned ones
    float pruned_left;                // what is left of pruned elements by decay of weights
    float momentum_rate, learning_rate;
};

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }

// A thread updates four elements, which are in one row where there is a mask.
extern "C" __global__ void __launch_bounds__(256) step(const __grid_constant__ Sgd p) {
    const u64 first = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (first >= p.count || (p.skip && *p.skip)) return;
    const float scale = p.gradient_scale ? *p.gradient_scale : 1.0f;
    u32 kept = 15;
    if (p.tiles) {
        const u64 row = first / p.cols;
        const u32 col = (u32)(first - row * p.cols);
        kept = p.tiles[row / 4 * (p.cols / 4) + col / 4] >> 4 * (row % 4);
    }
    for (u32 i = 0; i < 4 && first + i < p.count; i++) {
        const u64 at = first + i;
        const bool is_kept = kept >> i & 1;
        float w = p.weight[at], g = times(p.gradient[at], scale);
        g = add(g, times(p.weight_decay, w));
        if (!is_kept) g = add(g, times(p.pruned_decay, w));
        const float m = add(times(p.momentum[at], p.momentum_rate), g);
        if (!is_kept) w = times(w, p.pruned_left);
        w = add(w, -times(m, p.learning_rate));
        p.momentum[at] = m;
        p.weight[at] = w;
        if (p.copy) p.copy[at] = p.copy_is_bf16 ? narrow<BF16>(w) : narrow<F16>(w);
    }
}
