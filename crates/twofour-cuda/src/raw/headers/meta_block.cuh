// A CTA gathers the metadata of 64 rows and 128 columns in shared memory, in the order of a matrix of that size, and
// copies it to global memory.

constexpr u32 ROWS_OF_BLOCK = 64, HALVES_OF_BLOCK = 8, WORDS_OF_BLOCK = ROWS_OF_BLOCK * HALVES_OF_BLOCK / 2;

// Indices of the half words of an even row and of the next row.
struct HalfPlaces {
    u32 even, odd;
};

// Returns the indices of groups 4 half to 4 half + 3. All orders but the canonical one are powers of two.
template <int ELEMENT_BYTES> __device__ __forceinline__ HalfPlaces half_places(u32 order, u32 row, u32 half) {
    if (order == 0) return {row * HALVES_OF_BLOCK + half, (row + 1) * HALVES_OF_BLOCK + half};
    const u32 k = 16 * half, within = k & (order - 1), tile = 4 * (k - within), per_row = order / 16;
    // For 16-bit elements 16 columns with an even index of sixteen are in eight words, those with an odd index in the
    // next eight.
    const u32 place = ELEMENT_BYTES == 1
                          ? tile + row * per_row + within / 16
                          : tile + per_row * (row / 16 * 16 + half % 2 * 8 + row % 8) + within / 32 * 2 + row / 8 % 2;
    return {place, place + per_row};
}

// Copies the words to the rows from `first_row` on, and in each row to the words from `first_word` on. Requires 256
// threads.
__device__ __forceinline__ void store_meta_of_block(
    MetaOrder to, u32 rows, u32 words_per_row, u32 first_row, u32 first_word, const u32 (&words)[WORDS_OF_BLOCK]) {
    const u32 i = threadIdx.x;
    if (to.order == 0) {
        const u32 row = first_row + i / 4, word = first_word + i % 4;
        if (row < rows && word < words_per_row) to.words[(u64)row * words_per_row + word] = words[i];
        return;
    }
    // The words of each tile are contiguous: twice as many as it has columns.
    const u32 log = 31 - __clz(to.order), tile = (32 * first_word >> log) + (i >> (log + 1));
    if (tile << log < 32 * words_per_row)
        to.words[((u64)tile * (rows / 64) + first_row / 64) * (2 * to.order) + (i & (2 * to.order - 1))] = words[i];
}
