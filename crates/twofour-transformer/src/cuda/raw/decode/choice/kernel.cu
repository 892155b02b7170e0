// The most likely token of each sequence, the lower of equals; and the step to the next position. A NaN is never
// chosen, but for a first one, after which nothing is larger: as the CPU's comparisons have it. A CTA has a sequence.
//
// Defined outside: ELEMENT.

struct Choice {
    const void* logits;  // [batch, vocabulary]
    u32* ids;            // [batch]: the tokens
    u32* positions;      // [batch]: raised by one
    u32* history;        // [batch, capacity]: the token at each position
    u32 vocabulary, capacity;
};

struct Best {
    float value;
    u32 index;

    __device__ __forceinline__ void take(float other, u32 at) {
        if (other > value || (other == value && at < index)) value = other, index = at;
    }
};

extern "C" __global__ void __launch_bounds__(1024) choose(const __grid_constant__ Choice p) {
    __shared__ float values[32];
    __shared__ u32 indices[32];
    const Raw* const logits = (const Raw*)p.logits + (u64)blockIdx.x * p.vocabulary;
    Best best = {-INFINITE, 0xFFFFFFFFu};
    across((u64)logits, true, p.vocabulary, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float some[N];
        load<N>(logits + at, some);
        unrolled<N>([&](auto i) { best.take(some[i.value], at + i.value); });
    });
    for (u32 distance = 16; distance > 0; distance /= 2) {
        const float value = __shfl_xor_sync(0xFFFFFFFFu, best.value, distance);
        best.take(value, __shfl_xor_sync(0xFFFFFFFFu, best.index, distance));
    }
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = best.value, indices[threadIdx.x / 32] = best.index;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (u32 warp = 1; warp < blockDim.x / 32; warp++) best.take(values[warp], indices[warp]);
    const float first = widen<ELEMENT>(logits[0]);
    const u32 id = first != first || best.index >= p.vocabulary ? 0 : best.index;
    const u32 position = p.positions[blockIdx.x] + 1;
    p.ids[blockIdx.x] = id;
    if (position < p.capacity) p.history[(u64)blockIdx.x * p.capacity + position] = id;
    p.positions[blockIdx.x] = position;
}
