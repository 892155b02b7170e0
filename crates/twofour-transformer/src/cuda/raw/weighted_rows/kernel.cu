// Sums of rows with weights, such as the outputs of a token's experts.
//
// Defined outside: ELEMENT.

struct WeightedRows {
    const void* rows;     // [count, width]
    const u32* places;    // [tokens, each]: numbers of rows
    const float* weights; // [tokens, each]
    void* out;            // [tokens, width]
    u32 count, each, width;
};

// A CTA sums a token's rows in f32, in the order of their places. A place beyond the rows adds nothing.
extern "C" __global__ void __launch_bounds__(1024, 1) sum(const __grid_constant__ WeightedRows p) {
    const u64 first = (u64)blockIdx.x * p.each;
    Raw* const out = (Raw*)p.out + (u64)blockIdx.x * p.width;
    across((u64)out, p.width % WIDTH == 0 && alike(p.rows, p.out), p.width, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float sum[N] = {}, x[N];
        for (u32 i = 0; i < p.each; i++) {
            const u32 place = p.places[first + i];
            if (place >= p.count) continue;
            const float weight = p.weights[first + i];
            load<N>((const Raw*)p.rows + (u64)place * p.width + at, x);
            unrolled<N>([&](auto k) { sum[k.value] += weight * x[k.value]; });
        }
        store<N>(out + at, sum);
    });
}
