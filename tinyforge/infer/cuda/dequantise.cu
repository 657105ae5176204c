// dequantise: the numbers that weights of one byte stand for.
//
//   to[o, i] = scales[o] codes[o, i], rounded once
//
// Grid: a thread for every VEC numbers of a row.

#include "ops/common.cuh"
#include "infer/cuda/codes.cuh"

typedef SCALAR T;
typedef Wide<T> A;

extern "C" __global__ void dequantise(T *to, const CODE *codes, const float *scales, i64 packs, int packs_a_row) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= packs) return;
    const A scale = scales[i / packs_a_row];
    const Pack<CODE, VEC> from = load<VEC>(codes + i * VEC);
    Pack<T, VEC> numbers;
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(A(widen(from.v[j])) * scale, numbers.v[j]);
    store(to + i * VEC, numbers);
}
