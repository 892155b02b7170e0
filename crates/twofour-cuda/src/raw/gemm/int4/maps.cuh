// TMA descriptors of an int4 2:4 weight and X: see int4.cuh, and hopper.cuh for copies.
//
// Defined before: BY_ROW, X_TILE_BYTES, UNIT_COLUMNS.

// Elements of the weight's maps are words of eight bytes.
struct Maps {
    TensorMap values, meta, scales, x;

    // Returns the i-th map that a kernel uses, or null; lane i prefetches it.
    __device__ __forceinline__ const TensorMap* map(u32 i) const {
        return i == 0 ? &values : i == 1 ? &x : i == 2 ? &meta : i == 3 && !BY_ROW ? &scales : nullptr;
    }

    // Issues the copies of a step to addresses in shared memory: two tiles of X, and units of W from row of units
    // `unit` on.
    __device__ __forceinline__ void ask(
        u32 to_x, u32 to_values, u32 to_codes, u32 to_scales, u32 unit, u32 step, u32 full) const {
        copy_tile(to_values, &values, step * 64, unit, full);
        copy_tile(to_codes, &meta, step * 32, unit, full);
        if (!BY_ROW) copy_tile(to_scales, &scales, step * 4, unit, full);
        copy_tile(to_x, &x, step * UNIT_COLUMNS, 0, full);
        copy_tile(to_x + X_TILE_BYTES, &x, step * UNIT_COLUMNS + UNIT_COLUMNS / 2, 0, full);
    }
};
