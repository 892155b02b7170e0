// Tiles that TMA copies to circular buffers of stages, and which CTA has which tile.
//
// Defined outside: FORWARD_GROUPS, KEYS_GROUPS and QUERIES_GROUPS, the warpgroups of a CTA of each kernel.

#define INFINITE __int_as_float(0x7F800000)
constexpr float LOG2_E = 1.4426950408889634f;
constexpr u32 GROUP_ROWS = 64;                    // rows of a warpgroup
constexpr u32 GROUP_BYTES = GROUP_ROWS * DIM * 2; // of a warpgroup's tile of rows
constexpr u32 BOX_ROWS = 64;                      // positions that one copy transfers
constexpr u32 ROW_BYTES = DIM < 64 ? 64 : 128;    // of a box

// Elements between two heads, two sequences and two positions of a tensor.
struct Layout {
    u64 head, sequence;
    u32 row;
};

struct Attention {
    TensorMap q, k, v, dout; // [batch, heads, positions, DIM]
    const Raw* out;
    const float* lse;        // [batch, heads, positions]
    Raw *to_out, *dq, *dk, *dv;
    float* to_lse;
    // [batch, heads, padded]: lse / ln 2 and the sums of out dout, or infinity and zero beyond the last position.
    // `backward_queries` writes what `backward_keys` reads.
    float *padded_lse, *padded_delta;
    Layout queries, keys, results; // of q and dq; of k, v, dk and dv; of out and dout
    u32 batch, positions, heads, kv_heads;
    u32 padded;                    // positions, to the next multiple of 64
    u32 together;                  // heads whose CTAs follow each other, so that their keys and values stay in the L2
    u32 causal;
    float scale;
};

__device__ __forceinline__ u64 head_at(const Layout& layout, u32 sequence, u32 head) {
    return sequence * layout.sequence + head * layout.head;
}

// A CTA's head and tile of rows. Heads of all sequences are counted.
struct Turn {
    u32 sequence, head, tile, tiles;
};

// CTAs go through the tiles of `together` heads, the same tile of each after each other, and then through the next
// heads.
__device__ __forceinline__ Turn turn_of_cta(const Attention& p, u32 heads) {
    const u32 all = p.batch * heads, tiles = gridDim.x / all, together = min(p.together, all);
    const u32 set = blockIdx.x / (together * tiles), rest = blockIdx.x - set * (together * tiles);
    const u32 of_set = min(together, all - set * together), head = set * together + rest % of_set;
    return {head / heads, head % heads, rest / of_set, tiles};
}

// Copies a box of a head: 64 elements, or 32, of BOX_ROWS positions. Positions beyond the last are zeros.
__device__ __forceinline__ void copy_box(
    u32 to, const TensorMap* map, u32 x, u32 position, u32 head, u32 sequence, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(to),
        "l"(map), "r"(x), "r"(position), "r"(head), "r"(sequence), "r"(barrier)
        : "memory");
}

// Copies COUNT positions of a head to a tile as `place` has it.
template <u32 COUNT> __device__ __forceinline__ void copy_positions(
    u32 to, const TensorMap* map, u32 first, u32 head, u32 sequence, u32 barrier) {
#pragma unroll
    for (u32 x = 0; x < DIM; x += 64) {
        #pragma unroll
        for (u32 row = 0; row < COUNT; row += BOX_ROWS)
            copy_box(to + (x / 64 * COUNT + row) * ROW_BYTES, map, x, first + row, head, sequence, barrier);
    }
}

// Barriers of a circular buffer: `full` counts copied bytes, `empty` the arrivals of those that have read a stage,
// ARRIVALS of each warp: 1, or 32 where copies without a tensor map fill a part of the stage. Compute-sanitizer's
// racecheck tracks those copies, but no arrival for other lanes. Tile t is in stage t % COUNT.
template <u32 COUNT, u32 ARRIVALS = 1> struct Stages {
    u64 full[COUNT], empty[COUNT];

    __device__ __forceinline__ void init(u32 warps) {
        for (u32 i = 0; i < COUNT; i++)
            barrier_init(shared_address(&full[i]), 1), barrier_init(shared_address(&empty[i]), ARRIVALS * warps);
    }
    // Waits until the stage of a tile has been read, and returns the barrier for its copies, which transfer `bytes`.
    __device__ __forceinline__ u32 begin(u32 tile, u32 bytes) {
        const u32 barrier = shared_address(&full[tile % COUNT]);
        if (tile >= COUNT) barrier_wait(shared_address(&empty[tile % COUNT]), tile / COUNT - 1 & 1);
        barrier_expect(barrier, bytes);
        return barrier;
    }
    __device__ __forceinline__ void wait(u32 tile) {
        barrier_wait(shared_address(&full[tile % COUNT]), tile / COUNT & 1);
    }
    // Called by all lanes of a warp, after they have read the tile.
    __device__ __forceinline__ void release(u32 tile) {
        __syncwarp();
        if (threadIdx.x % 32 < ARRIVALS) barrier_arrive(shared_address(&empty[tile % COUNT]));
    }
};
