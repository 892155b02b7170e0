// Quantization of a row to 8-bit integers with a scale, by the CTAs of a cluster; without clusters by one CTA. Needs
// the headers of rows and of a row's scale.

// The first parts of a thread that stay in registers; those after them are computed twice.
constexpr u32 KEPT = 2;

// Most CTAs of a cluster.
constexpr u32 MAX_CTAS = 8;

// The CTAs that have a row, and this one's place among them. All threads of all of them call every function.
struct RowCtas {
    u32 rank, count;

#if __CUDA_ARCH__ >= 900
    __device__ __forceinline__ RowCtas() {
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
        // Another CTA's shared memory may be written to once that CTA runs: `largest` waits for this arrival.
        if (count > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }

    // Returns the largest of the row's magnitudes, as bits.
    __device__ __forceinline__ u32 largest(u32 amax, u32* of_warps, u32* of_ctas) const {
        amax = amax_of_block(amax, of_warps);
        if (count == 1) return amax;
        asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
        if (threadIdx.x < count) {
            asm volatile(
                "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.u32 [there], %2;}" ::"r"(
                    shared_address(of_ctas + rank)),
                "r"(threadIdx.x), "r"(amax)
                : "memory");
        }
        asm volatile("barrier.cluster.arrive.release;" ::: "memory");
        asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
        for (u32 cta = 0; cta < count; cta++) amax = max(amax, of_ctas[cta]);
        return amax;
    }
#else
    __device__ __forceinline__ RowCtas() : rank(0), count(1) {}
    __device__ __forceinline__ u32 largest(u32 amax, u32* of_warps, u32*) const {
        return amax_of_block(amax, of_warps);
    }
#endif

    // The row that the CTA has a part of.
    __device__ __forceinline__ u32 row() const { return blockIdx.x / count; }
};

// Stores N integers; the address is a multiple of N.
template <int N> __device__ __forceinline__ void store_bytes(u8* to, const u8 (&from)[N]) {
    struct __align__(N) Bytes { u8 of[N]; } bytes;
    unrolled<N>([&](auto i) { bytes.of[i.value] = from[i.value]; });
    *(Bytes*)to = bytes;
}

template <int N, class Part> __device__ __forceinline__ void quantize_parts(
    const RowCtas& ctas, u32 width, u8* to, float* scale_to, u32* of_warps, u32* of_ctas, Part part) {
    const u32 count = width / N, first = ctas.rank * blockDim.x + threadIdx.x, stride = ctas.count * blockDim.x;
    float kept[KEPT][N];
    u32 amax = 0;
    const auto enlarge = [&](const float (&values)[N]) {
        unrolled<N>([&](auto e) { amax = max(amax, magnitude(values[e.value])); });
    };
    unrolled<KEPT>([&](auto i) {
        const u32 at = first + i.value * stride;
        if (at < count) part(at * N, kept[i.value]), enlarge(kept[i.value]);
    });
    for (u32 at = first + KEPT * stride; at < count; at += stride) {
        float values[N];
        part(at * N, values);
        enlarge(values);
    }
    const RowScale scale(ctas.largest(amax, of_warps, of_ctas));
    if (first == 0) *scale_to = scale.stored();
    const auto store = [&](u32 at, const float(&values)[N]) {
        u8 bytes[N];
        unrolled<N>([&](auto e) { bytes[e.value] = scale.quantized(values[e.value]); });
        store_bytes<N>(to + (u64)at * N, bytes);
    };
    unrolled<KEPT>([&](auto i) {
        const u32 at = first + i.value * stride;
        if (at < count) store(at, kept[i.value]);
    });
    for (u32 at = first + KEPT * stride; at < count; at += stride) {
        float values[N];
        part(at * N, values);
        store(at, values);
    }
}

// Quantizes a row of `width` numbers. `part(at, values)` computes the numbers from index `at` on, N of them for a
// `float values[N]`: 1 or, where `vectors`, WIDTH at a multiple of WIDTH.
template <class Part> __device__ __forceinline__ void quantize_row(
    const RowCtas& ctas, bool vectors, u32 width, u8* to, float* scale_to, Part part) {
    __shared__ u32 of_warps[32], of_ctas[MAX_CTAS];
    if (vectors && width % WIDTH == 0 && (u64)to % WIDTH == 0)
        quantize_parts<WIDTH>(ctas, width, to, scale_to, of_warps, of_ctas, part);
    else quantize_parts<1>(ctas, width, to, scale_to, of_warps, of_ctas, part);
}
