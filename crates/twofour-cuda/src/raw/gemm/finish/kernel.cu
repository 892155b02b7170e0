// The epilogue of a GEMM whose accumulators a library has stored: act(alpha * scales * sums + biases), rounded, then
// stored or added to the output. `sums` may be the output itself.
//
// Accumulators and results are matrices of the same shape and order. A thread computes four neighbours of a row.
//
// Defined outside: Sum, a float.

struct Finish {
    const void* sums;
    Output to;
    // Data types of the accumulators and of the results.
    u32 sum_type, output;
    // Rows, and the length of each. A row is a feature with its tokens where `features_first`, otherwise a token with
    // its features.
    u32 rows, length, features_first;
    // Whether four accumulators, and four results, can be loaded and stored at once.
    u32 in_fours;
};

struct __align__(8) FourHalves { u16 of[4]; };
struct __align__(16) FourWords { u32 of[4]; };

__device__ __forceinline__ float sum_of(u32 type, u32 bits) {
    return type == F16    ? widen<F16>((u16)bits)
           : type == BF16 ? widen<BF16>((u16)bits)
           : type == I32  ? (float)(int)bits
                          : widen<F32>(bits);
}

extern "C" __global__ void __launch_bounds__(256) finish(const __grid_constant__ Finish p) {
    const u32 fours = (p.length + 3) / 4;
    const u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    if (index >= (u64)p.rows * fours) return;
    const u32 row = (u32)(index / fours), first = (u32)(index - (u64)row * fours) * 4;
    const u64 at = (u64)row * p.length + first;
    const bool halves = p.sum_type == F16 || p.sum_type == BF16;
    u32 bits[4] = {};
    if (p.in_fours && halves) {
        const FourHalves four = *(const FourHalves*)((const u16*)p.sums + at);
        unrolled<4>([&](auto i) { bits[i.value] = four.of[i.value]; });
    } else if (p.in_fours) {
        const FourWords four = *(const FourWords*)((const u32*)p.sums + at);
        unrolled<4>([&](auto i) { bits[i.value] = four.of[i.value]; });
    } else {
        unrolled<4>([&](auto i) {
            if (first + i.value < p.length)
                bits[i.value] = halves ? ((const u16*)p.sums)[at + i.value] : ((const u32*)p.sums)[at + i.value];
        });
    }
    if (p.in_fours && !p.to.accumulate) {
        float results[4];
        unrolled<4>([&](auto i) {
            const u32 f = p.features_first ? row : first + i.value, t = p.features_first ? first + i.value : row;
            results[i.value] =
                activated<F32>(p.to.activation, scaled(p.to, p.output, sum_of(p.sum_type, bits[i.value]), f, t));
        });
        if (p.output == F32) {
            FourWords four;
            unrolled<4>([&](auto i) { four.of[i.value] = narrow<F32>(results[i.value]); });
            *(FourWords*)((u32*)p.to.data + at) = four;
        } else {
            FourHalves four;
            unrolled<4>([&](auto i) {
                four.of[i.value] = p.output == F16 ? narrow<F16>(results[i.value]) : narrow<BF16>(results[i.value]);
            });
            *(FourHalves*)((u16*)p.to.data + at) = four;
        }
        return;
    }
    unrolled<4>([&](auto i) {
        const u32 f = p.features_first ? row : first + i.value, t = p.features_first ? first + i.value : row;
        if (first + i.value < p.length) store<false>(p.to, p.output, sum_of(p.sum_type, bits[i.value]), f, t);
    });
}
