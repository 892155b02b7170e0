// Rows of ELEMENT that the threads of a CTA read and write in vectors of 16 bytes, and sums over a CTA.

typedef Bits<ELEMENT>::type Raw;
// Elements of a vector.
constexpr u32 WIDTH = 16 / sizeof(Raw);
struct __align__(16) Vector { Raw of[WIDTH]; };

#define INFINITE __int_as_float(0x7F800000)

// Loads N elements as f32: one, or an aligned vector.
template <int N> __device__ __forceinline__ void load(const Raw* from, float (&to)[N]) {
    if constexpr (N == 1) {
        to[0] = widen<ELEMENT>(*from);
    } else {
        const Vector vector = *(const Vector*)from;
        unrolled<N>([&](auto i) { to[i.value] = widen<ELEMENT>(vector.of[i.value]); });
    }
}

// Rounds and stores N elements: one, or an aligned vector.
template <int N> __device__ __forceinline__ void store(Raw* to, const float (&from)[N]) {
    if constexpr (N == 1) {
        *to = narrow<ELEMENT>(from[0]);
    } else {
        Vector vector;
        unrolled<N>([&](auto i) { vector.of[i.value] = narrow<ELEMENT>(from[i.value]); });
        *(Vector*)to = vector;
    }
}

// Loads N f32s at any address.
template <int N> __device__ __forceinline__ void load_f32(const float* from, float (&to)[N]) {
    if constexpr (N % 4 == 0) {
        if (((u64)from & 15) == 0) {
            unrolled<N / 4>([&](auto i) {
                const float4 four = ((const float4*)from)[i.value];
                to[4 * i.value] = four.x, to[4 * i.value + 1] = four.y, to[4 * i.value + 2] = four.z,
                       to[4 * i.value + 3] = four.w;
            });
            return;
        }
    }
    unrolled<N>([&](auto i) { to[i.value] = from[i.value]; });
}

// Stores N f32s at any address.
template <int N> __device__ __forceinline__ void store_f32(float* to, const float (&from)[N]) {
    if constexpr (N % 4 == 0) {
        if (((u64)to & 15) == 0) {
            unrolled<N / 4>([&](auto i) {
                ((float4*)to)[i.value] =
                    make_float4(from[4 * i.value], from[4 * i.value + 1], from[4 * i.value + 2], from[4 * i.value + 3]);
            });
            return;
        }
    }
    unrolled<N>([&](auto i) { to[i.value] = from[i.value]; });
}

// Distributes `width` elements over the CTA's threads: calls `f` with an index and a number of elements from there on,
// WIDTH of them where the element lies on a boundary of 16 bytes, otherwise 1. `address` is that of the first element;
// without `vectors` every call is for 1.
template <class F> __device__ __forceinline__ void across(u64 address, bool vectors, u32 width, F f) {
    const u32 before = vectors ? (u32)((16 - (address & 15)) & 15) / (u32)sizeof(Raw) : width;
    const u32 head = before < width ? before : width, whole = (width - head) / WIDTH;
    for (u32 i = threadIdx.x; i < head; i += blockDim.x) f(i, Int<1>());
    for (u32 i = threadIdx.x; i < whole; i += blockDim.x) f(head + i * WIDTH, Int<WIDTH>());
    for (u32 i = head + whole * WIDTH + threadIdx.x; i < width; i += blockDim.x) f(i, Int<1>());
}

// Returns whether two addresses have the same position between boundaries of 16 bytes.
__device__ __forceinline__ bool alike(const void* a, const void* b) { return (((u64)a ^ (u64)b) & 15) == 0; }

// Returns the sum over the CTA's threads, in a fixed order, to each of them. `shared` has room for one f32 for each
// warp.
__device__ __forceinline__ float sum_of_block(float value, float* shared) {
    for (u32 distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, distance);
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (u32 warp = 0; warp < blockDim.x / 32; warp++) sum += shared[warp];
    return sum;
}

// Returns the largest value of the CTA's threads to each of them.
__device__ __forceinline__ float largest_of_block(float value, float* shared) {
    for (u32 distance = 16; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    float largest = shared[0];
    for (u32 warp = 1; warp < blockDim.x / 32; warp++) largest = fmaxf(largest, shared[warp]);
    return largest;
}
