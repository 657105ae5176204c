// layernorm: y = w * xhat + b, xhat = (x - mean(x)) r, r = 1 / sqrt(var(x) + eps).
//
// Kernels:  layernorm_fwd        y, xhat, r
//           layernorm_bwd        dx, partial sums of dw and db
//           layernorm_columns    partial sums of dw and db alone, for rows that do not fit in registers
//
// Idea. As rmsnorm.cu: a warp takes a row, sums are shuffles, dw and db stay in registers over all rows of a warp, and
// the rows to come are on their way to shared memory meanwhile (rows.cuh). The variance is taken of x - mean(x), in a
// second pass over the registers: E[x^2] - E[x]^2 loses all digits where the mean is large.
//   g = dy w     dx = r (g - mean(g) - xhat mean(g xhat))     dw = sum of dy xhat     db = sum of dy
// Grid: forward a warp for each row; backward a fixed number of blocks. Block: 32 x WARPS threads.
// Bound by memory: three rows of traffic either way.
//
// Tried on an H200 (bf16, 16,384 x 768), us of layernorm_bwd alone and, after +, with add_columns; a copy of as many
// bytes takes 20.9:
//   two rows under way, two blocks of 8 warps, as here    24.5 + 3.5
//   one row / three rows                                  25.4 + 3.9  /  24.9 + 3.7
//   three blocks: 80 registers, 72 bytes spilled          35.2 + 4.4
//   one block of 16 warps / four of 4                     24.5 + 3.4  /  24.2 + 4.4
//   the gain read again in each row                       26.9 + 3.6
// Forward: 22.6, and 21.6 to 25.0 with the variants of rmsnorm.cu.
//
// compile: SCALAR=double|float|bf16 VEC=1 PER=0
// compile: SCALAR=double VEC=2 PER=0
// compile: SCALAR=float VEC=4 PER=0|1|3|6|8
// compile: SCALAR=bf16 VEC=8 PER=0|1|3|4
// spills: none

#include "ops/rows.cuh"

// bias: null where there is none.
extern "C" __global__ void layernorm_fwd(
    T *y, T *xhat, A *rstd, const T *x, const T *weight, const T *bias, int rows, int width, A eps
) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    const Row in(x + at, vectors);
    A sum = 0, square = 0;
    each_vector(vectors, [&](int i, int v) {
        const Vector p = in(i, v);
#pragma unroll
        for (int j = 0; j < VEC; j++) sum += widen(p.v[j]);
    });
    const A mean = warp_sum(sum) / A(width);
    each_vector(vectors, [&](int i, int v) {
        const Vector p = in(i, v);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const A d = widen(p.v[j]) - mean;
            square += d * d;
        }
    });
    const A r = A(1) / sqrt(warp_sum(square) / A(width) + eps);
    if (threadIdx.x == 0) rstd[row] = r;
    each_vector(vectors, [&](int i, int v) {
        const Vector p = in(i, v), w = load<VEC>(weight + v * VEC), b = bias ? load<VEC>(bias + v * VEC) : Vector{};
        Vector out, hat;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const A h = (widen(p.v[j]) - mean) * r;
            narrow(h, hat.v[j]);
            narrow(h * widen(w.v[j]) + widen(b.v[j]), out.v[j]);
        }
        store(xhat + at + v * VEC, hat);
        store(y + at + v * VEC, out);
    });
}

// partial: (blocks, 2 width): dw, then db. With PER = 0 it is not touched, and layernorm_columns makes it.
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) layernorm_bwd(
    T *dx, A *partial, const T *dy, const T *weight, const T *xhat, const A *rstd, int rows, int width
) {
    const int vectors = width / VEC;
    RowStream<2> in({dy, xhat}, rows, width);
    const Row gain(weight, vectors);
#if PER
    Pack<A, VEC> dweight[PER] = {}, dbias[PER] = {};
#endif
    A coming = in.row < rows ? rstd[in.row] : A(0);
    for (; in.ready(); in.next()) {
        const A r = coming;
        if (in.row + in.stride < rows) coming = rstd[in.row + in.stride];  // as far ahead of its use as the row
        A sum = 0, along = 0;
        each_vector(vectors, [&](int i, int v) {
            const Vector up = in(0, i, v), hat = in(1, i, v), w = gain(i, v);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const A d = widen(up.v[j]), h = widen(hat.v[j]), g = d * widen(w.v[j]);
#if PER
                dweight[i].v[j] += d * h;
                dbias[i].v[j] += d;
#endif
                sum += g;
                along += g * h;
            }
        });
        const A mean = warp_sum(sum) / A(width), mean_along = warp_sum(along) / A(width);
        each_vector(vectors, [&](int i, int v) {
            const Vector up = in(0, i, v), hat = in(1, i, v), w = gain(i, v);
            Vector out;
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                narrow(r * (widen(up.v[j]) * widen(w.v[j]) - mean - widen(hat.v[j]) * mean_along), out.v[j]);
            }
            store(dx + i64(in.row) * width + v * VEC, out);
        });
    }
#if PER
    A *mine = partial + i64(blockIdx.x) * 2 * width;
    add_warps(dweight, mine, width);
    add_warps(dbias, mine + width, width);
#endif
}

// Grid: (columns / 32, partial rows). Block: 32 x 8; thread (c, y) adds every eighth row of its block's share.
extern "C" __global__ void layernorm_columns(A *partial, const T *dy, const T *xhat, int rows, int width) {
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
