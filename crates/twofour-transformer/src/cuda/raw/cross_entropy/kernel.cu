// Cross-entropy of logits and target classes, and its gradient in place of the logits. A CTA computes a row: the
// largest logit and the sum of exponentials in one pass (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018), the gradient in another. The loss of a student has the divergence from its teacher's probabilities
// beside it. A second kernel adds the rows' losses in a fixed order.
//
// Defined outside: ELEMENT.

constexpr u32 IGNORED = 0xFFFFFFFF;

struct CrossEntropy {
    void* logits;               // [rows, classes]
    const void* teacher;        // [rows, classes], of a student
    const u32* targets;         // [rows]
    const float* device_factor; // or null
    float* losses;              // [rows]
    float* loss;                // the sum
    u32* status;                // the largest row with a target that is no class, plus 1
    u32 rows, classes;
    float factor;
    float divergence, cross_entropy; // the weights of a student's loss
    u32 writes_gradient, adds_loss;
};

// The largest of the numbers that were added, and the sum of the exponentials of their distances from it. -inf adds
// nothing; where all are -inf, the sum is 0, and a loss is NaN.
struct Exponentials {
    float most = -INFINITE, sum = 0.0f;

    // Returns what sums over the exponentials so far are to be multiplied by.
    template <int N> __device__ __forceinline__ float add(const float (&x)[N]) {
        float larger = most, rescale = 1.0f;
        unrolled<N>([&](auto i) { larger = fmaxf(larger, x[i.value]); });
        if (larger > most) {
            rescale = __expf(most - larger);
            most = larger;
        }
        sum *= rescale;
        unrolled<N>([&](auto i) { sum += x[i.value] == -INFINITE ? 0.0f : __expf(x[i.value] - most); });
        return rescale;
    }

    // Replaces both by those of the CTA. Returns what this thread's sums are to be multiplied by.
    __device__ __forceinline__ float gather(float* shared) {
        const float largest = largest_of_block(most, shared);
        const float rescale = most == -INFINITE ? 0.0f : __expf(most - largest);
        sum = sum_of_block(sum * rescale, shared);
        most = largest;
        return rescale;
    }
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
    Exponentials own;
    across((u64)logits, true, p.classes, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float x[N];
        load<N>(logits + at, x);
        own.add<N>(x);
    });
    own.gather(shared);
    if (threadIdx.x == 0) p.losses[blockIdx.x] = logf(own.sum) - (right - own.most);
    if (!p.writes_gradient) return;
    const float factor = p.factor * (p.device_factor ? *p.device_factor : 1.0f), inverse = factor / own.sum;
    across((u64)logits, true, p.classes, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float x[N];
        load<N>(logits + at, x);
        unrolled<N>([&](auto i) {
            x[i.value] = __expf(x[i.value] - own.most) * inverse - (at + i.value == target ? factor : 0.0f);
        });
        store<N>(logits + at, x);
    });
}

extern "C" __global__ void __launch_bounds__(1024, 1) student(const __grid_constant__ CrossEntropy p) {
    __shared__ float shared[32];
    Raw* const logits = (Raw*)p.logits + (u64)blockIdx.x * p.classes;
    const Raw* const teacher = (const Raw*)p.teacher + (u64)blockIdx.x * p.classes;
    u32 target = p.targets[blockIdx.x];
    if (target != IGNORED && target >= p.classes) {
        if (threadIdx.x == 0) atomicMax(p.status, blockIdx.x + 1);
        target = IGNORED;
    }
    if (target == IGNORED) {
        if (threadIdx.x == 0) p.losses[blockIdx.x] = 0.0f;
        across((u64)logits, true, p.classes, [&](u32 at, auto n) {
            constexpr int N = decltype(n)::value;
            const float zeros[N] = {};
            store<N>(logits + at, zeros);
        });
        return;
    }
    const bool vectors = alike(logits, teacher);
    const float right = widen<ELEMENT>(logits[target]);
    Exponentials own, taught;
    // Of exponentials of the teacher's logits times their distance from the student's.
    float distance = 0.0f;
    across((u64)logits, vectors, p.classes, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float x[N], t[N];
        load<N>(logits + at, x);
        load<N>(teacher + at, t);
        own.add<N>(x);
        distance *= taught.add<N>(t);
        unrolled<N>([&](auto i) {
            const float factor = __expf(t[i.value] - taught.most);
            distance += factor > 0.0f ? factor * (t[i.value] - x[i.value]) : 0.0f;
        });
    });
    own.gather(shared);
    const float rescale = taught.gather(shared);
    distance = sum_of_block(distance * rescale, shared);
    if (threadIdx.x == 0) {
        const float apart = distance / taught.sum - (taught.most + logf(taught.sum)) + (own.most + logf(own.sum));
        const float missed = logf(own.sum) - (right - own.most);
        // A part without a weight may be infinite.
        p.losses[blockIdx.x] = (p.divergence == 0.0f ? 0.0f : p.divergence * apart) +
                               (p.cross_entropy == 0.0f ? 0.0f : p.cross_entropy * missed);
    }
    const float factor = p.factor * (p.device_factor ? *p.device_factor : 1.0f);
    const float of_own = (p.divergence + p.cross_entropy) * factor / own.sum,
                of_taught = p.divergence * factor / taught.sum;
    const float of_target = p.cross_entropy * factor;
    across((u64)logits, vectors, p.classes, [&](u32 at, auto n) {
        constexpr int N = decltype(n)::value;
        float x[N], t[N];
        load<N>(logits + at, x);
        load<N>(teacher + at, t);
        unrolled<N>([&](auto i) {
            x[i.value] = __expf(x[i.value] - own.most) * of_own - __expf(t[i.value] - taught.most) * of_taught
                - (at + i.value == target ? of_target : 0.0f);
        });
        store<N>(logits + at, x);
    });
}

extern "C" __global__ void __launch_bounds__(1024, 1) sum_losses(const __grid_constant__ CrossEntropy p) {
    add_rows(p.losses, p.rows, p.adds_loss != 0, p.loss);
}
