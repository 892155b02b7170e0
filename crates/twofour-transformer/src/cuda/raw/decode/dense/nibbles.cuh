// int4 with an f16 scale for each group of 64 columns, from a zero point of 8. A step is two groups. Of each a lane has
// two words of eight columns; nibbles i and i + 4 of a word are its columns 2 i and 2 i + 1.

struct Weight {
    // Groups of a step that have a scale each.
    static constexpr u32 GROUPS = 2;
    // A lane has eight of its columns at a time.
    static constexpr u32 EIGHTS = 4;

    // Converts the eight columns of a word to pairs of ELEMENT. Placed in the lowest mantissa bits of 1024 (f16) or 128
    // (bf16) integers add their value; subtracting that number and the zero point is exact.
    template <class I> static __device__ __forceinline__ void convert(const u32 (&values)[4], I word, u32 (&pairs)[4]) {
        unrolled<4>([&](auto i) {
            u32 numbers;
            asm("lop3.b32 %0, %1, %2, %3, 0xEA;"
                : "=r"(numbers)
                : "r"(values[word.value] >> (4 * i.value)), "r"(0x000F000F),
                "r"(ELEMENT == F16 ? 0x64006400 : 0x43004300));
            if (ELEMENT == F16) asm("sub.f16x2 %0, %1, %2;" : "=r"(pairs[i.value]) : "r"(numbers), "r"(0x64086408));
            else
                asm("fma.rn.bf16x2 %0, %1, %2, %3;"
                    : "=r"(pairs[i.value])
                    : "r"(numbers), "r"(0x3F803F80), "r"(0xC308C308));
        });
    }

    template <class P> static __device__ __forceinline__ float scale(const P&, u32) { return 1.0f; }
};
