// Reads the counters of mask changes of several layers into one array.

constexpr u32 LAYERS = 128; // of a launch

struct MaskChanges {
    const u64* counters[LAYERS]; // the number of changed mask elements minus one
    u64* out;
    u32 count;
};

extern "C" __global__ void __launch_bounds__(128) gather(const __grid_constant__ MaskChanges p) {
    if (threadIdx.x < p.count) p.out[threadIdx.x] = *p.counters[threadIdx.x] + 1;
}
