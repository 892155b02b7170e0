// A weight of f32 rounded to integers times scales, then to ELEMENT, as in cpu/grid.rs.
//
// Defined outside: ELEMENT.

struct Grid {
    const float* weight;
    const float* scales; // one for each element; 0 where it is pruned
    void* rounded;
    u64 elements;
    float largest; // magnitude of the integers
};

extern "C" __global__ void __launch_bounds__(256) round_to_grid(const __grid_constant__ Grid p) {
    const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= p.elements) return;
    const float scale = p.scales[i];
    float value = 0.0f;
    if (scale != 0.0f) {
        const float integer = rintf(__fdiv_rn(p.weight[i], scale));
        // A NaN stays one.
        value = (integer > p.largest ? p.largest : integer < -p.largest ? -p.largest : integer) * scale;
    }
    ((Raw*)p.rounded)[i] = narrow<ELEMENT>(value);
}
