// Decompresses a 2:4 weight in the GEMM kernels' order to the dense one.
//
// Defined outside: BYTES of an element.

struct Unpack {
    const void* values; // [rows, pitch / 2]
    const u32* meta;
    void* dense;        // [rows, cols]
    u32 rows, cols;
    u32 packed_rows;    // rows, padding included
    u32 pitch;          // columns, padding included
};

template <int N> struct Raw;
template <> struct Raw<1> { typedef u8 type; };
template <> struct Raw<2> { typedef u16 type; };
typedef Raw<BYTES>::type Element_;

// Returns the codes of row `row`, groups 8 word to 8 word + 7, from the address at which `store_meta` of codes.cuh
// stores them. The order is that of tiles of 64 columns of 16-bit elements or 128 of 8-bit ones.
__device__ __forceinline__ u32 load_meta(const Unpack& p, u32 row, u32 word) {
    constexpr u32 TILE = BYTES == 2 ? 64 : 128;
    const u32 k = 32 * word, m = row % 64;
    const u64 atom = (u64)(k / TILE) * (p.packed_rows / 64) + row / 64;
    if (BYTES == 1) return p.meta[atom * (2 * TILE) + m * (TILE / 32) + k % TILE / 32];
    const u16* halves = (const u16*)p.meta + atom * (4 * TILE);
    const u32 place = TILE / 32 * (m / 16 * 16 + m % 8) + k % TILE / 32;
    return halves[2 * place + m / 8 % 2] | (u32)halves[2 * (place + TILE / 32 * 8) + m / 8 % 2] << 16;
}

// A thread decompresses 32 columns of a row.
extern "C" __global__ void __launch_bounds__(256) unpack(const __grid_constant__ Unpack p) {
    const u32 words = (p.cols + 31) / 32;
    const u64 index = (u64)blockIdx.x * 256 + threadIdx.x;
    if (index >= (u64)p.rows * words) return;
    const u32 row = (u32)(index / words), word = (u32)(index - (u64)row * words), first = 32 * word;
    const u32 codes = load_meta(p, row, word);
    const Element_* values = (const Element_*)p.values + (u64)row * (p.pitch / 2) + first / 2;
    Element_* dense = (Element_*)p.dense + (u64)row * p.cols + first;
    struct __align__(4 * BYTES) Four { Element_ of[4]; };
    const bool aligned = p.cols % 4 == 0 && (u64)p.dense % sizeof(Four) == 0;
    unrolled<8>([&](auto g) {
        const u32 col = 4 * g.value, code = codes >> (4 * g.value) & 15;
        if (first + col >= p.cols) return;
        const Element_ low = values[2 * g.value], high = values[2 * g.value + 1];
        Four four;
        unrolled<4>([&](auto i) {
            four.of[i.value] = (code & 3) == i.value ? low : code >> 2 == i.value ? high : (Element_)0;
        });
        if (aligned) {
            *(Four*)(dense + col) = four;
        } else {
            unrolled<4>([&](auto i) {
                if (first + col + i.value < p.cols) dense[col + i.value] = four.of[i.value];
            });
        }
    });
}
