// An AdamW step on f32 weights, with masked decay of the elements that a mask of 4x4 tiles prunes, in one pass. Results are bit for bit those of
// twofour-candle on the CPU, because no operations are contracted to FMA.
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
    u64 count;
    u32 cols;
    u32 copy_is_bf16;
    float masked_decay, beta1, rest1, beta2, rest2, epsilon;
    Numbers numbers;
};

typedef Bits<GRADIENT>::type Raw;
struct __align__(4 * sizeof(Raw)) FourRaw { Raw of[4]; };

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }

__device__ __forceinline__ void update(const Parameters& p, const Numbers& n, float scale, bool kept, float& w, float g, float& m, float& v) {
    g = times(g, scale);
    if (!kept) g = add(g, times(p.masked_decay, w));
    m = add(times(m, p.beta1), times(g, p.rest1));
    v = add(times(v, p.beta2), times(times(g, g), p.rest2));
    const float step = __fdiv_rn(times(m, n.first_scale), add(__fsqrt_rn(times(v, n.second_scale)), p.epsilon));
    w = add(times(w, n.decay), -times(step, n.learning_rate));
}

__device__ __forceinline__ u16 copied(const Parameters& p, float w) { return p.copy_is_bf16 ? narrow<BF16>(w) : narrow<F16>(w); }

// A thread updates four elements, which are in one row where there is a mask.
extern "C" __global__ void __launch_bounds__(256, 4) step(const __grid_constant__ Parameters p) {
    const u64 at = 4 * ((u64)blockIdx.x * blockDim.x + threadIdx.x);
    if (at >= p.count || (p.skip && *p.skip)) return;
    const float scale = p.gradient_scale ? *p.gradient_scale : 1.0f;
    const Numbers n = p.numbers_at ? *p.numbers_at : p.numbers;
    u32 kept = 15;
    if (p.tiles) {
        const u64 row = at / p.cols;
        const u32 col = (u32)(at - row * p.cols);
        kept = p.tiles[row / 4 * (p.cols / 4) + col / 4] >> 4 * (row % 4);
    }
    if (at + 4 <= p.count) {
        float4 w = *(const float4*)(p.weight + at), m = *(const float4*)(p.first + at), v = *(const float4*)(p.second + at);
        const FourRaw g = *(const FourRaw*)((const Raw*)p.gradient + at);
        update(p, n, scale, kept & 1, w.x, widen<GRADIENT>(g.of[0]), m.x, v.x);
        update(p, n, scale, kept & 2, w.y, widen<GRADIENT>(g.of[1]), m.y, v.y);
        update(p, n, scale, kept & 4, w.z, widen<GRADIENT>(g.of[2]), m.z, v.z);
        update(p, n, scale, kept & 8, w.w, widen<GRADIENT>(g.of[3]), m.w, v.w);
        *(float4*)(p.weight + at) = w;
        *(float4*)(p.first + at) = m;
        *(float4*)(p.second + at) = v;
        if (p.copy) *(ushort4*)(p.copy + at) = make_ushort4(copied(p, w.x), copied(p, w.y), copied(p, w.z), copied(p, w.w));
        return;
    }
    for (u64 i = at; i < p.count; i++) {
        update(p, n, scale, kept >> (i - at) & 1, p.weight[i], widen<GRADIENT>(((const Raw*)p.gradient)[i]), p.first[i], p.second[i]);
        if (p.copy) p.copy[i] = copied(p, p.weight[i]);
    }
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
