// attention_sink: one more key for each query, with the score sinks[h] and the value 0, after attention.
//
// Kernels:  sink_fwd    z = log(exp(lse) + exp(sinks[h]));  out *= exp(lse - z),  lse = z
//           sink_bwd    partial[b, h] = the sum over a part's (batch, t) of -exp(sinks[h] - lse) dy . out
//
// Grid: sink_fwd a warp for each (batch, t, h); sink_bwd a block for each part and head, whose warps take its rows in
// turn. Block: 32 x 8. Shared memory: a number for each warp. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, VEC> Vector;

// out: (batch, length, heads, dim); lse: (batch, heads, length).
extern "C" __global__ void __launch_bounds__(256)
    sink_fwd(T *out, A *lse, const T *sinks, int rows, int length, int heads, int dim) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= rows) return;
    const int h = row % heads, t = row / heads % length, b = row / heads / length;
    A *mine = lse + (i64(b) * heads + h) * length + t;
    const A before = *mine, sink = widen(sinks[h]), top = max(before, sink);
    const A total = top + log(exp(before - top) + exp(sink - top)), factor = exp(before - total);
    const i64 at = i64(row) * dim;
    for (int c = threadIdx.x * VEC; c < dim; c += 32 * VEC) {
        Vector p = load<VEC>(out + at + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) narrow(factor * widen(p.v[j]), p.v[j]);
        store(out + at + c, p);
    }
    __syncwarp();
    if (threadIdx.x == 0) *mine = total;
}

// partial: (parts, heads). tokens: batch x length.
extern "C" __global__ void __launch_bounds__(256) sink_bwd(
    A *partial, const T *dy, const T *out, const A *lse, const T *sinks, int tokens, int length, int heads, int dim
) {
    __shared__ A sums[8];
    const int h = blockIdx.x;
    const A sink = widen(sinks[h]);
    A sum = 0;
    for (int n = blockIdx.y * 8 + threadIdx.y; n < tokens; n += gridDim.y * 8) {
        const i64 at = (i64(n) * heads + h) * dim;
        A along = 0;
        for (int c = threadIdx.x * VEC; c < dim; c += 32 * VEC) {
            const Vector p = load<VEC>(dy + at + c), q = load<VEC>(out + at + c);
#pragma unroll
            for (int j = 0; j < VEC; j++) along += widen(p.v[j]) * widen(q.v[j]);
        }
        sum -= exp(sink - lse[(i64(n / length) * heads + h) * length + n % length]) * warp_sum(along);
    }
    if (threadIdx.x == 0) sums[threadIdx.y] = sum;
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        A total = 0;
        for (int w = 0; w < 8; w++) total += sums[w];
        partial[i64(blockIdx.y) * heads + h] = total;
    }
}
