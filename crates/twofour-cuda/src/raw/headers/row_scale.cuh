// The scale of a row of 8-bit integers, `amax / 127`: the bytes of crate twofour's kernel/quantize.rs.

__device__ __forceinline__ u32 magnitude(float value) { return __float_as_uint(fabsf(value)); }

// Returns the largest of the CTA's threads' magnitudes, as bits, to each of them. `shared` has room for a u32 for each
// warp.
__device__ __forceinline__ u32 amax_of_block(u32 amax, u32* shared) {
    amax = __reduce_max_sync(0xFFFFFFFFu, amax);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
    __syncthreads();
    return __reduce_max_sync(0xFFFFFFFFu, threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : 0);
}

struct RowScale {
    float scale;
    bool finite;

    // `amax` is the largest magnitude of the row, as bits.
    __device__ __forceinline__ explicit RowScale(u32 amax)
        : scale(__fdiv_rn(__uint_as_float(amax), 127.0f)), finite(amax < 0x7F800000u) {}

    // NaN for a row with a NaN or an infinity.
    __device__ __forceinline__ float stored() const { return finite ? scale : __uint_as_float(0x7FC00000u); }

    // A division, because the inverse of a subnormal scale is infinite.
    __device__ __forceinline__ u8 quantized(float value) const {
        if (!finite || scale == 0.0f) return 0;
        return (u8)(int)rintf(fminf(fmaxf(__fdiv_rn(value, scale), -127.0f), 127.0f));
    }
};
