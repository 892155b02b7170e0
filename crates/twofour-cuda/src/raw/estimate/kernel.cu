// The 2:4 estimate of a matrix along its rows, as a dense matrix with zeros. The same bits as crate twofour's estimate.
//
// A thread handles 16 elements of a row: four groups, for which one draw of random numbers is enough for MVUE.
//
// Defined outside: ELEMENT.

struct Estimate {
    const void* dense;   // [rows, cols]
    void* out;           // [rows, cols]; not `dense`
    const float* factor; // for all values, or null
    u64 seed;
    const u64* seed_at;  // added to the seed, or null
    u32 rows, cols;
    u32 aligned;         // whether four elements are aligned in every row of both matrices
};

enum Rule { MAGNITUDE = 0, SOFT_THRESHOLD = 1, MVUE_APPROXIMATE = 2, MVUE = 3 };

typedef Bits<ELEMENT>::type Raw;
struct __align__(4 * sizeof(Raw)) FourRaw { Raw of[4]; };

// Rounds a value, and replaces -0.0 by +0.0.
__device__ __forceinline__ Raw rounded(float value) {
    const Raw bits = narrow<ELEMENT>(value);
    return (Raw)(bits << 1) == 0 ? (Raw)0 : bits;
}

template <int RULE> __device__ __forceinline__ void estimate(const Estimate& p) {
    const u32 blocks = (p.cols + 15) / 16;
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= (u64)p.rows * blocks) return;
    const u32 row = (u32)(index / blocks), block = (u32)(index - (u64)row * blocks);
    const u64 seed = p.seed_at ? p.seed + *p.seed_at : p.seed;
    const float factor = p.factor ? *p.factor : 1.0f;
    uint4 random = {}, more = {};
    if (RULE == MVUE) random = philox(seed, block, row, 0);
    if (RULE == MVUE_APPROXIMATE) {
        random = philox(seed, 2 * block, row, 1);
        more = philox(seed, 2 * block + 1, row, 1);
    }
    const Raw* from = (const Raw*)p.dense + (u64)row * p.cols;
    Raw* to = (Raw*)p.out + (u64)row * p.cols;
    unrolled<4>([&](auto g) {
        const u32 col = 16 * block + 4 * g.value;
        if (col >= p.cols) return;
        FourRaw raw = {};
        if (p.aligned) {
            raw = *(const FourRaw*)(from + col);
        } else {
            unrolled<4>([&](auto i) {
                if (col + i.value < p.cols) raw.of[i.value] = from[col + i.value];
            });
        }
        float v[4];
        unrolled<4>([&](auto i) { v[i.value] = widen<ELEMENT>(raw.of[i.value]); });
        Two two;
        if (RULE == MVUE) {
            two = mvue(v, unit(g.value == 0 ? random.x : g.value == 1 ? random.y : g.value == 2 ? random.z : random.w));
        } else {
            u32 kept = 0;
            if (RULE == MAGNITUDE) kept = two_largest(v);
            if (RULE == SOFT_THRESHOLD) kept = soft_threshold(v);
            if (RULE == MVUE_APPROXIMATE && g.value < 2)
                kept = mvue_approximate(
                    v, g.value == 0 ? unit(random.x) : unit(random.z), g.value == 0 ? unit(random.y) : unit(random.w));
            if (RULE == MVUE_APPROXIMATE && g.value >= 2)
                kept = mvue_approximate(
                    v, g.value == 2 ? unit(more.x) : unit(more.z), g.value == 2 ? unit(more.y) : unit(more.w));
            two = of_kept(v, kept);
        }
        if (p.factor) {
            two.a = times(two.a, factor);
            two.b = times(two.b, factor);
        }
        const Raw a = rounded(two.a), b = rounded(two.b);
        FourRaw result;
        unrolled<4>([&](auto i) {
            result.of[i.value] = (two.code & 3) == i.value ? a : two.code >> 2 == i.value ? b : (Raw)0;
        });
        if (p.aligned) {
            *(FourRaw*)(to + col) = result;
        } else {
            unrolled<4>([&](auto i) {
                if (col + i.value < p.cols) to[col + i.value] = result.of[i.value];
            });
        }
    });
}

extern "C" __global__ void __launch_bounds__(256) estimate_magnitude(const __grid_constant__ Estimate p) {
    estimate<MAGNITUDE>(p);
}
extern "C" __global__ void __launch_bounds__(256) estimate_soft_threshold(const __grid_constant__ Estimate p) {
    estimate<SOFT_THRESHOLD>(p);
}
extern "C" __global__ void __launch_bounds__(256) estimate_mvue_approximate(const __grid_constant__ Estimate p) {
    estimate<MVUE_APPROXIMATE>(p);
}
extern "C" __global__ void __launch_bounds__(256) estimate_mvue(const __grid_constant__ Estimate p) {
    estimate<MVUE>(p);
}
