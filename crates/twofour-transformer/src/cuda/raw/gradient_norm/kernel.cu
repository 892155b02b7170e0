// The norm of all gradients, and the factor that clips it (Pascanu, Mikolov and Bengio, 2013). CTAs sum squares of
// parts, and a second kernel adds the parts in a fixed order in f64.

constexpr u32 BUFFERS = 64; // of a launch
constexpr u32 PARTS = 64;   // of a buffer

struct Squares {
    const float* buffers[BUFFERS];
    u64 counts[BUFFERS];
    double* partial; // [buffers, PARTS]
};

__device__ __forceinline__ double sum_of_256(double value) {
    __shared__ double shared[256];
    shared[threadIdx.x] = value;
    __syncthreads();
    for (u32 half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    return shared[0];
}

extern "C" __global__ void __launch_bounds__(256) squares(const __grid_constant__ Squares p) {
    const float* const from = p.buffers[blockIdx.y];
    const u64 count = p.counts[blockIdx.y], fours = ((u64)from & 15) == 0 ? count / 4 : 0;
    double sum = 0.0;
    #pragma unroll 4
    for (u64 i = (u64)blockIdx.x * 256 + threadIdx.x; i < fours; i += PARTS * 256) {
        const float4 v = ((const float4*)from)[i];
        sum += (double)(v.x * v.x + v.y * v.y + (v.z * v.z + v.w * v.w));
    }
    for (u64 i = 4 * fours + (u64)blockIdx.x * 256 + threadIdx.x; i < count; i += PARTS * 256)
        sum += (double)from[i] * from[i];
    sum = sum_of_256(sum);
    if (threadIdx.x == 0) p.partial[(u64)blockIdx.y * PARTS + blockIdx.x] = sum;
}

struct Clip {
    const double* partial;
    const float* loss_scale; // or null
    const float* loss;       // where it is NaN or infinite, the norm counts as such; or null
    float* norm;             // of the gradients without the loss scale
    float* scale;            // what gradients are to be multiplied by
    u32* non_finite;         // 1 where the norm or the loss is NaN or infinite, otherwise 0
    u32 count;
    float clip;              // infinite for no clipping
    float host_scale;        // a factor of the loss scale
};

extern "C" __global__ void __launch_bounds__(256) clip(const __grid_constant__ Clip p) {
    double sum = 0.0;
    for (u32 i = threadIdx.x; i < p.count; i += 256) sum += p.partial[i];
    sum = sum_of_256(sum);
    if (threadIdx.x > 0) return;
    const float inverse = 1.0f / (p.loss_scale ? *p.loss_scale * p.host_scale : p.host_scale),
                loss = p.loss ? *p.loss : 0.0f;
    const float norm = (float)(sqrt(sum) * (double)inverse);
    const bool finite = norm - norm == 0.0f && loss - loss == 0.0f;
    const float factor = p.clip / (norm + 1e-6f);
    *p.norm = norm;
    *p.scale = finite ? inverse * (factor < 1.0f ? factor : 1.0f) : 0.0f;
    *p.non_finite = finite ? 0 : 1;
}
