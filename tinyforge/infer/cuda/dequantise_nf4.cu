// dequantise_nf4: the numbers that weights of four bits stand for, see tinyforge/quantised_groups.py.
//
//   to[64 g + 2 j], to[64 g + 2 j + 1] = scales[g] nf4[upper, lower bits of codes[32 g + j]], rounded once
//
// DOUBLE: scales are bytes, and stand for map[scales[g]] tops[(start + g) / 256] + offset, rounded twice, as on the host.
//
// Grid: a thread for every 8 numbers, which are four bytes. Bound by memory: 4.5 bits are read for every number written.
// The 16 numbers lie in as many banks of shared memory, so a warp's lookups do not conflict.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
#if DOUBLE
typedef unsigned char Stored;
#else
typedef float Stored;
#endif

__device__ const float NF4[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f,
    1.0f};

extern "C" __global__ void __launch_bounds__(256)
    dequantise_nf4(T *to, const unsigned char *codes, const Stored *scales, i64 packs, const float *map,
                   const float *tops, const float *offset, i64 start) {
    __shared__ float numbers[16];
    if (threadIdx.x < 16) numbers[threadIdx.x] = NF4[threadIdx.x];
    __syncthreads();
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    const u32 word = reinterpret_cast<const u32 *>(codes)[i];
#if DOUBLE
    const A scale = __fadd_rn(__fmul_rn(map[scales[i / 8]], tops[(start + i / 8) / 256]), *offset);
#else
    const A scale = scales[i / 8];
#endif
    constexpr int N = sizeof(T) == 8 ? 2 : sizeof(T) == 4 ? 4 : 8;  // in 16 bytes
#pragma unroll
    for (int part = 0; part < 8; part += N) {
        Pack<T, N> found;
#pragma unroll
        for (int j = 0; j < N; j++) {
            const int at = part + j;  // byte at / 2, upper bits first
            narrow(A(numbers[word >> (at / 2 * 8 + (at & 1 ? 0 : 4)) & 15]) * scale, found.v[j]);
        }
        store(to + i * 8 + part, found);
    }
}
