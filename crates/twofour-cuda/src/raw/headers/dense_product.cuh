// Dense products of 16x16 by 16x8 tiles on the tensor cores, of f16 or bf16 in f32, and copies that feed them; from
// sm_80 on. PTX ISA, "Warp-level matrix instructions" has the layouts of fragments.

// d += a b for fragments of a 16x16 tile (row-major), a 16x8 tile (column-major) and a 16x8 tile of sums.
template <int E> __device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (E == BF16) {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, "
            "%1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
            "%2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

// Loads four 8x8 matrices of 16-bit elements; lane `8 i + j` has the address of row j of matrix i.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// The same, transposed.
__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(address) : "memory");
}

// Copies 16 bytes from global to shared memory, or writes zeros where there is nothing to copy.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :
        : "r"(to), "l"(from), "r"(is_there ? 16 : 0)
        : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
// Waits until at most N groups of this thread's copies are under way.
template <int N> __device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(N) : "memory");
}

// Returns two rounded to the nearest, the first in the lower half.
template <int E> __device__ __forceinline__ u32 narrow_pair(float first, float second) {
    u32 bits;
    if constexpr (E == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}

// Returns 2 to the power of x; 0 for -inf.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
