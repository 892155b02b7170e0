// The scale of a row of 8-bit integers, `amax / 127`, as quantize/kernel.cu has it: the bytes of crate twofour's kernel/quantize.rs.

__device__ __forceinline__ u32 magnitude(float value) { return __float_as_uint(fabsf(value)); }

struct RowScale {
    float scale;
    bool finite;

    // `amax` is the largest magnitude of a thread's elements, as bits, and `shared` has room for a u32 for each warp. All threads of the CTA call it.
    __device__ __forceinline__ RowScale(u32 amax, u32* shared) {
        amax = __reduce_max_sync(0xFFFFFFFFu, amax);
        __syncthreads();
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = amax;
        __syncthreads();
        for (u32 warp = 0; warp < blockDim.x / 32; warp++) amax = max(amax, shared[warp]);
        scale = __fdiv_rn(__uint_as_float(amax), 127.0f);
        finite = amax < 0x7F800000u;
    }

    // NaN for a row with a NaN or an infinity.
    __device__ __forceinline__ float stored() const { return finite ? scale : __uint_as_float(0x7FC00000u); }

    // A division, because the inverse of a subnormal scale is infinite.
    __device__ __forceinline__ u8 quantized(float value) const {
        if (!finite || scale == 0.0f) return 0;
        return (u8)(int)rintf(fminf(fmaxf(__fdiv_rn(value, scale), -127.0f), 127.0f));
    }
};
