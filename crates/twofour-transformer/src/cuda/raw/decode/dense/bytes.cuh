// 8-bit integers with a scale for each row. A lane's bytes of a step are its columns in their order.

struct Weight {
    // Groups of a step that have a scale each; 0 where rows have.
    static constexpr u32 GROUPS = 0;
    // Eighths of columns: a lane has eight of its columns at a time.
    static constexpr u32 EIGHTS = 2;

    // Converts the eight columns of an eighth to pairs of ELEMENT, exactly.
    template <class I>
    static __device__ __forceinline__ void convert(const u32 (&values)[4], I eighth, u32 (&pairs)[4]) {
        unrolled<4>([&](auto i) {
            pairs[i.value] = pair(values[2 * eighth.value + i.value / 2], i.value % 2 ? 0x4342 : 0x4140);
        });
    }

    // Converts two bytes of a word, the lower or the upper ones, as the selector says.
    static __device__ __forceinline__ u32 pair(u32 word, u32 selector) {
        u32 two;
        if (ELEMENT == F16) {
            // An integer plus 128 in the lowest mantissa bits of 1024.
            asm("sub.f16x2 %0, %1, %2;"
                : "=r"(two)
                : "r"(__byte_perm(word ^ 0x80808080, 0x64646464, selector)), "r"(0x64806480));
        } else {
            // Seven bits are the mantissa of 128; the sign makes the number to subtract, 128, 256.
            const u32 numbers = __byte_perm(word, 0, selector);
            u32 low, less;
            asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(low) : "r"(numbers), "r"(0x007F007F), "r"(0x43004300));
            asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(less) : "r"(numbers), "r"(0x00800080), "r"(0xC300C300));
            asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(two) : "r"(low), "r"(0x3F803F80), "r"(less));
        }
        return two;
    }

    template <class P> static __device__ __forceinline__ float scale(const P& p, u32 feature) {
        return ((const float*)p.scales)[feature];
    }
};
