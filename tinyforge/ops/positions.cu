// positions: y[b, t] = x[b, t] + P[t].
//
// Kernels:  positions_fwd     y
//           positions_bwd     dP[t] += sum over b of dy[b, t], one batch row after the other: a fixed order
//
// Idea. Elementwise; a sequence is one long row of T C numbers, and P's first T rows are another.
// Grid: a thread for each vector of y (backward: of dP). Block: 256 threads. No shared memory. Bound by memory.
//
// compile: SCALAR=double VEC=1|2
// compile: SCALAR=float VEC=1|4
// compile: SCALAR=bf16 VEC=1|8
// spills: none

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

extern "C" __global__ void __launch_bounds__(256) positions_fwd(
    const T *x, const T *table, T *y, u32 total, u32 sequence
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    Pack<T, VEC> p = load<VEC>(x + i64(i) * VEC);
    const Pack<T, VEC> add = load<VEC>(table + i64(i % sequence) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(widen(p.v[j]) + widen(add.v[j]), p.v[j]);
    store(y + i64(i) * VEC, p);
}

extern "C" __global__ void __launch_bounds__(256) positions_bwd(const T *dy, A *dtable, u32 sequence, int batch) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= sequence) return;
    Pack<A, VEC> sum = load<VEC>(dtable + i64(i) * VEC);
#pragma unroll 4
    for (int b = 0; b < batch; b++) {
        const Pack<T, VEC> d = load<VEC>(dy + (i64(b) * sequence + i) * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) sum.v[j] += widen(d.v[j]);
    }
    store(dtable + i64(i) * VEC, sum);
}
