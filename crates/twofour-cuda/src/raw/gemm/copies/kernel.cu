// Copies of matrices into the layout that GEMM kernels require, or back: rows of another length, padded with zeros, or
// the transpose.
//
// Sizes are in units to which every row's start is aligned; for a transpose they are in elements.

struct Copy {
    const void* from;
    void* to;
    // Units from one row to the next, and the length of a row of `from` in units.
    u64 from_pitch, to_pitch;
    u32 from_length;
    // Rows of `to`, and units of each that are written: those past `from_length` are zeros.
    u32 rows, length;
};

constexpr u32 THREADS = 256, UNITS = 8;

// A CTA copies UNITS times THREADS units of a row.
template <class Unit> __device__ __forceinline__ void copy_rows(const Copy& p) {
    const u64 row = blockIdx.x;
    const Unit* from = (const Unit*)p.from + row * p.from_pitch;
    Unit* to = (Unit*)p.to + row * p.to_pitch;
    for (u64 first = (u64)blockIdx.y * THREADS * UNITS; first < p.length; first += (u64)gridDim.y * THREADS * UNITS) {
        Unit units[UNITS] = {};
        #pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u64 at = first + i * THREADS + threadIdx.x;
            if (at < p.from_length) units[i] = from[at];
        }
        #pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u64 at = first + i * THREADS + threadIdx.x;
            if (at < p.length) to[at] = units[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_rows_1(const __grid_constant__ Copy p) { copy_rows<u8>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) copy_rows_2(const __grid_constant__ Copy p) { copy_rows<u16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) copy_rows_4(const __grid_constant__ Copy p) { copy_rows<u32>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) copy_rows_16(const __grid_constant__ Copy p) {
    copy_rows<uint4>(p);
}

// Row `r` of `to` is column `r` of `from`, which has `from_length` rows. A CTA transposes SIDE columns of `from`, and
// loops over tiles of SIDE of its rows.
constexpr u32 SIDE = 32;

template <class Element> __device__ __forceinline__ void transpose(const Copy& p) {
    __shared__ Element tile[SIDE][SIDE + 1];
    const u32 x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
    const u64 col = (u64)blockIdx.x * SIDE;
    for (u64 row = (u64)blockIdx.y * SIDE; row < p.length; row += (u64)gridDim.y * SIDE) {
        #pragma unroll
        for (u32 i = y; i < SIDE; i += THREADS / SIDE) {
            const bool there = row + i < p.from_length && col + x < p.rows;
            tile[i][x] = there ? ((const Element*)p.from)[(row + i) * p.from_pitch + col + x] : Element(0);
        }
        __syncthreads();
        #pragma unroll
        for (u32 i = y; i < SIDE; i += THREADS / SIDE) {
            if (col + i < p.rows && row + x < p.length) ((Element*)p.to)[(col + i) * p.to_pitch + row + x] = tile[x][i];
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) transpose_1(const __grid_constant__ Copy p) { transpose<u8>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) transpose_2(const __grid_constant__ Copy p) { transpose<u16>(p); }
