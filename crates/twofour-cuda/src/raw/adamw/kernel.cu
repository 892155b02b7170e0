// An AdamW step on f32 weights, with masked decay of the elements that a mask of 4x4 tiles prunes, in one pass. Results
// are bit for bit those of twofour-candle and twofour-nn on the CPU, because no operations are contracted to FMA. The
// second moment moves, moves and is watched, or is frozen (STEP: Lu et al., ICML 2023); pruned elements may also decay
// decoupled from the moments.
//
// Defined outside: GRADIENT.

// The constants of a step that depend on its number and learning rate.
struct Numbers {
    float decay, first_scale, second_scale, learning_rate;
};

struct Parameters {
    float* weight;
    const void* gradient;
    float* first;
    float* second;
    const u16* tiles;            // [rows / 4, cols / 4], or null
    const float* gradient_scale; // or null
    const Numbers* numbers_at;   // read instead of `numbers`, or null
    u16* copy;                   // the weight in 16 bits, written in the same pass, or null
    const u32* skip;             // where it is not 0, nothing is written; or null
    const double* rate_at;       // read instead of `rate`, or null
    // of each CTA, the sum of the second moment's changes; for `watched_step`, `logarithm_step`
    double* partial;
    u64 count;
    // what is taken off pruned elements where `decays_pruned`: their product, times the element
    double rate, pruned_decay;
    u32 cols;
    u32 copy_is_bf16;
    u32 is_frozen;               // the second moment stays, and `frozen_scale` corrects it
    u32 decays_pruned;
    float masked_decay, beta1, rest1, beta2, rest2, epsilon, frozen_scale;
    Numbers numbers;
};

typedef Bits<GRADIENT>::type Raw;
struct __align__(4 * sizeof(Raw)) FourRaw { Raw of[4]; };

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }

// Updates an element and returns the magnitude of its second moment's change. `pruned_left` is what decay leaves of
// pruned elements.
__device__ __forceinline__ float update(const Parameters& p, const Numbers& n, float pruned_left, float scale,
    bool kept, float& w, float g, float& m, float& v) {
    g = times(g, scale);
    if (!kept) g = add(g, times(p.masked_decay, w));
    m = add(times(m, p.beta1), times(g, p.rest1));
    const float before = v;
    if (!p.is_frozen) v = add(times(v, p.beta2), times(times(g, g), p.rest2));
    const float step = __fdiv_rn(times(m, n.first_scale), add(__fsqrt_rn(times(v, n.second_scale)), p.epsilon));
    w = add(times(w, kept ? n.decay : pruned_left), -times(step, n.learning_rate));
    return fabsf(add(v, -before));
}

__device__ __forceinline__ u16 copied(const Parameters& p, float w) {
    return p.copy_is_bf16 ? narrow<BF16>(w) : narrow<F16>(w);
}

// What is summed of a second moment's change: nothing, its magnitude, or that one's logarithm (STEP's option 2).
enum Watch { NOTHING, MAGNITUDE, LOGARITHM };

template <Watch WATCHED> __device__ __forceinline__ double size_of(float change) {
    return WATCHED == LOGARITHM ? log((double)fmaxf(change, 1.17549435e-38f)) : (double)change;
}

// A thread updates four elements, which are in one row where there is a mask. Returns the sum of the changes of their
// second moments where it is watched.
template <Watch WATCHED> __device__ __forceinline__ double update_four(const Parameters& p) {
    const u64 at = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= p.count || (p.skip && *p.skip)) return 0.0;
    const float scale = p.gradient_scale ? *p.gradient_scale : 1.0f;
    Numbers n = p.numbers_at ? *p.numbers_at : p.numbers;
    if (p.is_frozen) n.second_scale = p.frozen_scale;
    const float left =
        p.decays_pruned ? (float)(1.0 - __dmul_rn(p.rate_at ? *p.rate_at : p.rate, p.pruned_decay)) : n.decay;
    u32 kept = 15;
    if (p.tiles) {
        const u64 row = at / p.cols;
        const u32 col = (u32)(at - row * p.cols);
        kept = p.tiles[row / 4 * (p.cols / 4) + col / 4] >> 4 * (row % 4);
    }
    double sum = 0.0;
    if (at + 4 <= p.count) {
        float4 w = *(const float4*)(p.weight + at), m = *(const float4*)(p.first + at),
               v = *(const float4*)(p.second + at);
        const FourRaw g = *(const FourRaw*)((const Raw*)p.gradient + at);
        const float x = update(p, n, left, scale, kept & 1, w.x, widen<GRADIENT>(g.of[0]), m.x, v.x);
        const float y = update(p, n, left, scale, kept & 2, w.y, widen<GRADIENT>(g.of[1]), m.y, v.y);
        const float z = update(p, n, left, scale, kept & 4, w.z, widen<GRADIENT>(g.of[2]), m.z, v.z);
        const float u = update(p, n, left, scale, kept & 8, w.w, widen<GRADIENT>(g.of[3]), m.w, v.w);
        *(float4*)(p.weight + at) = w;
        *(float4*)(p.first + at) = m;
        if (!p.is_frozen) *(float4*)(p.second + at) = v;
        if (p.copy)
            *(ushort4*)(p.copy + at) = make_ushort4(copied(p, w.x), copied(p, w.y), copied(p, w.z), copied(p, w.w));
        if constexpr (WATCHED != NOTHING)
            sum = (size_of<WATCHED>(x) + size_of<WATCHED>(y)) + (size_of<WATCHED>(z) + size_of<WATCHED>(u));
        return sum;
    }
    for (u64 i = at; i < p.count; i++) {
        const bool is_kept = kept >> (i - at) & 1;
        const float change = update(p, n, left, scale, is_kept, p.weight[i],
            widen<GRADIENT>(((const Raw*)p.gradient)[i]), p.first[i], p.second[i]);
        if (p.copy) p.copy[i] = copied(p, p.weight[i]);
        if constexpr (WATCHED != NOTHING) sum += size_of<WATCHED>(change);
    }
    return sum;
}

// The sum over the 256 threads of a CTA, in a fixed order.
__device__ __forceinline__ double sum_of_256(double value) {
    __shared__ double shared[256];
    shared[threadIdx.x] = value;
    __syncthreads();
    for (u32 half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    return shared[0];
}

extern "C" __global__ void __launch_bounds__(256, 4) step(const __grid_constant__ Parameters p) {
    update_four<NOTHING>(p);
}

extern "C" __global__ void __launch_bounds__(256, 4) watched_step(const __grid_constant__ Parameters p) {
    const double sum = sum_of_256(update_four<MAGNITUDE>(p));
    if (threadIdx.x == 0) p.partial[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(256, 4) logarithm_step(const __grid_constant__ Parameters p) {
    const double sum = sum_of_256(update_four<LOGARITHM>(p));
    if (threadIdx.x == 0) p.partial[blockIdx.x] = sum;
}

// Parameters without a mask that a launch updates together: a row of CTAs for each.
constexpr u32 TENSORS = 64;
struct Tensor {
    float* weight;
    const void* gradient;
    float* first;
    float* second;
    u16* copy;
    u64 count;
    u32 copy_is_bf16, unused;
};
struct Together {
    Tensor tensors[TENSORS];
    Parameters others; // what all have in common
};

extern "C" __global__ void __launch_bounds__(256, 4) step_together(const __grid_constant__ Together p) {
    const Tensor& tensor = p.tensors[blockIdx.y];
    Parameters own = p.others;
    own.weight = tensor.weight, own.gradient = tensor.gradient, own.first = tensor.first, own.second = tensor.second;
    own.copy = tensor.copy, own.count = tensor.count, own.copy_is_bf16 = tensor.copy_is_bf16;
    update_four<NOTHING>(own);
}

struct Changes {
    const double* partial;
    float* sum;
    u32 count;
};

// Adds the partial sums of `watched_step` or `logarithm_step`, in a fixed order.
extern "C" __global__ void __launch_bounds__(256) sum_changes(const __grid_constant__ Changes p) {
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < p.count; i += 256) sum += p.partial[i];
    sum = sum_of_256(sum);
    if (threadIdx.x == 0) *p.sum = (float)sum;
}

// The schedule of a captured step: the step's number and learning rate, in device memory.
struct Schedule {
    u64* step;                   // the number of steps taken
    const double* learning_rate;
    Numbers* numbers;
    double beta1, beta2, weight_decay;
    const u32* skip;             // where it is not 0, no step is counted; or null
};

// Counts a step and computes its constants, as the host does where it passes the step's number.
extern "C" __global__ void advance(const __grid_constant__ Schedule p) {
    if (p.skip && *p.skip) return;
    const u64 step = ++*p.step;
    const double rate = *p.learning_rate;
    Numbers n;
    n.decay = (float)(1.0 - __dmul_rn(rate, p.weight_decay));
    n.first_scale = (float)(1.0 / (1.0 - pow(p.beta1, (double)step)));
    n.second_scale = (float)(1.0 / (1.0 - pow(p.beta2, (double)step)));
    n.learning_rate = (float)rate;
    *p.numbers = n;
}
