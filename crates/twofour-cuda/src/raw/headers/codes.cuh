// The metadata codes of groups, and the address of each code, as in crate twofour's compressed/code.rs and
// layout/sm90.rs.

// Returns the code `first | second << 2` of the elements kept, bit i for element i. With fewer than two the lowest free
// elements complete it. The constants hold a nibble for each set of four bits. Sets of more than two do not occur;
// their nibbles are those of their two lowest.
__device__ __forceinline__ u32 code_of(u32 kept) {
    // 0000 0001 0010 0011 0100 0101 0110 0111 | 1000 1001 1010 1011 1100 1101 1110 1111
    //    4    4    4    4    8    8    9    4 |    C    C    D    4    E    8    9    4
    const u32 low = 0x49884444u, high = 0x498E4DCCu;
    return ((kept & 8 ? high : low) >> (4 * (kept & 7))) & 15;
}

// Codes of eight groups without nonzeros.
constexpr u32 NO_VALUES = 0x44444444u;

// `order` is 0 for canonical metadata, otherwise the tile's columns in the sm_90 order: 32, 64 or 128.
struct MetaOrder {
    u32* words;
    u32 order;
};

// Stores the codes of row `row`, groups 8 word to 8 word + 7, of a weight with elements of ELEMENT_BYTES bytes.
template <int ELEMENT_BYTES>
__device__ __forceinline__ void store_meta(MetaOrder to, u32 rows, u32 words_per_row, u32 row, u32 word, u32 codes) {
    if (to.order == 0) {
        to.words[(u64)row * words_per_row + word] = codes;
        return;
    }
    u32 tile = to.order, k = 32 * word;
    u64 atom = (u64)(k / tile) * (rows / 64) + row / 64;
    u32 m = row % 64;
    if (ELEMENT_BYTES == 1) {
        to.words[atom * (2 * tile) + m * (tile / 32) + k % tile / 32] = codes;
        return;
    }
    u16* halves = (u16*)to.words + atom * (4 * tile);
    // k is a multiple of 32: the word's lower half belongs to 16 columns with an even index of sixteen, its upper half
    // to the 16 after them.
    u32 place = tile / 32 * (m / 16 * 16 + m % 8) + k % tile / 32;
    halves[2 * place + m / 8 % 2] = (u16)codes;
    halves[2 * (place + tile / 32 * 8) + m / 8 % 2] = (u16)(codes >> 16);
}
