// layernorm: y = w * xhat + b, xhat = (x - mean(x)) r, r = 1 / sqrt(var(x) + eps).
//
// Kernels:  layernorm_fwd        y, xhat, r
//           layernorm_bwd        dx, partial sums of dw and db
//           layernorm_columns    partial sums of dw and db alone, for rows that do not fit in registers
//
// Idea. As rmsnorm.cu: a warp takes a row and keeps it in registers, sums are shuffles, dw and db stay in registers
// over all rows of a warp. The variance is taken of x - mean(x), in a second pass over the registers: E[x^2] - E[x]^2
// loses all digits where the mean is large.
//   g = dy w     dx = r (g - mean(g) - xhat mean(g xhat))     dw = sum of dy xhat     db = sum of dy
// Grid: forward a warp for each row; backward a fixed number of blocks. Block: 32 x 8 threads.
// Shared memory: backward, two rows of sums. Bound by memory: three rows of traffic either way.
// PER = 0 is for any width: it reads the row again, mostly from cache.
//
// compile: SCALAR=double|float|bf16 VEC=1 PER=0
// compile: SCALAR=double VEC=2 PER=0
// compile: SCALAR=float VEC=4 PER=0|1|3|6|8
// compile: SCALAR=bf16 VEC=8 PER=0|1|3|4
// spills: none

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

extern "C" __global__ void layernorm_fwd(
    const T *x, const T *weight, const T *bias, T *y, T *xhat, A *rstd, int rows, int width, A eps
) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    A sum = 0, square = 0;
#if PER
    A kept[PER][VEC];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + lane;
        if (v < vectors) {
            const Pack<T, VEC> p = load<VEC>(x + at + v * VEC);
#pragma unroll
            for (int j = 0; j < VEC; j++) sum += kept[i][j] = widen(p.v[j]);
        }
    }
    const A mean = warp_sum(sum) / A(width);
#pragma unroll
    for (int i = 0; i < PER; i++) {
        if (i * 32 + lane < vectors) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                kept[i][j] -= mean;
                square += kept[i][j] * kept[i][j];
            }
        }
    }
#else
    for (int v = lane; v < vectors; v += 32) {
        const Pack<T, VEC> p = load<VEC>(x + at + v * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) sum += widen(p.v[j]);
    }
    const A mean = warp_sum(sum) / A(width);
    for (int v = lane; v < vectors; v += 32) {
        const Pack<T, VEC> p = load<VEC>(x + at + v * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const A d = widen(p.v[j]) - mean;
            square += d * d;
        }
    }
#endif
    const A r = A(1) / sqrt(warp_sum(square) / A(width) + eps);
    if (lane == 0) rstd[row] = r;
#if PER
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + lane;
        if (v < vectors) {
#else
    for (int v = lane; v < vectors; v += 32) {
        {
            const Pack<T, VEC> p = load<VEC>(x + at + v * VEC);
#endif
            const Pack<T, VEC> w = load<VEC>(weight + v * VEC), b = load<VEC>(bias + v * VEC);
            Pack<T, VEC> out, hat;
#pragma unroll
            for (int j = 0; j < VEC; j++) {
#if PER
                const A h = kept[i][j] * r;
#else
                const A h = (widen(p.v[j]) - mean) * r;
#endif
                narrow(h, hat.v[j]);
                narrow(h * widen(w.v[j]) + widen(b.v[j]), out.v[j]);
            }
            store(xhat + at + v * VEC, hat);
            store(y + at + v * VEC, out);
        }
    }
}

// partial: (blocks, 2 width): dw, then db. With PER = 0 it is not touched, and layernorm_columns makes it.
extern "C" __global__ void __launch_bounds__(256) layernorm_bwd(
    const T *dy, const T *xhat, const A *rstd, const T *weight, T *dx, A *partial, int rows, int width
) {
    const int lane = threadIdx.x, vectors = width / VEC, stride = gridDim.x * blockDim.y;
#if PER
    __shared__ A sums[2][PER * 32 * VEC];
    A dweight[PER][VEC], dbias[PER][VEC];
#pragma unroll
    for (int i = 0; i < PER; i++) {
#pragma unroll
        for (int j = 0; j < VEC; j++) dweight[i][j] = dbias[i][j] = 0;
    }
#endif
    for (int row = blockIdx.x * blockDim.y + threadIdx.y; row < rows; row += stride) {
        const i64 at = i64(row) * width;
        A sum = 0, along = 0;
#if PER
        Pack<T, VEC> up[PER], hat[PER];
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int v = i * 32 + lane;
            if (v < vectors) {
                up[i] = load<VEC>(dy + at + v * VEC);
                hat[i] = load<VEC>(xhat + at + v * VEC);
            }
        }
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int v = i * 32 + lane;
            if (v < vectors) {
                const Pack<T, VEC> w = load<VEC>(weight + v * VEC);
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    const A d = widen(up[i].v[j]), h = widen(hat[i].v[j]), g = d * widen(w.v[j]);
                    dweight[i][j] += d * h;
                    dbias[i][j] += d;
                    sum += g;
                    along += g * h;
                }
            }
        }
#else
        for (int v = lane; v < vectors; v += 32) {
            const Pack<T, VEC> up = load<VEC>(dy + at + v * VEC), hat = load<VEC>(xhat + at + v * VEC);
            const Pack<T, VEC> w = load<VEC>(weight + v * VEC);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const A g = widen(up.v[j]) * widen(w.v[j]);
                sum += g;
                along += g * widen(hat.v[j]);
            }
        }
#endif
        const A r = rstd[row], mean = warp_sum(sum) / A(width), mean_along = warp_sum(along) / A(width);
#if PER
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int v = i * 32 + lane;
            if (v < vectors) {
                const Pack<T, VEC> d = up[i], h = hat[i];
#else
        for (int v = lane; v < vectors; v += 32) {
            {
                const Pack<T, VEC> d = load<VEC>(dy + at + v * VEC), h = load<VEC>(xhat + at + v * VEC);
#endif
                const Pack<T, VEC> w = load<VEC>(weight + v * VEC);
                Pack<T, VEC> out;
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    narrow(r * (widen(d.v[j]) * widen(w.v[j]) - mean - widen(h.v[j]) * mean_along), out.v[j]);
                }
                store(dx + at + v * VEC, out);
            }
        }
    }
#if PER
    for (int turn = 0; turn < blockDim.y; turn++) {
        if (threadIdx.y == turn) {
#pragma unroll
            for (int i = 0; i < PER; i++) {
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    const int slot = (i * VEC + j) * 32 + lane;
                    sums[0][slot] = dweight[i][j] + (turn ? sums[0][slot] : A(0));
                    sums[1][slot] = dbias[i][j] + (turn ? sums[1][slot] : A(0));
                }
            }
        }
        __syncthreads();
    }
    for (int column = threadIdx.y * 32 + lane; column < width; column += blockDim.y * 32) {
        const int v = column / VEC, slot = (v / 32 * VEC + column % VEC) * 32 + v % 32;
        partial[i64(blockIdx.x) * 2 * width + column] = sums[0][slot];
        partial[i64(blockIdx.x) * 2 * width + width + column] = sums[1][slot];
    }
#endif
}

// Grid: (columns / 32, partial rows). Block: 32 x 8; thread (c, y) adds every eighth row of its block's share.
extern "C" __global__ void layernorm_columns(const T *dy, const T *xhat, A *partial, int rows, int width) {
    __shared__ A sums[2][8][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    A dweight = 0, dbias = 0;
    if (column < width) {
        for (int row = blockIdx.y * 8 + threadIdx.y; row < rows; row += gridDim.y * 8) {
            const i64 at = i64(row) * width + column;
            const A d = widen(dy[at]);
            dweight += d * widen(xhat[at]);
            dbias += d;
        }
    }
    sums[0][threadIdx.y][threadIdx.x] = dweight;
    sums[1][threadIdx.y][threadIdx.x] = dbias;
    __syncthreads();
    if (threadIdx.y == 0 && column < width) {
        for (int y = 1; y < 8; y++) {
            dweight += sums[0][y][threadIdx.x];
            dbias += sums[1][y][threadIdx.x];
        }
        partial[i64(blockIdx.y) * 2 * width + column] = dweight;
        partial[i64(blockIdx.y) * 2 * width + width + column] = dbias;
    }
}
