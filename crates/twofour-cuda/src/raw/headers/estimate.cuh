// Estimators for groups of four, as in crate twofour's estimate/: which elements are kept, their values, and the random
// numbers of stochastic estimators.

// ---- random numbers
// ------------------------------------------------------------------------------------------------------------

// Philox 4x32 with ten rounds.
__device__ __forceinline__ uint4 philox(u64 seed, u32 block, u32 row, u32 purpose) {
    u32 a = block, b = row, c = purpose, d = 0, key = (u32)seed, other_key = (u32)(seed >> 32);
    #pragma unroll
    for (int round = 0; round < 10; round++) {
        const u32 high = __umulhi(0xD2511F53u, a), low = 0xD2511F53u * a, other_high = __umulhi(0xCD9E8D57u, c),
                  other_low = 0xCD9E8D57u * c;
        a = other_high ^ b ^ key;
        b = other_low;
        c = high ^ d ^ other_key;
        d = low;
        key += 0x9E3779B9u;
        other_key += 0xBB67AE85u;
    }
    return make_uint4(a, b, c, d);
}

// Returns a multiple of 2^-24 in [0, 1).
__device__ __forceinline__ float unit(u32 word) { return (float)(word >> 8) * 0x1p-24f; }

// ---- estimators of groups: kept elements and their values
// ------------------------------------------------------------------------

// Arithmetic that the compiler must not contract to FMA.
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float over(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float sum_of(float a, float b, float c) { return add(add(a, b), c); }

// Returns the mask of the two largest magnitudes, ties to the lower index.
__device__ __forceinline__ u32 two_largest(const float (&v)[4]) {
    u32 kept = 0;
    unrolled<4>([&](auto i) {
        u32 larger = 0;
        unrolled<4>([&](auto j) {
            const u32 key = __float_as_uint(v[i.value]) & 0x7FFFFFFF, other = __float_as_uint(v[j.value]) & 0x7FFFFFFF;
            if (j.value != i.value) larger += j.value < i.value ? other >= key : other > key;
        });
        if (larger < 2) kept |= 1u << i.value;
    });
    return kept;
}

__device__ __forceinline__ u32 soft_threshold(float (&v)[4]) {
    const u32 kept = two_largest(v);
    float third = 0.0f;
    unrolled<4>([&](auto i) {
        if (!(kept >> i.value & 1)) third = fmaxf(third, fabsf(v[i.value]));
    });
    unrolled<4>([&](auto i) { v[i.value] = copysignf(add(fabsf(v[i.value]), -third), v[i.value]); });
    return kept;
}

// The sum of magnitudes, and the sum without each element.
struct Sums {
    float all, others[4];
    __device__ __forceinline__ Sums(const float (&m)[4]) {
        const float ab = add(m[0], m[1]), cd = add(m[2], m[3]);
        all = add(ab, cd);
        others[0] = add(m[1], cd);
        others[1] = add(m[0], cd);
        others[2] = add(ab, m[3]);
        others[3] = add(ab, m[2]);
    }
};

__device__ __forceinline__ float signed_as(float value, float element, float magnitude) {
    return magnitude > 0.0f ? copysignf(value, element) : 0.0f;
}

// Returns the first element at which the cumulative sum of magnitudes exceeds `target`, leaving out the element
// `without` (4: none): as `draw` on the CPU.
__device__ __forceinline__ u32 draw(const float (&magnitudes)[4], u32 without, float target) {
    float end = 0.0f;
    u32 drawn = 4, last = without == 0 ? 1 : 0;
    unrolled<4>([&](auto i) {
        if (i.value == without) return;
        end = add(end, magnitudes[i.value]);
        if (drawn == 4 && target < end) drawn = i.value;
        if (magnitudes[i.value] > 0.0f) last = i.value;
    });
    return drawn == 4 ? last : drawn;
}

__device__ __forceinline__ u32 mvue_approximate(float (&v)[4], float first_random, float second_random) {
    float m[4], q[4];
    unrolled<4>([&](auto i) { m[i.value] = times(fabsf(v[i.value]), 0.125f); });
    const Sums sums(m);
    const u32 first = draw(m, 4, times(first_random, sums.all));
    const float left = first == 0   ? sums.others[0]
                       : first == 1 ? sums.others[1]
                       : first == 2 ? sums.others[2]
                                    : sums.others[3];
    const u32 second = draw(m, first, times(second_random, left));
    unrolled<4>(
        [&](auto i) { q[i.value] = sums.others[i.value] > 0.0f ? over(m[i.value], sums.others[i.value]) : 0.0f; });
    const float of_others[4] = {
        sum_of(q[1], q[2], q[3]), sum_of(q[0], q[2], q[3]), sum_of(q[0], q[1], q[3]), sum_of(q[0], q[1], q[2])};
    const u32 kept = 1u << first | 1u << second;
    unrolled<4>([&](auto i) {
        if (kept >> i.value & 1)
            v[i.value] = signed_as(times(8.0f, over(sums.all, add(1.0f, of_others[i.value]))), v[i.value], m[i.value]);
    });
    return kept;
}

// A compressed group: two values and their code.
struct Two {
    float a, b;
    u32 code;
};

__device__ __forceinline__ Two of_kept(const float (&v)[4], u32 kept) {
    Two two;
    two.code = code_of(kept);
    const u32 first = two.code & 3, second = two.code >> 2;
    two.a = kept >> first & 1 ? first == 0 ? v[0] : first == 1 ? v[1] : v[2] : 0.0f;
    two.b = kept >> second & 1 ? second == 1 ? v[1] : second == 2 ? v[2] : v[3] : 0.0f;
    return two;
}

// Comparisons and selects are the bottleneck, so there are as few as possible. Both drawn indices come in ascending
// order, and therefore form the code.
__device__ __forceinline__ Two mvue(const float (&v)[4], float random) {
    float m[4], line[4];
    unrolled<4>([&](auto i) { m[i.value] = times(fabsf(v[i.value]), 0.125f); });
    const Sums sums(m);
    unrolled<4>([&](auto i) { line[i.value] = fminf(m[i.value], sums.others[i.value]); });
    const float one = line[0], two = add(one, line[1]), three = add(two, line[2]);
    const float half = times(0.5f, add(three, line[3])), point = times(random, half), other = add(point, half);
    const bool p1 = one <= point, p2 = two <= point, p3 = three <= point, q1 = one <= other, q2 = two <= other,
               q3 = three <= other;
    const u32 first = p1 + p2 + p3, second = q1 + q2 + q3;
    Two drawn = {p3   ? v[3]
                 : p2 ? v[2]
                 : p1 ? v[1]
                      : v[0],
        q3   ? v[3]
        : q2 ? v[2]
        : q1 ? v[1]
             : v[0],
        first | second << 2};
    if (first == second) drawn = of_kept(v, half > 0.0f ? 1u << first : two_largest(v));
    const float value = times(8.0f, half);
    drawn.a = signed_as(fmaxf(value, fabsf(drawn.a)), drawn.a, times(fabsf(drawn.a), 0.125f));
    drawn.b = signed_as(fmaxf(value, fabsf(drawn.b)), drawn.b, times(fabsf(drawn.b), 0.125f));
    return drawn;
}

// ---- `mvue` for 16-bit numbers that keep their type
// -------------------------------------------------------------------------------

// Values are drawn, compared with half the line and stored as 16-bit pairs. This is exact: of a rounded threshold and a
// 16-bit magnitude, the same one is the larger as before rounding. Returns the larger of both words in each half.
template <int E> __device__ __forceinline__ u32 larger(u32 a, u32 b) {
    u32 pair;
    if (E == BF16) asm("max.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    else asm("max.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
    return pair;
}

// Returns the lower (0) or upper (1) halves of two words, side by side.
__device__ __forceinline__ u32 halves_of(u32 a, u32 b, int half) { return permute(a, b, half == 0 ? 0x5410 : 0x7632); }

// Returns how many of three ascending ends are at most `point`. The count is a float, because FP32 additions have free
// issue slots where comparisons and selects are the bottleneck.
__device__ __forceinline__ float ends_before(float one, float two, float three, float point) {
    float count = 0.0f;
    asm("{\n"
        ".reg .pred p;\n"
        ".reg .f32 end;\n"
        "setp.le.f32 p, %2, %4;\n"
        "selp.f32 end, %3, %1, p;\n"
        "@p add.rn.f32 %0, %0, 0f40000000;\n"
        "setp.le.f32 p, end, %4;\n"
        "@p add.rn.f32 %0, %0, 0f3F800000;\n"
        "}"
        : "+f"(count)
        : "f"(one), "f"(two), "f"(three), "f"(point));
    return count;
}

// The draw of one group: both values side by side, and their indices, the first in the lowest byte and the second in
// the next.
template <int E> struct Drawn {
    u32 pair, places;
    // of all magnitudes / 8; infinite where `mvue` must compute the group, because rounding moved a point to the
    // other's element or past the end
    float sum;

    __device__ __forceinline__ Drawn(u32 low, u32 high, float random) {
        const float v[4] = {
            widen<E>((u16)low), widen<E>((u16)(low >> 16)), widen<E>((u16)high), widen<E>((u16)(high >> 16))};
        float m[4], line[4];
        unrolled<4>([&](auto i) { m[i.value] = times(fabsf(v[i.value]), 0.125f); });
        const Sums sums(m);
        sum = sums.all;
        unrolled<4>([&](auto i) { line[i.value] = fminf(m[i.value], sums.others[i.value]); });
        const float one = line[0], two = add(one, line[1]), three = add(two, line[2]), end = add(three, line[3]);
        const float half = times(0.5f, end), point = times(random, half), other = add(point, half);
        float first = ends_before(one, two, three, point), second = ends_before(one, two, three, other);
        if (other >= end || first == second) {
            if (half > 0.0f) sum = __int_as_float(0x7F800000);
            // The group has at most one nonzero.
            first = 0.0f;
            second = m[3] > 0.0f ? 3.0f : m[2] > 0.0f ? 2.0f : 1.0f;
            low = plus_zeros<E>(low);
            high = plus_zeros<E>(high);
        }
        // Adding 2^23 puts the integer into the float's lowest bits.
        places = __float_as_uint(add(first, __fmaf_rn(second, 256.0f, 8388608.0f)));
        // Bytes 2 first, 2 first + 1, 2 second, 2 second + 1.
        const u32 chosen = permute(low, high, places * 0x22 + 0x1010);
        const float value = times(8.0f, half);
        pair = larger<E>(narrow_two<E>(value, value), chosen & 0x7FFF7FFF) | (chosen & 0x80008000);
    }
};

// Draws four groups in order. Returns false where `mvue` must compute one of them, or where a value is NaN or infinite.
template <int E>
__device__ __forceinline__ bool drawn(const uint2 (&groups)[4], uint4 random, u32 (&pairs)[4], u32& codes) {
    const Drawn<E> a(groups[0].x, groups[0].y, unit(random.x)), b(groups[1].x, groups[1].y, unit(random.y));
    const Drawn<E> c(groups[2].x, groups[2].y, unit(random.z)), d(groups[3].x, groups[3].y, unit(random.w));
    pairs[0] = a.pair, pairs[1] = b.pair, pairs[2] = c.pair, pairs[3] = d.pair;
    const u32 ab = a.places + (b.places << 4), cd = c.places + (d.places << 4);
    u32 all = permute(ab, cd, 0x5410);
    all = (all | all >> 6) & 0x00FF00FF;
    codes = (all | all >> 8) & 0xFFFF;
    return add(add(a.sum, b.sum), add(c.sum, d.sum)) <= 3.402823466e38f;
}
