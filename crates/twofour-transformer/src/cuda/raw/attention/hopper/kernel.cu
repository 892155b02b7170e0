// Attention and its gradients without scores in memory (Dao, "FlashAttention-2", 2023) on sm_90a. TMA copies tiles
// straight from the fused projection, and a softmax runs while `wgmma` multiplies (Shah et al., "FlashAttention-3",
// 2024). docs/explanation/kernels/cuda-attention.md explains the design.

#define KERNEL(name, groups) \
    extern "C" __global__ void __launch_bounds__(128 * groups, 1) name(const __grid_constant__ Attention p)

KERNEL(forward, FORWARD_GROUPS) { attend(p); }
KERNEL(backward_queries, QUERIES_GROUPS) { backward<false, QUERIES_GROUPS>(p); }
KERNEL(backward_keys, KEYS_GROUPS) { backward<true, KEYS_GROUPS>(p); }
