// Reads memory and stores nothing.

struct Parameters {
    const uint4* data;
    // Written in one of four billion cases, so that the compiler keeps the reads.
    u32* sink;
    u64 quads;
};

extern "C" __global__ void __launch_bounds__(512) read_all(Parameters p) {
    u32 all = 0;
    const u64 step = (u64)gridDim.x * blockDim.x;
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < p.quads; i += 4 * step) {
        uint4 quads[4];
        #pragma unroll
        for (int j = 0; j < 4; j++) quads[j] = p.data[i + j * step];
        #pragma unroll
        for (int j = 0; j < 4; j++) all ^= quads[j].x ^ quads[j].y ^ quads[j].z ^ quads[j].w;
    }
    for (; i < p.quads; i += step) all ^= p.data[i].x ^ p.data[i].y ^ p.data[i].z ^ p.data[i].w;
    if (all == 0x9E3779B9u) *p.sink = all;
}
