// positions: y[b, t] = x[b, t] + P[t].
//
// Kernels:  positions_fwd     y
//           positions_bwd     dP[t] += sum over b of dy[b, t], in a fixed order
//
// Idea. Elementwise; a sequence is one long row of T C numbers, and P's first T rows are another. Backward: warp y of a
// block takes batch rows y, y + 8, ..., and the eight sums are added in order. With a thread for each vector of dP, and
// all batch rows in turn, there would be too few threads to keep the memory busy.
// With the macro RESTART=1 forward adds P[p[b, t]] for given positions p: documents packed into one row. Its backward
// is that of embedding.cu.
// Grid: a thread for each vector of y; backward a block for 32 vectors of dP. Block: 256 threads; backward 32 x 8.
// Shared memory: backward, the eight sums. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

#ifdef RESTART
#define RESTART_ARGUMENTS , const int *positions, u32 width
#else
#define RESTART_ARGUMENTS
#endif

// sequence: vectors in T rows of the table; width: in one.
extern "C" __global__ void __launch_bounds__(256) positions_fwd(
    T *y, const T *x, const T *table, u32 total, u32 sequence RESTART_ARGUMENTS
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    Pack<T, VEC> p = load<VEC>(x + i64(i) * VEC);
#ifdef RESTART
    const i64 from = i64(positions[i / width]) * width + i % width;
#else
    const i64 from = i % sequence;
#endif
    const Pack<T, VEC> add = load<VEC>(table + from * VEC);
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(widen(p.v[j]) + widen(add.v[j]), p.v[j]);
    store(y + i64(i) * VEC, p);
}

extern "C" __global__ void __launch_bounds__(256) positions_bwd(A *dtable, const T *dy, u32 sequence, int batch) {
    __shared__ Pack<A, VEC> sums[8][32];
    const u32 i = blockIdx.x * 32 + threadIdx.x, thread = threadIdx.y * 32 + threadIdx.x;
    const u32 number = blockIdx.x * 32 * VEC + thread;  // of dP, to which this thread will add
    const bool mine = thread < 32 * VEC && number < sequence * VEC;
    A total = mine ? dtable[number] : A(0);
    Pack<A, VEC> sum = {};
    if (i < sequence) {
#pragma unroll 4
        for (int b = threadIdx.y; b < batch; b += 8) {
            const Pack<T, VEC> d = load<VEC>(dy + (i64(b) * sequence + i) * VEC);
#pragma unroll
            for (int j = 0; j < VEC; j++) sum.v[j] += widen(d.v[j]);
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (mine) {
#pragma unroll
        for (int y = 0; y < 8; y++) total += sums[y][thread / VEC].v[thread % VEC];
        dtable[number] = total;
    }
}
