// Shared parts of GEMM kernels for at most eight tokens, whose W goes from memory straight into the registers of
// `mma.sp`. They are bound by HBM bandwidth.
//
// A CTA computes 16 * HEIGHT rows of W. Each of its warps accumulates a part of the columns, step by step, with a
// prefetch distance of DEPTH steps. CTAs do not synchronize, and warps synchronize only at the end, to add their
// partial sums. Each warp keeps its columns of X in shared memory.
//
// Defined outside: HEIGHT, WARPS, DEPTH, BLOCKS (CTAs resident on an SM).

constexpr u32 THREADS = WARPS * 32, ROWS = 16 * HEIGHT;
// On Blackwell the same code takes a few registers more.
#if __CUDA_ARCH__ >= 1000
constexpr u32 RESIDENT = BLOCKS > 2 ? BLOCKS - 1 : BLOCKS;
#else
constexpr u32 RESIDENT = BLOCKS;
#endif
// Shared memory: accumulators of all warps, then X.
constexpr u32 AT_X = THREADS * HEIGHT * 16;

// Predicated loads instead of branches: the compiler waits for a load behind a branch at once.
__device__ __forceinline__ void load(u32 (&to)[4], const void* from, bool there) {
    asm volatile(
        "{.reg .pred there; setp.ne.u32 there, %5, 0; @there ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, "
        "%3}, [%4];}"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "l"(from), "r"((u32)there));
}
__device__ __forceinline__ void load(u32 (&to)[2], const void* from, bool there) {
    asm volatile(
        "{.reg .pred there; setp.ne.u32 there, %3, 0; @there ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, "
        "[%2];}"
        : "=r"(to[0]), "=r"(to[1])
        : "l"(from), "r"((u32)there));
}
__device__ __forceinline__ void load(u32& to, const void* from, bool there) {
    asm volatile(
        "{.reg .pred there; setp.ne.u32 there, %2, 0; @there ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1];}"
        : "=r"(to)
        : "l"(from), "r"((u32)there));
}

// The steps of a warp.
struct Part { u32 begin, end; };
__device__ __forceinline__ Part part_of(u32 steps) {
    const u32 warp = threadIdx.x / 32;
    return {steps * warp / WARPS, steps * (warp + 1) / WARPS};
}

// A warp's columns of X, in shared memory. Rows are padded, so that fewer lanes access the same bank.
template <u32 STEP_BYTES> struct Activations {
    u32 first, row_bytes;

    // Issues the copies of a warp's columns of `tokens` rows of X, of `steps` steps each.
    __device__ __forceinline__ Activations(const u8* x, u32 tokens, u32 steps, Part part, const u8* memory) {
        row_bytes = (steps + WARPS - 1) / WARPS * STEP_BYTES + 16;
        first = (u32)__cvta_generic_to_shared(memory) + AT_X + threadIdx.x / 32 * tokens * row_bytes;
        x += (u64)part.begin * STEP_BYTES;
        #pragma unroll 1
        for (u32 token = 0; token < tokens; token++) {
            #pragma unroll 2
            for (u32 at = threadIdx.x % 32 * 16; at < (part.end - part.begin) * STEP_BYTES; at += 32 * 16) {
                asm volatile(
                    "cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(first + token * row_bytes + at), "l"(x + at)
                    : "memory");
            }
            x += (u64)steps * STEP_BYTES;
        }
    }
    // A warp reads only what its own lanes have copied.
    __device__ __forceinline__ void wait() const {
        asm volatile("cp.async.wait_all;" ::: "memory");
        __syncwarp();
    }
};

// Multiplies all steps of a warp, DEPTH of which the reader has loaded ahead. `x` is the address of the lane's
// activations of the first step; each step's are X_BYTES after those before.
template <class Step, u32 X_BYTES, class Reader> __device__ __forceinline__ void add_all(
    Sum (&sums)[HEIGHT][4], Reader& reader, Step (&steps)[DEPTH], Part part, u32 x) {
#pragma unroll 1
    for (int left = part.end - part.begin; left > 0; left -= DEPTH) {
        #pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (d < left) add(sums, steps[d], x + d * X_BYTES);
            reader.next(steps[d], d + (int)DEPTH < left);
        }
        x += DEPTH * X_BYTES;
    }
}

// Adds the partial sums of all warps and stores the results of the rows from `feature` on.
__device__ __forceinline__ void finish(
    const Output& to, u32 output, u32 features, u32 tokens, const Sum (&sums)[HEIGHT][4], u8* memory, u32 feature) {
#pragma unroll
    for (u32 m = 0; m < HEIGHT; m++)
        ((float4*)memory)[m * THREADS + threadIdx.x] = make_float4(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
    __syncthreads();
    #pragma unroll 1
    for (u32 i = threadIdx.x; i < ROWS * tokens; i += THREADS) {
        const u32 row = i % ROWS, token = i / ROWS;
        if (feature + row >= features) continue;
        // The accumulator layout of `mma`: a lane holds rows r and r + 8, tokens 2t and 2t + 1.
        const u32 lane = row % 8 * 4 + token / 2, which = row % 16 / 8 * 2 + token % 2;
        const Sum* from = (const Sum*)memory + (row / 16 * THREADS + lane) * 4 + which;
        Sum total = 0;
        #pragma unroll
        for (u32 warp = 0; warp < WARPS; warp++) total += from[warp * 128];
        store(to, output, total, feature + row, token);
    }
}
