// `mma.sp`: multiplies 16 rows of a 2:4 W by eight tokens; and loads of its operands from shared memory.
//
// Defined outside: Sum and the constraint letter of its registers (SUM_REGISTER), ELEMENT, INSTRUCTION.

#define SPARSE_PRODUCT(selector)                                                                                     \
    asm("mma.sp::ordered_metadata.sync.aligned." INSTRUCTION                                                         \
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, " selector ";"              \
        : "+" SUM_REGISTER(sums[0]), "+" SUM_REGISTER(sums[1]), "+" SUM_REGISTER(sums[2]), "+" SUM_REGISTER(sums[3]) \
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(codes))

// Accumulates one instruction. For 16-bit elements the selector says which two lanes of every four hold the metadata.
template <int SELECTOR>
__device__ __forceinline__ void sparse_product(Sum (&sums)[4], const u32 (&w)[4], const u32 (&x)[4], u32 codes) {
    if (SELECTOR == 0) SPARSE_PRODUCT("0x0");
    else SPARSE_PRODUCT("0x1");
}

// Metadata in the sm_90 order. A step is two instructions deep. With 16-bit elements a lane has one word for both, and
// the selector tells them apart; with 8-bit elements it has a word for each.
constexpr int CODE_WORDS = sizeof(Bits<ELEMENT>::type) == 2 ? 1 : 2;
// Returns the index of a lane's first word among those of 16 rows; the second is two words on.
__device__ __forceinline__ u32 code_word(u32 lane) {
    return CODE_WORDS == 1 ? 2 * (lane % 2 * 8 + lane / 4) + lane / 2 % 2
                           : 4 * (lane % 2 * 8 + lane / 4) + lane / 2 % 2;
}

// Loads four 8x8 matrices (`ldmatrix.x4`) of rows of 16 bytes; lane i's `at` is the address of row i.
__device__ __forceinline__ void load_matrices(u32 at, u32 (&out)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
}
