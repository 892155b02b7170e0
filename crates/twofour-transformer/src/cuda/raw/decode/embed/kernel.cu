// The first residual stream of new tokens: rows of a table by ids, and the learned vectors of their positions where
// there are any, in f32. A CTA has a token. An id beyond the table has a row of zeros.
//
// Defined outside: ELEMENT.

struct Embed {
    const u32* ids;          // [batch * count]
    const u32* positions;    // [batch]: tokens before the new ones
    const void* table;       // [vocabulary, width]
    const void* learned;     // [context, width], or null
    float* x;                // [batch * count, width]
    u32 count, width, vocabulary, context;
};

extern "C" __global__ void __launch_bounds__(1024) embed(const __grid_constant__ Embed p) {
    const u32 token = blockIdx.x, id = p.ids[token], position = p.positions[token / p.count] + token % p.count;
    const Raw* const row = (const Raw*)p.table + (u64)id * p.width;
    const Raw* const learned = (const Raw*)p.learned + (u64)position * p.width;
    #pragma unroll 4
    for (u32 at = threadIdx.x; at < p.width; at += blockDim.x) {
        float x = id < p.vocabulary ? widen<ELEMENT>(row[at]) : 0.0f;
        if (p.learned && position < p.context) x += widen<ELEMENT>(learned[at]);
        p.x[(u64)token * p.width + at] = x;
    }
}
