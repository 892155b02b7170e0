// What solvers do between GEMMs, on f32 matrices in rows, as in crate twofour's solve/backend/cpu.rs, and the inverse
// Cholesky factor of a small block.

typedef unsigned char byte;

struct Solve {
    const float* a;
    const float* b;
    const float* c;
    const byte* kept;
    const byte* other; // a second mask
    float* x;
    float* y;
    float* z;
    byte* mask;
    double* sums; // of rows
    u32* count;
    u64 elements;
    u32 rows, cols;
    u32 stride, to_stride; // elements from row to row
    u32 n, m;              // a pattern
    u32 first;             // the first row of a block in its matrix
    float factor, shift;
};

// Calls f with each index below a count.
template <class F> __device__ __forceinline__ void over(u64 count, F f) {
    const u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) f(i);
}

// Copies a block, times a factor.
extern "C" __global__ void __launch_bounds__(256) copy_block(const __grid_constant__ Solve p) {
    over((u64)p.rows * p.cols, [&](u64 i) {
        const u64 row = i / p.cols, col = i - row * p.cols;
        p.x[row * p.to_stride + col] = p.factor * p.a[row * p.stride + col];
    });
}

// x -= a
extern "C" __global__ void __launch_bounds__(256) subtract(const __grid_constant__ Solve p) {
    over(p.elements, [&](u64 i) { p.x[i] -= p.a[i]; });
}

// Adds a number to the diagonal of a matrix of `rows` rows.
extern "C" __global__ void __launch_bounds__(256) shift_diagonal(const __grid_constant__ Solve p) {
    over(p.rows, [&](u64 i) { p.x[i * p.rows + i] += p.shift; });
}

// x = L^-1 for a = L L^T of at most 64 rows, of which the lower half is read; zeros above the diagonal. The first row
// whose pivot is not positive goes to `count`.
extern "C" __global__ void __launch_bounds__(256) invert_factor(const __grid_constant__ Solve p) {
    __shared__ double l[64][64];
    __shared__ double row[64];
    const u32 n = p.rows, thread = threadIdx.x;
    for (u32 i = thread; i < n * n; i += 256) l[i / n][i % n] = i % n <= i / n ? (double)p.a[i] : 0.0;
    __syncthreads();
    for (u32 j = 0; j < n; j++) {
        if (thread == 0) {
            const double pivot = l[j][j];
            const bool fits = pivot > 0.0 && pivot < 1e300;
            if (!fits) atomicMin(p.count, p.first + j);
            l[j][j] = fits ? sqrt(pivot) : 1.0;
        }
        __syncthreads();
        for (u32 i = j + 1 + thread; i < n; i += 256) l[i][j] /= l[j][j];
        __syncthreads();
        const u32 rest = n - j - 1;
        for (u32 at = thread; at < rest * rest; at += 256) {
            const u32 i = j + 1 + at / rest, k = j + 1 + at % rest;
            if (k <= i) l[i][k] -= l[i][j] * l[k][j];
        }
        __syncthreads();
    }
    // Row by row: minus the row of L times the rows above, which are inverted.
    for (u32 i = 0; i < n; i++) {
        if (thread < i) row[thread] = l[i][thread];
        const double pivot = l[i][i];
        __syncthreads();
        if (thread < i) {
            double sum = 0.0;
            for (u32 k = thread; k < i; k++) sum += row[k] * l[k][thread];
            l[i][thread] = -sum / pivot;
        }
        if (thread == i) l[i][i] = 1.0 / pivot;
        __syncthreads();
    }
    for (u32 i = thread; i < n * n; i += 256) p.x[i] = (float)l[i / n][i % n];
}

// The n elements of each group of m of a row whose squares are largest, ties to the lower index: of `a`, or of `a` plus
// a factor times `b`.
extern "C" __global__ void __launch_bounds__(256) largest(const __grid_constant__ Solve p) {
    over((u64)p.rows * p.cols, [&](u64 i) {
        const auto score = [&](u64 at) {
            float value = p.a[at];
            if (p.b) value += p.factor * p.b[at];
            return value * value;
        };
        const u64 begin = i / p.cols * p.cols;
        const u32 col = (u32)(i - begin), first = col / p.m * p.m, end = min(first + p.m, p.cols);
        const float own = score(i);
        u32 before = 0;
        for (u32 other = first; other < end; other++) {
            const float value = score(begin + other);
            before += value > own || (value == own && other < col) ? 1 : 0;
        }
        p.mask[i] = before < p.n ? 1 : 0;
    });
}

// Counts the elements in which two masks differ.
extern "C" __global__ void __launch_bounds__(256) differences(const __grid_constant__ Solve p) {
    u32 differ = 0;
    over(p.elements, [&](u64 i) { differ += p.kept[i] != p.other[i] ? 1 : 0; });
    differ = __reduce_add_sync(0xFFFFFFFFu, differ);
    if (threadIdx.x % 32 == 0 && differ > 0) atomicAdd(p.count, differ);
}

// x = 0 where nothing is kept.
extern "C" __global__ void __launch_bounds__(256) apply(const __grid_constant__ Solve p) {
    over(p.elements, [&](u64 i) {
        if (!p.kept[i]) p.x[i] = 0.0f;
    });
}

// x = a - b + factor x - shift c
extern "C" __global__ void __launch_bounds__(256) alps_right(const __grid_constant__ Solve p) {
    over(p.elements, [&](u64 i) { p.x[i] = p.a[i] - p.b[i] + p.factor * p.x[i] - p.shift * p.c[i]; });
}

// x = a + y / factor where it is kept, and y += factor (a - x)
extern "C" __global__ void __launch_bounds__(256) alps_project(const __grid_constant__ Solve p) {
    over(p.elements, [&](u64 i) {
        const float fit = p.a[i], multiplier = p.y[i];
        const float sparse = p.kept[i] ? fit + multiplier / p.factor : 0.0f;
        p.x[i] = sparse;
        p.y[i] = multiplier + p.factor * (fit - sparse);
    });
}

// Returns the sum over the CTA's 256 threads, in a fixed order, to each of them.
__device__ __forceinline__ double sum_of_block(double value, double* shared) {
    __syncthreads();
    shared[threadIdx.x] = value;
    __syncthreads();
    for (u32 distance = 128; distance > 0; distance /= 2) {
        if (threadIdx.x < distance) shared[threadIdx.x] += shared[threadIdx.x + distance];
        __syncthreads();
    }
    return shared[0];
}

// sums = a . b of each row
extern "C" __global__ void __launch_bounds__(256) row_products(const __grid_constant__ Solve p) {
    __shared__ double shared[256];
    const u64 begin = (u64)blockIdx.x * p.cols;
    double sum = 0.0;
    for (u32 col = threadIdx.x; col < p.cols; col += 256) sum += (double)p.a[begin + col] * (double)p.b[begin + col];
    sum = sum_of_block(sum, shared);
    if (threadIdx.x == 0) p.sums[blockIdx.x] = sum;
}

// A row's first direction of a refit: z = x a within the mask for the residual x and the preconditioner a; and x . z.
extern "C" __global__ void __launch_bounds__(256) refit_begin(const __grid_constant__ Solve p) {
    __shared__ double shared[256];
    const u64 begin = (u64)blockIdx.x * p.cols;
    double norm = 0.0;
    for (u32 col = threadIdx.x; col < p.cols; col += 256) {
        const u64 i = begin + col;
        const float r = p.kept[i] ? p.x[i] : 0.0f, d = r * p.a[col];
        p.x[i] = r;
        p.z[i] = d;
        norm += (double)r * (double)d;
    }
    norm = sum_of_block(norm, shared);
    if (threadIdx.x == 0) p.sums[blockIdx.x] = norm;
}

// A row's step of a refit: of the weight y along the direction z, whose product with the Hessian is b, with the
// residual x and the preconditioner a; and the next direction.
extern "C" __global__ void __launch_bounds__(256) refit_step(const __grid_constant__ Solve p) {
    __shared__ double shared[256];
    const u64 begin = (u64)blockIdx.x * p.cols;
    double curvature = 0.0;
    for (u32 col = threadIdx.x; col < p.cols; col += 256) {
        const u64 i = begin + col;
        if (p.kept[i]) curvature += (double)p.z[i] * (double)p.b[i];
    }
    curvature = sum_of_block(curvature, shared);
    const double before = p.sums[blockIdx.x];
    if (curvature <= 0.0 || before <= 0.0) {
        for (u32 col = threadIdx.x; col < p.cols; col += 256) p.z[begin + col] = 0.0f;
        return;
    }
    const float length = (float)(before / curvature);
    double norm = 0.0;
    for (u32 col = threadIdx.x; col < p.cols; col += 256) {
        const u64 i = begin + col;
        p.y[i] += length * p.z[i];
        const float r = p.x[i] - length * (p.kept[i] ? p.b[i] : 0.0f);
        p.x[i] = r;
        norm += (double)r * (double)(r * p.a[col]);
    }
    norm = sum_of_block(norm, shared);
    const float share = (float)(norm / before);
    for (u32 col = threadIdx.x; col < p.cols; col += 256) {
        const u64 i = begin + col;
        p.z[i] = p.x[i] * p.a[col] + share * p.z[i];
    }
    if (threadIdx.x == 0) p.sums[blockIdx.x] = norm;
}
