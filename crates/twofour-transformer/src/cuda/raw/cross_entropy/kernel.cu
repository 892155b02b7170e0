// Cross-entropy of logits and target classes, and its gradient in place of the logits. A CTA computes a row: the
// largest logit and the sum of exponentials in one pass (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018), the gradient in another. A second kernel adds the rows' losses in a fixed order.
//
// Defined outside: ELEMENT.

constexpr u32 IGNORED = 0xFFFFFFFF;

struct CrossEntropy {
    void* logits;               // [rows, classes]
    const u32* targets;         // [rows]
    const float* device_factor; // or null
    float* losses;              // [rows]
    float* loss;                // the sum
    u32* status;                // the largest row with a target that is no class, plus 1
    u32 rows, classes;
    float factor;
    u32 writes_gradient, adds_loss;
};

extern "C" __global__ void __launch_bounds__(1024, 1) rows(const __grid_constant__ CrossEntropy p) {
    __shared__ float shared[32];
    Raw* const logits = (Raw*)p.logits + (u64)blockIdx.x * p.classes;
    u32 target = p.targets[blockIdx.x];
    if (target != IGNORED && target >= p.classes) {
        if (threadIdx.x == 0) atomicMax(p.status, blockIdx.x + 1);
        target = IGNORED;
    }
    if (target == IGNORED) {
        if (threadIdx.x == 0) p.losses[blockIdx.x] = 0.0f;
        if (!p.writes_gradient) return;
        across((u64)logits, true, p.classes, [&](u32 at, auto n) {
            constexpr int N = decltype(n)::value;
            const float zeros[N] = {};
            store<N>(logits + at, zeros);
        });
        return;
    }
    const float right = widen<ELEMENT>(logits[target]);
    float most = -INFINITE, sum = 0.0f;
    across((u64)logits, true, p.classes, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float x[N];
        load<N>(logits + at, x);
        float larger = most;
        unrolled<N>([&](auto i) { larger = fmaxf(larger, x[i.value]); });
        if (larger > most) {
            sum *= __expf(most - larger);
            most = larger;
        }
        // Where all logits are -inf, the difference is NaN and so is the loss.
        unrolled<N>([&](auto i) { sum += __expf(x[i.value] - most); });
    });
    const float largest = largest_of_block(most, shared);
    // A thread that saw no logit, or only -inf, adds nothing unless no thread saw more.
    sum = sum_of_block(most == -INFINITE && largest != -INFINITE ? 0.0f : sum * __expf(most - largest), shared);
    if (threadIdx.x == 0) p.losses[blockIdx.x] = logf(sum) - (right - largest);
    if (!p.writes_gradient) return;
    const float factor = p.factor * (p.device_factor ? *p.device_factor : 1.0f), inverse = factor / sum;
    across((u64)logits, true, p.classes, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float x[N];
        load<N>(logits + at, x);
        unrolled<N>([&](auto i) { x[i.value] = __expf(x[i.value] - largest) * inverse - (at + i.value == target ? factor : 0.0f); });
        store<N>(logits + at, x);
    });
}

// One CTA adds the rows' losses in f64: each thread every 1024th, then the threads as a tree.
extern "C" __global__ void __launch_bounds__(1024, 1) sum_losses(const __grid_constant__ CrossEntropy p) {
    __shared__ double shared[1024];
    double sum = 0.0;
    for (u32 row = threadIdx.x; row < p.rows; row += 1024) sum += (double)p.losses[row];
    shared[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = 512; half > 0; half /= 2) {
        if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) *p.loss = (p.adds_loss ? *p.loss : 0.0f) + (float)shared[0];
}
