// dequantise_int4: the numbers that weights of four bits stand for, see tinyforge/quantised_groups.py.
//
//   to[32 g + j], to[32 g + j + 16] = scales[g] (lower, upper bits of codes[16 g + j] - 8), rounded once
//
// Grid: a thread for every four bytes, which are eight numbers. Bound by memory: 5 bits are read for each number written.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

extern "C" __global__ void dequantise_int4(T *to, const unsigned char *codes, const float *scales, i64 words) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= words) return;
    const u32 word = reinterpret_cast<const u32 *>(codes)[i];
    const A scale = scales[i / 4];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        Pack<T, 4> found;
#pragma unroll
        for (int j = 0; j < 4; j++) narrow(A(int(word >> (8 * j + 4 * half) & 15) - 8) * scale, found.v[j]);
        store(to + i / 4 * 32 + half * 16 + i % 4 * 4, found);
    }
}
