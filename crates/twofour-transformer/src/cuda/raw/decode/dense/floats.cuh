// Tokens of ELEMENT, for a Weight whose integers are converted to ELEMENT.

struct Form {
    typedef float Sum;
    static constexpr u32 GROUPS = Weight::GROUPS;
    // Bytes of a lane's contiguous columns of x, of which a step has one run or, with groups, one for each.
    static constexpr u32 X_BYTES = 32, X_RUN_BYTES = 4 * X_BYTES, X_STEP_BYTES = Weight::EIGHTS / 2 * X_RUN_BYTES;

    // Adds a step's products; `x` has the lane's address of each tile's step.
    template <int TILES> static __device__ __forceinline__ void add(
        float (&sums)[TILES][4], const u32 (&values)[2][4], const u32 (&scales)[2], const u8* const (&x)[TILES]) {
        unrolled<Weight::EIGHTS / 2>([&](auto run) {
            float parts[TILES][4] = {};
            unrolled<2>([&](auto half) {
                constexpr int EIGHTH = 2 * decltype(run)::value + decltype(half)::value;
                u32 w[2][4];
                Weight::convert(values[0], Int<EIGHTH>(), w[0]);
                Weight::convert(values[1], Int<EIGHTH>(), w[1]);
                unrolled<TILES>([&](auto tile) {
                    const uint4 four = load_x(x[tile.value] + run.value * X_RUN_BYTES + half.value * 16);
                    float(&to)[4] = GROUPS ? parts[tile.value] : sums[tile.value];
                    const u32 first[4] = {w[0][0], w[1][0], w[0][1], w[1][1]},
                              second[4] = {w[0][2], w[1][2], w[0][3], w[1][3]};
                    multiply<ELEMENT>(to, first, four.x, four.y);
                    multiply<ELEMENT>(to, second, four.z, four.w);
                });
            });
            if constexpr (GROUPS > 0) {
                unrolled<TILES>([&](auto tile) {
                    unrolled<4>([&](auto i) {
                        const u32 word = scales[i.value / 2];
                        const float scale = widen<F16>((u16)(run.value ? word >> 16 : word));
                        sums[tile.value][i.value] = fmaf(scale, parts[tile.value][i.value], sums[tile.value][i.value]);
                    });
                });
            }
        });
    }

    template <class P> static __device__ __forceinline__ float scale(const P& p, u32 feature, u32) {
        return Weight::scale(p, feature);
    }
};
