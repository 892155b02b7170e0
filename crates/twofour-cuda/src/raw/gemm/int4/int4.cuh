// Shared parts of GEMM kernels with an int4 2:4 W. W is in the order of `twofour::layout::lanes`, in units of 16 rows
// by 128 columns. Integers are converted exactly to X's type, and scales multiply accumulators.
//
// Defined outside: Sum (float), ELEMENT.

constexpr u32 UNIT_COLUMNS = 128, UNIT_ROWS = 16;

struct Parameters {
    const u32* values;
    const u32* meta;
    const u32* scales;
    const u16* x;
    Output to;
    u32 output;
    u32 features, tokens, reduction;
    // Whether all of X stays in shared memory.
    u32 resident;
};

// Converts two integers to elements: nibbles `which` and `which + 4`. Placed in the lowest mantissa bits of 1024 (f16)
// or 128 (bf16) they add their value; subtracting that number and the zero point 8 is exact.
__device__ __forceinline__ u32 elements(u32 word, int which) {
    u32 numbers, pair;
    // (word & mask) | exponent as one instruction, which the compiler does not find.
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
        : "=r"(numbers)
        : "r"(word >> (4 * which)), "r"(0x000F000F), "r"(ELEMENT == F16 ? 0x64006400 : 0x43004300));
    if (ELEMENT == F16) {
        asm("sub.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(numbers), "r"(0x64086408));
    } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(numbers), "r"(0x3F803F80), "r"(0xC308C308));
    }
    return pair;
}

// Returns the f16 scales of rows `lane / 4` and `lane / 4 + 8`.
__device__ __forceinline__ void scales_of(u32 word, float& low, float& high) {
    low = widen<F16>((u16)word);
    high = widen<F16>((u16)(word >> 16));
}

// Loads a lane's part of a unit from shared memory: the integers of four instructions, and their metadata.
__device__ __forceinline__ void load_unit(u32 (&values)[4], u32 (&codes)[2], u32 at_values, u32 at_codes) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(at_values)
                 : "memory");
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(codes[0]), "=r"(codes[1]) : "r"(at_codes) : "memory");
}

// Adds scaled accumulators of 16 rows and eight tokens.
__device__ __forceinline__ void add_scaled(Sum (&sums)[4], const Sum (&parts)[4], u32 scales) {
    float low, high;
    scales_of(scales, low, high);
    #pragma unroll
    for (int i = 0; i < 4; i++) sums[i] = fmaf(i < 2 ? low : high, parts[i], sums[i]);
}
