// The fused projection of tokens [batch * positions, (heads + 2 kv_heads) dim] to heads [batch, heads, positions, dim],
// and back. Queries and keys are rotated on the way: rotary embedding (Su et al., "RoFormer", 2021) of pairs (i, i +
// dim / 2). The gradient is the way back, with the opposite rotation.
//
// Defined outside: ELEMENT.

struct Heads {
    const void* fused;  // [batch * positions, (heads + 2 kv_heads) dim]
    void* to_fused;
    const void* q;      // [batch, heads, positions, dim]
    const void* k;      // [batch, kv_heads, positions, dim]
    const void* v;
    const float* cos;   // [positions, dim / 2], or null for no rotation
    const float* sin;
    u64 count;          // runs of pairs that are moved, of N each
    u32 positions, heads, kv_heads, dim;
};

// Rotates N pairs by the angles of a position, or back.
template <bool FORTH, int N>
__device__ __forceinline__ void turn(const Heads& p, u32 position, u32 i, float (&low)[N], float (&high)[N]) {
    float cos[N], sin[N];
    load_f32<N>(p.cos + (u64)position * (p.dim / 2) + i, cos);
    load_f32<N>(p.sin + (u64)position * (p.dim / 2) + i, sin);
    unrolled<N>([&](auto j) {
        const float a = low[j.value], b = high[j.value], s = FORTH ? sin[j.value] : -sin[j.value];
        low[j.value] = a * cos[j.value] - b * s;
        high[j.value] = b * cos[j.value] + a * s;
    });
}

// A thread moves N pairs of a token's head: elements i, ... and i + dim / 2, ...
template <bool SPLITS, int N> __device__ __forceinline__ void move(const Heads& p) {
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.count) return;
    const u32 half = p.dim / 2, runs = half / N, all = p.heads + 2 * p.kv_heads;
    const u64 head_of_all = index / runs, token = head_of_all / all;
    const u32 i = (u32)(index - head_of_all * runs) * N, head = (u32)(head_of_all - token * all);
    const u64 sequence = token / p.positions;
    const u32 position = (u32)(token - sequence * p.positions);
    const bool is_q = head < p.heads, is_k = !is_q && head < p.heads + p.kv_heads;
    const void* apart = is_q ? p.q : is_k ? p.k : p.v;
    const u32 heads = is_q ? p.heads : p.kv_heads, own = is_q   ? head
                                                         : is_k ? head - p.heads
                                                                : head - p.heads - p.kv_heads;
    Raw* const split = (Raw*)apart + ((sequence * heads + own) * p.positions + position) * p.dim + i;
    const u64 at = head_of_all * p.dim + i;
    const Raw* from = SPLITS ? (const Raw*)p.fused + at : split;
    Raw* to = SPLITS ? split : (Raw*)p.to_fused + at;
    float low[N], high[N];
    load<N>(from, low);
    load<N>(from + half, high);
    if (p.cos && (is_q || is_k)) turn<SPLITS, N>(p, position, i, low, high);
    store<N>(to, low);
    store<N>(to + half, high);
}

// Rotates the queries and keys of the fused projection in place, or back. A thread rotates N pairs of a token's head.
template <bool FORTH, int N> __device__ __forceinline__ void rotate(const Heads& p) {
    const u64 index = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= p.count) return;
    const u32 half = p.dim / 2, runs = half / N, rotated = p.heads + p.kv_heads;
    const u64 head_of_all = index / runs, token = head_of_all / rotated;
    const u32 i = (u32)(index - head_of_all * runs) * N, head = (u32)(head_of_all - token * rotated);
    Raw* const at = (Raw*)p.to_fused + (token * (rotated + p.kv_heads) + head) * p.dim + i;
    float low[N], high[N];
    load<N>(at, low);
    load<N>(at + half, high);
    turn<FORTH, N>(p, (u32)(token % p.positions), i, low, high);
    store<N>(at, low);
    store<N>(at + half, high);
}

#define KERNELS(name, function, FORTH)                                                                     \
    extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Heads p) {              \
        function<FORTH, WIDTH>(p);                                                                         \
    }                                                                                                      \
    extern "C" __global__ void __launch_bounds__(256) name##_one_by_one(const __grid_constant__ Heads p) { \
        function<FORTH, 1>(p);                                                                             \
    }
KERNELS(split, move, true)
KERNELS(merge, move, false)
KERNELS(rotate_forth, rotate, true)
KERNELS(rotate_back, rotate, false)
