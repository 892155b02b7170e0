// Loads of a weight that is read once. Predicated instead of behind a branch, where the compiler would wait for a load
// at once.

__device__ __forceinline__ void load(u32 (&to)[4], const void* from, bool there) {
    asm volatile(
        "{.reg .pred there; setp.ne.u32 there, %5, 0; @there ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, "
        "%3}, [%4];}"
        : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
        : "l"(from), "r"((u32)there));
}
// Neighbouring warps load from the same sector.
__device__ __forceinline__ void load(u32& to, const void* from, bool there) {
    asm volatile("{.reg .pred there; setp.ne.u32 there, %2, 0; @there ld.global.nc.u32 %0, [%1];}"
        : "=r"(to)
        : "l"(from), "r"((u32)there));
}

// 16 bytes of x, which other CTAs of the SM load as well.
__device__ __forceinline__ uint4 load_x(const u8* from) {
    uint4 four;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
        : "l"(from));
    return four;
}
