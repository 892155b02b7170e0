// The product of 16 rows of a 2:4 W with eight tokens, of 16-bit elements: Sum and ELEMENT are defined outside. The selector tells which two lanes of every four
// have the codes.

#define MULTIPLY(TYPE, SELECTOR)                                                                                                           \
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "   \
                 "{%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, " SELECTOR ";"                                                                \
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                                              \
                 : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(codes))
template <int SELECTOR> __device__ __forceinline__ void sparse_product(Sum (&sums)[4], const u32 (&w)[4], const u32 (&x)[4], u32 codes) {
    if (ELEMENT == F16) {
        if (SELECTOR == 0) MULTIPLY("f16", "0x0");
        else MULTIPLY("f16", "0x1");
    } else {
        if (SELECTOR == 0) MULTIPLY("bf16", "0x0");
        else MULTIPLY("bf16", "0x1");
    }
}

