// Philox 4x32-10, the same bits as tinyforge/rng.py: a function of a counter and a key, with no state that moves on.
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

__device__ __forceinline__ uint4 philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const u64 p0 = u64(c0) * 0xD2511F53u, p1 = u64(c2) * 0xCD9E8D57u;
        c0 = u32(p1 >> 32) ^ c1 ^ k0;
        c2 = u32(p0 >> 32) ^ c3 ^ k1;
        c1 = u32(p1);
        c3 = u32(p0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}
