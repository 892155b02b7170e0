// The scale of a soft threshold, <w, S(w)> / <S(w), S(w)>, of a weight [rows, cols] of ELEMENT, in f64, as in crate
// twofour's estimate/soft.rs. CTAs sum parts of the weight, and one thread adds the parts in order.
//
// Defined outside: ELEMENT.

struct SoftThreshold {
    const void* weight;
    double2* partial; // [blocks]
    float* scale;
    u32 rows, cols;
    u32 blocks;
};

typedef Bits<ELEMENT>::type Raw;

// Adds a warp's lanes in a fixed order.
__device__ __forceinline__ double sum_of_warp(double x) {
    for (int step = 16; step > 0; step /= 2) {
        const u64 bits = (u64)__double_as_longlong(x);
        const u32 low = __shfl_down_sync(0xFFFFFFFFu, (u32)bits, step),
                  high = __shfl_down_sync(0xFFFFFFFFu, (u32)(bits >> 32), step);
        x += __longlong_as_double((long long)((u64)high << 32 | low));
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(256) sum_parts(const __grid_constant__ SoftThreshold p) {
    __shared__ double2 sums[8];
    const u32 groups = (p.cols + 3) / 4;
    const u64 count = (u64)p.rows * groups;
    double along = 0.0, own = 0.0;
    for (u64 index = (u64)blockIdx.x * 256 + threadIdx.x; index < count; index += (u64)p.blocks * 256) {
        const u32 row = (u32)(index / groups), col = 4 * (u32)(index - (u64)row * groups);
        const Raw* from = (const Raw*)p.weight + (u64)row * p.cols + col;
        float w[4], m[4];
        unrolled<4>([&](auto i) {
            w[i.value] = col + i.value < p.cols ? widen<ELEMENT>(from[i.value]) : 0.0f;
            m[i.value] = fabsf(w[i.value]);
        });
        // The third largest magnitude, from the minima and maxima of both pairs.
        const float low = fminf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3])),
                    high = fmaxf(fminf(m[0], m[1]), fminf(m[2], m[3]));
        const float third = fminf(low, high);
        unrolled<4>([&](auto i) {
            // Elements at or below the threshold contribute nothing.
            if (m[i.value] > third) {
                const double s = (double)copysignf(m[i.value] - third, w[i.value]);
                along += (double)w[i.value] * s;
                own += s * s;
            }
        });
    }
    along = sum_of_warp(along);
    own = sum_of_warp(own);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = make_double2(along, own);
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (u32 warp = 1; warp < 8; warp++) {
        along += sums[warp].x;
        own += sums[warp].y;
    }
    p.partial[blockIdx.x] = make_double2(along, own);
}

extern "C" __global__ void scale_of_parts(const __grid_constant__ SoftThreshold p) {
    double along = 0.0, own = 0.0;
    for (u32 block = 0; block < p.blocks; block++) {
        along += p.partial[block].x;
        own += p.partial[block].y;
    }
    *p.scale = own > 0.0 ? (float)(along / own) : 1.0f;
}
