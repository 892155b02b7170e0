// The error of rows that are to be others, and its gradient. A CTA computes a row; a second kernel adds the rows'
// errors in a fixed order.
//
// Defined outside: ELEMENT.

struct SquaredError {
    const void* x;      // [rows, width]
    const void* target; // [rows, width]
    void* dx;           // [rows, width]
    float* errors;      // [rows]
    float* loss;        // the sum
    u32 rows, width;
    float weight, factor;
    u32 is_relative;
};

extern "C" __global__ void __launch_bounds__(1024, 1) rows(const __grid_constant__ SquaredError p) {
    __shared__ float shared[32];
    const u64 first = (u64)blockIdx.x * p.width;
    const Raw* const x = (const Raw*)p.x + first;
    const Raw* const target = (const Raw*)p.target + first;
    Raw* const dx = (Raw*)p.dx + first;
    const bool vectors = alike(x, target) && alike(x, dx);
    float error = 0.0f, size = 0.0f;
    across((u64)x, vectors, p.width, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N], b[N];
        load<N>(x + at, a);
        load<N>(target + at, b);
        unrolled<N>([&](auto i) {
            error += (a[i.value] - b[i.value]) * (a[i.value] - b[i.value]);
            size += b[i.value] * b[i.value];
        });
    });
    error = sum_of_block(error, shared);
    size = sum_of_block(size, shared);
    const float weight = !p.is_relative ? p.weight : size == 0.0f ? 0.0f : p.weight / size;
    if (threadIdx.x == 0) p.errors[blockIdx.x] = error * weight;
    const float factor = 2.0f * weight * p.factor;
    across((u64)x, vectors, p.width, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float a[N], b[N];
        load<N>(x + at, a);
        load<N>(target + at, b);
        unrolled<N>([&](auto i) { a[i.value] = factor * (a[i.value] - b[i.value]); });
        store<N>(dx + at, a);
    });
}

extern "C" __global__ void __launch_bounds__(1024, 1) sum_errors(const __grid_constant__ SquaredError p) {
    add_rows(p.errors, p.rows, true, p.loss);
}
