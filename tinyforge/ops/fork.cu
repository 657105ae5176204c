// fork: dx = dy + dz, the gradient of a stream that two readers take.
//
// Kernels:  fork_bwd
//
// Grid: a thread for each vector of VEC elements. Block: 256 threads. No shared memory. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;

extern "C" __global__ void __launch_bounds__(256) fork_bwd(T *dx, const T *dy, const T *dz, u32 total) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    Pack<T, VEC> p = load<VEC>(dy + i64(i) * VEC);
    const Pack<T, VEC> q = load<VEC>(dz + i64(i) * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(widen(p.v[j]) + widen(q.v[j]), p.v[j]);
    store(dx + i64(i) * VEC, p);
}
