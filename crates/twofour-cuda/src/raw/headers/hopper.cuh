// Wrappers of Hopper's instructions: mbarriers, TMA, clusters and warpgroups.

// A tensor map for TMA; the driver fills it in.
struct alignas(64) TensorMap { u64 opaque[16]; };

// ---- Barriers (mbarrier). Addresses are of shared memory.

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialized barriers visible to TMA and to the cluster.
__device__ __forceinline__ void barriers_are_ready() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and adds to the bytes that the phase expects from TMA.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier of this address in another CTA of the cluster. The arrival has default semantics:
// `.release.cluster` would become a fence of all memory.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile(
        "{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there];}" ::
            "r"(barrier),
        "r"(rank)
        : "memory");
}
#define BARRIER_WAIT(acquire)                                                                                \
    asm volatile("{.reg .pred done; again: mbarrier.try_wait.parity" acquire                                 \
                 ".shared::cta.b64 done, [%0], %1; @done bra through; bra again; through: }" ::"r"(barrier), \
        "r"(parity)                                                                                          \
        : "memory")
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) { BARRIER_WAIT(""); }
// Waits for data that other CTAs of the cluster have sent.
__device__ __forceinline__ void barrier_wait_for_cluster(u32 barrier, u32 parity) { BARRIER_WAIT(".acquire.cluster"); }
// Advances to the next of COUNT stages, whose barriers alternate their phase's parity in each round.
template <int COUNT> __device__ __forceinline__ void next_stage(u32& stage, u32& parity) {
    if (++stage == COUNT) {
        stage = 0;
        parity ^= 1;
    }
}
// Synchronizes some of the CTA's warps (`bar.sync`).
__device__ __forceinline__ void named_barrier(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- Copies. Coordinates count elements, the contiguous axis first. Elements outside the matrix are read as zeros and
// not written.

__device__ __forceinline__ void copy_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void prefetch(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, u32 x, u32 y, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
// Copies to the same address of every CTA of the cluster that has a bit in `blocks` (multicast).
__device__ __forceinline__ void copy_tile_to_many(u32 to, const TensorMap* map, u32 x, u32 y, u32 barrier, u16 blocks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
        "{%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(blocks)
        : "memory");
}
__device__ __forceinline__ void store_tile(const TensorMap* map, u32 x, u32 y, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x),
        "r"(y), "r"(from)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Adds a tile to the matrix, element by element, in the map's data type.
__device__ __forceinline__ void add_tile(const TensorMap* map, u32 x, u32 y, u32 from) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map),
        "r"(x), "r"(y), "r"(from)
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the last `LEFT` stores of this thread have read their source.
template <int LEFT> __device__ __forceinline__ void stores_have_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}
__device__ __forceinline__ void stores_are_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Makes this thread's writes to shared memory visible to TMA.
__device__ __forceinline__ void show_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- Clusters.

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Arrives without ordering memory: `cluster_arrive` is a fence of all memory.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Returns the address in another CTA of the cluster that corresponds to an address of this CTA.
__device__ __forceinline__ u32 address_at(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Sends four words to another CTA of the cluster, and counts their bytes at a barrier of that CTA.
__device__ __forceinline__ void send_four(u32 to, u32 a, u32 b, u32 c, u32 d, u32 barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "r"(a), "r"(b), "r"(c), "r"(d), "r"(barrier)
        : "memory");
}

// ---- Warpgroups.

template <int REGISTERS> __device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// `wgmma` reads its metadata registers until it completes, which the compiler does not model. Called after the wait for
// it, this keeps the registers from being reused before.
template <int COUNT> __device__ __forceinline__ void fence_operands(const u32 (&codes)[COUNT]) {
    #pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" ::"r"(codes[i]));
}
// Pins accumulators to their registers after `wgmma` completes. The compiler would otherwise move them earlier, and
// serialize the instructions (C7514).
__device__ __forceinline__ void fence_accumulator(float& sum) { asm volatile("" : "+f"(sum)); }
__device__ __forceinline__ void fence_accumulator(int& sum) { asm volatile("" : "+r"(sum)); }
// Returns the matrix descriptor of a K-major tile in shared memory: rows of 64 or 128 bytes with a swizzle of that
// width, and groups of eight rows after each other.
template <int ROW_BYTES> __device__ __forceinline__ u64 operand(u32 address) {
    const u64 swizzle = ROW_BYTES == 64 ? 2 : 1;
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(8 * ROW_BYTES >> 4) << 32 | swizzle << 62;
}
// Returns the matrix descriptor of an MN-major tile: boxes of 64 16-bit elements of all rows of the reduction, `piece`
// bytes each, after each other.
__device__ __forceinline__ u64 operand_mn_major(u32 address, u32 piece) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)(piece >> 4) << 16 | (u64)(8 * 128 >> 4) << 32 | (u64)1 << 62;
}
// The same for rows of 32 elements, which are 64 bytes, swizzled by as many: one box.
__device__ __forceinline__ u64 operand_mn_major_narrow(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(8 * 64 >> 4) << 32 | (u64)2 << 62;
}
// Returns the descriptor `bytes` bytes further on.
__device__ __forceinline__ u64 operand_after(u64 operand, u32 bytes) { return operand + (bytes >> 4); }

// ---- `stmatrix`: 8x8 matrices of 16-bit elements from registers to shared memory, as they are or transposed.

__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
        "r"(c), "r"(d)
        : "memory");
}

__device__ __forceinline__ void store_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
        "r"(b), "r"(c), "r"(d)
        : "memory");
}
__device__ __forceinline__ void store_transposed(u32 address, u32 a, u32 b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b)
        : "memory");
}

// Returns a warp-uniform value in a form that the compiler recognizes as uniform. Otherwise it emits copies and `wgmma`
// once for each lane that might have its own address.
__device__ __forceinline__ u32 uniform(u32 number) { return __reduce_max_sync(0xffffffff, number); }

// Returns true in one lane of the warp, always the same one (`elect.sync`). All lanes must call it after they have
// converged: only then does the compiler leave out waits and issue copies once a warp.
__device__ __forceinline__ bool elected() {
    u32 one;
    asm volatile("{.reg .pred one; elect.sync _|one, 0xffffffff; selp.u32 %0, 1, 0, one;}" : "=r"(one));
    return one != 0;
}

// Keeps a value in its register. Otherwise the compiler recomputes it in every step from the thread's index, and
// reading that special register is slow.
__device__ __forceinline__ u32 pinned(u32 number) {
    asm volatile("" : "+r"(number));
    return number;
}
