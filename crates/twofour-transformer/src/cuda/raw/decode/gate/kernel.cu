// A gated activation (Shazeer, "GLU Variants Improve Transformer", 2020) whose results are quantized to 8-bit integers
// with a scale for each token, the input of an int8 GEMM. Results are rounded to ELEMENT first, as gated/kernel.cu
// stores them.
//
// Defined outside: ELEMENT.

struct Gate {
    const void* x;  // [rows, 2 width]: gate, then up
    u8* y;          // [rows, width]
    float* scales;  // [rows]
    u32 width;
};

template <int F> __device__ __forceinline__ void to_i8(const Gate& p) {
    const RowCtas ctas;
    const u64 row = ctas.row();
    const Raw* const x = (const Raw*)p.x + row * 2 * p.width;
    quantize_row(ctas, (u64)x % 16 == 0, p.width, p.y + row * p.width, p.scales + row, [&](u32 at, auto& values) {
        constexpr int N = sizeof(values) / sizeof(float);
        float up[N];
        load(x + at, values);
        load(x + p.width + at, up);
        unrolled<N>([&](auto i) {
            values[i.value] = widen<ELEMENT>(narrow<ELEMENT>(value<F>(values[i.value]) * up[i.value]));
        });
    });
}

extern "C" __global__ void __launch_bounds__(1024, 1) silu(const __grid_constant__ Gate p) { to_i8<SILU>(p); }
extern "C" __global__ void __launch_bounds__(1024, 1) gelu(const __grid_constant__ Gate p) { to_i8<GELU>(p); }
extern "C" __global__ void __launch_bounds__(1024, 1) tanh_gelu(const __grid_constant__ Gate p) { to_i8<TANH_GELU>(p); }
extern "C" __global__ void __launch_bounds__(1024, 1) relu(const __grid_constant__ Gate p) { to_i8<RELU>(p); }
