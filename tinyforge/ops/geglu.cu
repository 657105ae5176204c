// geglu: y = gelu(g) u, by the formulas of gelu.cuh (EXACT = 1 or 0).
//
// Kernels:  geglu_fwd     y from gate and up, the two halves of a row
//           geglu_bwd     dgate = dy u (Phi(g) + g Phi'(g)) and dup = dy gelu(g)
//
// Idea. As swiglu.cu: a thread takes a vector of the gate, and the one at the same place in the other half.
// Grid: a thread for each vector of y. Block: 256 threads. No shared memory. Bound by memory, with erf in float close to
// arithmetic.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

#include "ops/gelu.cuh"

extern "C" __global__ void __launch_bounds__(256) geglu_fwd(T *y, const T *gu, u32 total, u32 half) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 row = i / half;  // total and half count vectors
    const T *at = gu + (i64(i) + i64(row) * half) * VEC;
    Pack<T, VEC> gate = load<VEC>(at);
    const Pack<T, VEC> up = load<VEC>(at + i64(half) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const A g = widen(gate.v[j]);
        narrow(g * phi(g) * widen(up.v[j]), gate.v[j]);
    }
    store(y + i64(i) * VEC, gate);
}

extern "C" __global__ void __launch_bounds__(256) geglu_bwd(T *dgu, const T *dy, const T *gu, u32 total, u32 half) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 row = i / half;
    const i64 at = (i64(i) + i64(row) * half) * VEC, beside = at + i64(half) * VEC;
    const Pack<T, VEC> gate = load<VEC>(gu + at), up = load<VEC>(gu + beside), d = load<VEC>(dy + i64(i) * VEC);
    Pack<T, VEC> dgate, dup;
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const A g = widen(gate.v[j]), upstream = widen(d.v[j]), share = phi(g);
        narrow(upstream * widen(up.v[j]) * (share + g * slope_of_phi(g, share)), dgate.v[j]);
        narrow(upstream * g * share, dup.v[j]);
    }
    store_streaming(dgu + at, dgate);
    store_streaming(dgu + beside, dup);
}
