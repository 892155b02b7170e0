// Turns an int4 weight into floats: integers times scales, rounded once.
//
// Defined outside: ELEMENT, f16 or bf16.

struct Dequantize {
    // In the order of crate twofour's layout/lanes.rs.
    const u32* values;
    const u32* meta;
    const u32* scales;
    u32* to; // [packed_rows, pitch / 2], two elements a word
    MetaOrder order;
    u32 units;       // units in a row of units
    u32 rows;        // rows of the int4 weight, padding included
    u32 per_row;     // scales of a row
    u32 packed_rows; // rows of the result, padding included
    u32 words;       // words of metadata in a row of the result, padding included
};

// Stores 32 columns of a row.
__device__ __forceinline__ void store_row(const Dequantize& p, u32 row, u32 word, const u32 (&pairs)[8], u32 codes) {
    uint4* to = (uint4*)(p.to + (u64)row * (8 * p.words) + 8 * word);
    to[0] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    to[1] = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
    store_meta<2>(p.order, p.packed_rows, p.words, row, word, codes);
}

// A thread converts 32 columns of two rows, whose integers lie in the same words.
extern "C" __global__ void __launch_bounds__(256) dequantize(const __grid_constant__ Dequantize p) {
    const u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    if (index >= (u64)(p.packed_rows / 2) * p.words) return;
    const u32 pair = (u32)(index / p.words), word = (u32)(index - (u64)pair * p.words);
    const u32 block = pair / 8, g = pair % 8, product = word % 4;
    if (16 * block >= p.rows) {
        const u32 zeros[8] = {};
        store_row(p, 16 * block + g, word, zeros, NO_VALUES);
        store_row(p, 16 * block + g + 8, word, zeros, NO_VALUES);
        return;
    }
    const u64 unit = (u64)block * p.units + word / 4;
    u32 numbers[4], codes[2];
    unrolled<4>([&](auto t) { numbers[t.value] = p.values[(unit * 32 + 4 * g + t.value) * 4 + product]; });
    unrolled<2>(
        [&](auto s) { codes[s.value] = p.meta[(unit * 32 + 4 * g + 2 * (product % 2) + s.value) * 2 + product / 2]; });
    const u32 scales = p.scales[((u64)block * p.per_row + (p.per_row == 1 ? 0 : word / 4)) * 8 + g];
    unrolled<2>([&](auto half) {
        constexpr u32 HALF = decltype(half)::value;
        const float scale = widen<F16>((u16)(scales >> (16 * HALF)));
        u32 pairs[8];
        unrolled<8>([&](auto j) {
            constexpr u32 NIBBLE = HALF + 2 * (decltype(j)::value / 4);
            const u32 of = numbers[j.value % 4];
            const float low = (float)((int)(of >> (4 * NIBBLE) & 15) - 8),
                        high = (float)((int)(of >> (4 * NIBBLE + 16) & 15) - 8);
            pairs[j.value] = narrow<ELEMENT>(low * scale) | (u32)narrow<ELEMENT>(high * scale) << 16;
        });
        const u32 low = codes[0] >> (16 * HALF) & 0xFFFF, high = codes[1] >> (16 * HALF) & 0xFFFF;
        store_row(p, 16 * block + g + 8 * HALF, word, pairs, low | high << 16);
    });
}
