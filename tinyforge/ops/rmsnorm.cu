// rmsnorm: y = w * x * r, r = 1 / sqrt(mean(x^2) + eps), and the same behind a residual add.
//
// Kernels:  rmsnorm_fwd, add_rmsnorm_fwd      y and r (and x = residual + delta)
//           rmsnorm_bwd, add_rmsnorm_bwd      dx (plus the gradient of the residual stream), partial sums of dw
//           rmsnorm_dweight                   partial sums of dw alone, for rows that do not fit in registers
//
// Idea. Reading a row twice from memory doubles the time of a kernel that does nothing but move bytes. One warp takes
// one row and keeps it in registers: PER vectors of VEC elements a lane, all loads under way before the first is used.
// Sums over the row are shuffles; there is no barrier and no shared memory in the loop.
//   dx = r (dy w - x r^2 mean(dy w x))     dw = sum over rows of dy x r
// Backward walks over many rows with each warp so that dw stays in registers; a block then adds its warps' sums in
// order and writes one partial row, and add_columns (columns.cu) adds those. No atomics: the same bits every time.
// Grid: forward a warp for each row; backward a fixed number of blocks. Block: 32 x 8 threads, a warp a row.
// Shared memory: backward, one row of sums. Bound by memory: forward 2 (with add 4), backward 3 (4) rows of traffic.
// PER = 0 is for any width: it reads the row a second time, mostly from cache.
// The sum x = residual + delta is rounded to its storage type before it is normalised: backward reads it rounded.
//
// Tried on an H200 (add_rmsnorm_bwd, bf16, 16,384 x 768; a copy of as many bytes moves 3,800 to 4,000 GB/s): two blocks
// a multiprocessor 29 us, 3,450 GB/s; one block 32; three and four, which do not fit at once, 31; the gain read again
// in each row, to save registers, 31, with three blocks 31, with four (64 registers) 41; blocks of four warps 31 to 34.
// Forward: 2, 4 or 8 rows a block make no difference. Not taken: a block for each row (two barriers a row, and three
// quarters of the threads idle at width 768 in bf16).
//
// compile: SCALAR=double|float|bf16 VEC=1 PER=0
// compile: SCALAR=double VEC=2 PER=0
// compile: SCALAR=float VEC=4 PER=0|1|3|6|8
// compile: SCALAR=bf16 VEC=8 PER=0|1|3|4
// spills: none

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

template <bool ADD>
__device__ __forceinline__ void forward(
    const T *x, const T *delta, const T *weight, T *sum, T *y, A *rstd, int rows, int width, A eps
) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    A square = 0;
#if PER
    Pack<T, VEC> kept[PER], add[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + lane;
        if (v < vectors) {
            kept[i] = load<VEC>(x + at + v * VEC);
            if (ADD) add[i] = load<VEC>(delta + at + v * VEC);
        }
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + lane;
        if (v < vectors) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                if (ADD) narrow(widen(kept[i].v[j]) + widen(add[i].v[j]), kept[i].v[j]);
                const A value = widen(kept[i].v[j]);
                square += value * value;
            }
            if (ADD) store(sum + at + v * VEC, kept[i]);
        }
    }
#else
    for (int v = lane; v < vectors; v += 32) {
        Pack<T, VEC> p = load<VEC>(x + at + v * VEC);
        Pack<T, VEC> add;
        if (ADD) add = load<VEC>(delta + at + v * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            if (ADD) narrow(widen(p.v[j]) + widen(add.v[j]), p.v[j]);
            const A value = widen(p.v[j]);
            square += value * value;
        }
        if (ADD) store(sum + at + v * VEC, p);
    }
    const T *again = ADD ? sum : x;  // each lane reads back what it wrote itself
#endif
    const A r = A(1) / sqrt(warp_sum(square) / A(width) + eps);
    if (lane == 0) rstd[row] = r;
#if PER
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + lane;
        if (v < vectors) {
            Pack<T, VEC> out = kept[i];
#else
    for (int v = lane; v < vectors; v += 32) {
        {
            Pack<T, VEC> out = load<VEC>(again + at + v * VEC);
#endif
            const Pack<T, VEC> w = load<VEC>(weight + v * VEC);
#pragma unroll
            for (int j = 0; j < VEC; j++) narrow(widen(out.v[j]) * r * widen(w.v[j]), out.v[j]);
            store(y + at + v * VEC, out);
        }
    }
}

extern "C" __global__ void rmsnorm_fwd(const T *x, const T *weight, T *y, A *rstd, int rows, int width, A eps) {
    forward<false>(x, nullptr, weight, nullptr, y, rstd, rows, width, eps);
}

extern "C" __global__ void add_rmsnorm_fwd(
    const T *residual, const T *delta, const T *weight, T *x, T *y, A *rstd, int rows, int width, A eps
) {
    forward<true>(residual, delta, weight, x, y, rstd, rows, width, eps);
}

// partial: a row of sums for each block. With PER = 0 it is not touched, and rmsnorm_dweight makes it.
template <bool ADD>
__device__ __forceinline__ void backward(
    const T *extra, const T *dy, const T *x, const A *rstd, const T *weight, T *dx, A *partial, int rows, int width
) {
    const int lane = threadIdx.x, vectors = width / VEC, stride = gridDim.x * blockDim.y;
#if PER
    __shared__ A sums[PER * 32 * VEC];
    Pack<T, VEC> w[PER];
    A dweight[PER][VEC];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + lane;
        if (v < vectors) w[i] = load<VEC>(weight + v * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) dweight[i][j] = 0;
    }
#endif
    for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += stride) {
        const i64 at = i64(row) * width;
        const A r = rstd[row];
        A along = 0;
#if PER
        Pack<T, VEC> up[PER], in[PER], more[PER];
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int v = i * 32 + lane;
            if (v < vectors) {
                up[i] = load<VEC>(dy + at + v * VEC);
                in[i] = load<VEC>(x + at + v * VEC);
                if (ADD) more[i] = load<VEC>(extra + at + v * VEC);
            }
        }
#pragma unroll
        for (int i = 0; i < PER; i++) {
            if (i * 32 + lane < vectors) {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    const A product = widen(up[i].v[j]) * widen(in[i].v[j]);
                    dweight[i][j] += product * r;
                    along += product * widen(w[i].v[j]);
                }
            }
        }
#else
        for (int v = lane; v < vectors; v += 32) {
            const Pack<T, VEC> up = load<VEC>(dy + at + v * VEC), in = load<VEC>(x + at + v * VEC);
            const Pack<T, VEC> w = load<VEC>(weight + v * VEC);
#pragma unroll
            for (int j = 0; j < VEC; j++) along += widen(up.v[j]) * widen(in.v[j]) * widen(w.v[j]);
        }
#endif
        const A mean = warp_sum(along) * r * r / A(width);
#if PER
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int v = i * 32 + lane;
            if (v < vectors) {
                Pack<T, VEC> out;
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    A d = r * (widen(up[i].v[j]) * widen(w[i].v[j]) - widen(in[i].v[j]) * mean);
                    if (ADD) d += widen(more[i].v[j]);
                    narrow(d, out.v[j]);
                }
                store(dx + at + v * VEC, out);
            }
        }
#else
        for (int v = lane; v < vectors; v += 32) {
            const Pack<T, VEC> up = load<VEC>(dy + at + v * VEC), in = load<VEC>(x + at + v * VEC);
            const Pack<T, VEC> w = load<VEC>(weight + v * VEC);
            Pack<T, VEC> out, more;
            if (ADD) more = load<VEC>(extra + at + v * VEC);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                A d = r * (widen(up.v[j]) * widen(w.v[j]) - widen(in.v[j]) * mean);
                if (ADD) d += widen(more.v[j]);
                narrow(d, out.v[j]);
            }
            store(dx + at + v * VEC, out);
        }
#endif
    }
#if PER
    for (int turn = 0; turn < blockDim.y; turn++) {
        if (threadIdx.y == turn) {
#pragma unroll
            for (int i = 0; i < PER; i++) {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    // Lane beside lane, so that a warp's 32 accesses fall into 32 banks.
                    const int slot = (i * VEC + j) * 32 + lane;
                    sums[slot] = dweight[i][j] + (turn ? sums[slot] : A(0));
                }
            }
        }
        __syncthreads();
    }
    for (int column = threadIdx.y * 32 + lane; column < width; column += blockDim.y * 32) {
        const int v = column / VEC, slot = (v / 32 * VEC + column % VEC) * 32 + v % 32;
        partial[i64(blockIdx.x) * width + column] = sums[slot];
    }
#endif
}

extern "C" __global__ void __launch_bounds__(256) rmsnorm_bwd(
    const T *dy, const T *x, const A *rstd, const T *weight, T *dx, A *partial, int rows, int width
) {
    backward<false>(nullptr, dy, x, rstd, weight, dx, partial, rows, width);
}

extern "C" __global__ void __launch_bounds__(256) add_rmsnorm_bwd(
    const T *extra, const T *dy, const T *x, const A *rstd, const T *weight, T *dx, A *partial, int rows, int width
) {
    backward<true>(extra, dy, x, rstd, weight, dx, partial, rows, width);
}

// Grid: (columns / 32, partial rows). Block: 32 x 8; thread (c, y) adds every eighth row of its block's share.
extern "C" __global__ void rmsnorm_dweight(
    const T *dy, const T *x, const A *rstd, A *partial, int rows, int width
) {
    __shared__ A sums[8][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    A sum = 0;
    if (column < width) {
        for (int row = blockIdx.y * 8 + threadIdx.y; row < rows; row += gridDim.y * 8) {
            const i64 at = i64(row) * width + column;
            sum += widen(dy[at]) * widen(x[at]) * rstd[row];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < width) {
        for (int y = 1; y < 8; y++) sum += sums[y][threadIdx.x];
        partial[i64(blockIdx.y) * width + column] = sum;
    }
}
