// softmax: y = exp(x - max x) / sum exp(x - max x) over a row; dx = y (dy - sum dy y).
//
// Kernels:  softmax_fwd, softmax_bwd
//
// Idea. A warp takes a row and keeps it in registers (as rmsnorm.cu): the maximum, the sum and the quotient need three
// passes, of which only the first and last touch memory.
// Grid: a warp for each row. Block: 32 x 8 threads. No shared memory. Bound by memory: two rows of traffic forward,
// three backward. PER = 0 is for any width: it reads the row again, mostly from cache.
//
// compile: SCALAR=double|float|bf16 VEC=1 PER=0
// compile: SCALAR=double VEC=2 PER=0
// compile: SCALAR=float VEC=4 PER=0|1|3|6|8
// compile: SCALAR=bf16 VEC=8 PER=0|1|3|4
// spills: none

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

extern "C" __global__ void softmax_fwd(const T *x, T *y, int rows, int width) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    A top = -INFINITY, sum = 0;
#if PER
    A kept[PER][VEC];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + lane;
        if (v < vectors) {
            const Pack<T, VEC> p = load<VEC>(x + at + v * VEC);
#pragma unroll
            for (int j = 0; j < VEC; j++) top = largest(top, kept[i][j] = widen(p.v[j]));
        }
    }
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (i * 32 + lane < vectors) {
#pragma unroll
            for (int j = 0; j < VEC; j++) sum += kept[i][j] = exp_for<T>(kept[i][j] - top);
        }
    }
#else
    for (int v = lane; v < vectors; v += 32) {
        const Pack<T, VEC> p = load<VEC>(x + at + v * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) top = largest(top, widen(p.v[j]));
    }
    top = warp_max(top);
    for (int v = lane; v < vectors; v += 32) {
        const Pack<T, VEC> p = load<VEC>(x + at + v * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) sum += exp_for<T>(widen(p.v[j]) - top);
    }
#endif
    const A scale = A(1) / warp_sum(sum);
#if PER
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + lane;
        if (v < vectors) {
            Pack<T, VEC> out;
#pragma unroll
            for (int j = 0; j < VEC; j++) narrow(kept[i][j] * scale, out.v[j]);
            store(y + at + v * VEC, out);
        }
    }
#else
    for (int v = lane; v < vectors; v += 32) {
        Pack<T, VEC> p = load<VEC>(x + at + v * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) narrow(exp_for<T>(widen(p.v[j]) - top) * scale, p.v[j]);
        store(y + at + v * VEC, p);
    }
#endif
}

extern "C" __global__ void softmax_bwd(const T *dy, const T *y, T *dx, int rows, int width) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    A along = 0;
#if PER
    Pack<T, VEC> up[PER], p[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + lane;
        if (v < vectors) {
            up[i] = load<VEC>(dy + at + v * VEC);
            p[i] = load<VEC>(y + at + v * VEC);
        }
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (i * 32 + lane < vectors) {
#pragma unroll
            for (int j = 0; j < VEC; j++) along += widen(up[i].v[j]) * widen(p[i].v[j]);
        }
    }
#else
    for (int v = lane; v < vectors; v += 32) {
        const Pack<T, VEC> up = load<VEC>(dy + at + v * VEC), p = load<VEC>(y + at + v * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) along += widen(up.v[j]) * widen(p.v[j]);
    }
#endif
    along = warp_sum(along);
#if PER
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + lane;
        if (v < vectors) {
            const Pack<T, VEC> d = up[i], q = p[i];
#else
    for (int v = lane; v < vectors; v += 32) {
        {
            const Pack<T, VEC> d = load<VEC>(dy + at + v * VEC), q = load<VEC>(y + at + v * VEC);
#endif
            Pack<T, VEC> out;
#pragma unroll
            for (int j = 0; j < VEC; j++) narrow(widen(q.v[j]) * (widen(d.v[j]) - along), out.v[j]);
            store(dx + at + v * VEC, out);
        }
    }
}
