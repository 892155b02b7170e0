// Quantization of matrices `[rows, cols]` of ELEMENT: to 8-bit integers with a scale for each row, bit for bit as crate
// twofour's kernel/quantize.rs; and to 8-bit floats with one scale for the whole matrix.
//
// Defined outside: ELEMENT.

struct Rows {
    const void* matrix;
    u8* out;       // [rows, cols]
    float* scales; // [rows]
    u32 rows, cols;
};

// The scale of a row with a NaN or an infinity is NaN.
extern "C" __global__ void __launch_bounds__(1024, 1) rows_to_i8(const __grid_constant__ Rows p) {
    const RowCtas ctas;
    const u64 first = (u64)ctas.row() * p.cols;
    const Raw* const from = (const Raw*)p.matrix + first;
    quantize_row(ctas, (u64)from % 16 == 0, p.cols, p.out + first, p.scales + ctas.row(),
        [&](u32 at, auto& values) { load(from + at, values); });
}

// The pointers of quantization to 8-bit floats.
struct Whole {
    const void* matrix;
    u8* out;
    u32* amax;       // the bits of the largest magnitude; zero before
    float* inverse;  // the factor of values before rounding
    float* scales;   // [count_scales]: the factor of accumulators, the same number in every element
    u64 count;
    u32 count_scales;
    u32 output;      // E4M3 or E5M2
};

extern "C" __global__ void __launch_bounds__(256) largest_magnitude(const __grid_constant__ Whole p) {
    __shared__ u32 most;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    u32 amax = 0;
    const u64 stride = (u64)gridDim.x * 256;
    #pragma unroll 4
    for (u64 at = (u64)blockIdx.x * 256 + threadIdx.x; at < p.count; at += stride)
        amax = max(amax, __float_as_uint(fabsf(widen<ELEMENT>(((const Raw*)p.matrix)[at]))));
    amax = __reduce_max_sync(0xFFFFFFFFu, amax);
    if (threadIdx.x % 32 == 0) atomicMax(&most, amax);
    __syncthreads();
    if (threadIdx.x == 0 && most) atomicMax(p.amax, most);
}

// Computes the largest finite number of the output type divided by the largest magnitude, and its inverse. Both are one
// for a matrix of zeros, and NaN where an element is NaN or infinite.
extern "C" __global__ void __launch_bounds__(256) scales_of_magnitude(const __grid_constant__ Whole p) {
    const u32 at = blockIdx.x * 256 + threadIdx.x;
    const float amax = __uint_as_float(*p.amax), largest = p.output == E4M3 ? 448.0f : 57344.0f;
    const bool finite = *p.amax < 0x7F800000u;
    float inverse = 1.0f, scale = 1.0f;
    if (!finite) inverse = scale = __uint_as_float(0x7FC00000u);
    else if (amax > 0.0f) {
        // Clamped: the quotient would be infinite for the smallest magnitudes.
        inverse = fminf(__fdiv_rn(largest, amax), 1.7014118e38f);
        scale = __fdiv_rn(1.0f, inverse);
    }
    if (at == 0) *p.inverse = inverse;
    if (at < p.count_scales) p.scales[at] = scale;
}

#if __CUDA_ARCH__ >= 890
template <int E> __device__ __forceinline__ void quantize(const Whole& p) {
    const u64 at = 4 * ((u64)blockIdx.x * 256 + threadIdx.x);
    const float inverse = *p.inverse;
    const Raw* from = (const Raw*)p.matrix + at;
    if (at + 4 <= p.count && (u64)p.matrix % (4 * sizeof(Raw)) == 0 && (u64)p.out % 4 == 0) {
        struct __align__(4 * sizeof(Raw)) Four { Raw of[4]; };
        const Four four = *(const Four*)from;
        u32 bytes = 0;
        unrolled<4>(
            [&](auto i) { bytes |= (u32)narrow<E>(widen<ELEMENT>(four.of[i.value]) * inverse) << (8 * i.value); });
        *(u32*)(p.out + at) = bytes;
        return;
    }
    for (u32 i = 0; i < 4 && at + i < p.count; i++) p.out[at + i] = narrow<E>(widen<ELEMENT>(from[i]) * inverse);
}

extern "C" __global__ void __launch_bounds__(256) to_e4m3(const __grid_constant__ Whole p) { quantize<E4M3>(p); }
extern "C" __global__ void __launch_bounds__(256) to_e5m2(const __grid_constant__ Whole p) { quantize<E5M2>(p); }
#endif
