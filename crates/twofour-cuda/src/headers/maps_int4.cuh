// A four-bit 2:4 weight and X, described to TMA: see int4.cuh, and hopper.cuh for copies.
//
// Defined before: BY_ROW, X_TILE_BYTES, UNIT_COLUMNS.

// Maps of the weight count words of eight bytes.
struct Maps {
    TensorMap values, meta, scales, x;

    // Those that a kernel uses, for the i-th lane to prefetch.
    __device__ __forceinline__ const TensorMap* map(u32 i) const { return i == 0 ? &values : i == 1 ? &x : i == 2 ? &meta : i == 3 && !BY_ROW ? &scales : nullptr; }

    // Asks for a step: two tiles of X, and units of W from that row of units on, to addresses in shared memory.
    __device__ __forceinline__ void ask(u32 to_x, u32 to_values, u32 to_codes, u32 to_scales, u32 unit, u32 step, u32 full) const {
        copy_tile(to_values, &values, step * 64, unit, full);
        copy_tile(to_codes, &meta, step * 32, unit, full);
        if (!BY_ROW) copy_tile(to_scales, &scales, step * 4, unit, full);
        copy_tile(to_x, &x, step * UNIT_COLUMNS, 0, full);
        copy_tile(to_x + X_TILE_BYTES, &x, step * UNIT_COLUMNS + UNIT_COLUMNS / 2, 0, full);
    }
};
