// Tiles of attention in shared memory.
//
// Defined outside: ELEMENT, DIM.

typedef Bits<ELEMENT>::type Raw;
constexpr u32 STEPS = DIM / 16;                // steps of a product over DIM
constexpr u32 CHUNKS = DIM / 8;                // pieces of 16 bytes of a row
constexpr u32 BOX = CHUNKS < 8 ? CHUNKS : 8;   // pieces of a row of a box: a tile of 128 elements is two boxes of 64

// Rows' tiles, and two stages of columns' tiles.
extern __shared__ u8 shared[];

// Returns the first tile's address: swizzles repeat every KiB. A KiB more than the tiles has been allocated.
__device__ __forceinline__ u32 tiles_begin() { return (shared_address(shared) + 1023) / 1024 * 1024; }

// Returns where 16 bytes of a tile of COUNT rows are, in bytes from the tile's begin: neighbouring rows are in
// different banks. These are the swizzles of 64 and of 128 bytes that TMA and `wgmma` have.
template <u32 COUNT> __device__ __forceinline__ u32 place(u32 row, u32 chunk) {
    const u32 turned = BOX == 4 ? chunk ^ (row / 2 & 3) : (chunk & 7) ^ (row & 7);
    return ((chunk / BOX * COUNT + row) * BOX + turned) * 16;
}

// Copies rows from `first` on to a tile in shared memory; rows beyond the last are zeros. `stride` is the number of
// elements between two rows.
template <u32 COUNT, u32 THREADS>
__device__ __forceinline__ void load_tile(u32 to, const Raw* from, u32 first, u32 positions, u32 stride) {
#pragma unroll
    for (u32 i = threadIdx.x; i < COUNT * CHUNKS; i += THREADS) {
        const u32 row = i / CHUNKS, chunk = i % CHUNKS;
        const bool is_there = first + row < positions;
        copy_16(to + place<COUNT>(row, chunk), from + (u64)(is_there ? first + row : 0) * stride + 8 * chunk, is_there);
    }
}

// Rounds the weights of 16 rows to the operand of a step over 16 columns.
template <u32 N> __device__ __forceinline__ void narrow_step(u32 (&to)[4], const float (&weights)[N / 8][4], u32 step) {
    to[0] = narrow_pair<ELEMENT>(weights[2 * step][0], weights[2 * step][1]);
    to[1] = narrow_pair<ELEMENT>(weights[2 * step][2], weights[2 * step][3]);
    to[2] = narrow_pair<ELEMENT>(weights[2 * step + 1][0], weights[2 * step + 1][1]);
    to[3] = narrow_pair<ELEMENT>(weights[2 * step + 1][2], weights[2 * step + 1][3]);
}
