// layernorm: y = w * xhat + b, xhat = (x - mean(x)) r, r = 1 / sqrt(var(x) + eps), and the same after a residual add.
//
// Kernels:  layernorm_fwd, add_layernorm_fwd    y, mean and r (and x = residual + delta)
//           layernorm_bwd, add_layernorm_bwd    dx (plus the stream's gradient), partial sums of dw and db
//           layernorm_bwd_naive                 dx, dw and db: read it first; tests compare the two
//           layernorm_columns                   partial sums of dw and db alone, for rows that do not fit in registers
//
// Idea. As rmsnorm.cu: a warp takes a row, sums are shuffles, dw and db stay in registers over all rows of a warp, and
// the next rows are copied to shared memory meanwhile (rows.cuh). The variance is taken of x - mean(x), in a
// second pass over the registers: E[x^2] - E[x]^2 loses all digits where the mean is large. Backward computes xhat
// again from x: keeping xhat as well would cost forward a third row of traffic.
//   g = dy w     dx = r (g - mean(g) - xhat mean(g xhat))     dw = sum of dy xhat     db = sum of dy
// Grid: forward a warp for each row; backward a fixed number of blocks. Block: 32 x WARPS threads.
// Bound by memory: forward 2 (with add 4), backward 3 (4) rows of traffic.
//
// Tried on an H200 while xhat was kept (bf16, 16,384 x 768), us of layernorm_bwd alone and, after +, with add_columns;
// a copy of as many bytes takes 20.9:
//   two rows in flight, two blocks of 8 warps, as here    24.5 + 3.5
//   one row / three rows                                  25.4 + 3.9  /  24.9 + 3.7
//   three blocks: 80 registers, 72 bytes spilled          35.2 + 4.4
//   one block of 16 warps / four of 4                     24.5 + 3.4  /  24.2 + 4.4
//   the gain read again in each row                       26.9 + 3.6
// Forward: 22.6, and 21.6 to 25.0 with the variants of rmsnorm.cu.

#include "ops/rows.cuh"

// A thread for each row of dx and for each column of dw and db.
extern "C" __global__ void layernorm_bwd_naive(
    T *dx, A *dweight, A *dbias, const T *dy, const T *weight, const T *x, const A *mean, const A *rstd, int rows,
    int width
) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const auto xhat = [&](int n, int c) { return (widen(x[i64(n) * width + c]) - mean[n]) * rstd[n]; };
    if (i < rows) {
        const i64 at = i64(i) * width;
        A sum = 0, along = 0;
        for (int c = 0; c < width; c++) {
            const A g = widen(dy[at + c]) * widen(weight[c]);
            sum += g, along += g * xhat(i, c);
        }
        for (int c = 0; c < width; c++) {
            const A g = widen(dy[at + c]) * widen(weight[c]);
            narrow(rstd[i] * (g - sum / A(width) - xhat(i, c) * along / A(width)), dx[at + c]);
        }
    }
    for (int n = 0; i < width && n < rows; n++) {
        const A d = widen(dy[i64(n) * width + i]);
        dweight[i] += d * xhat(n, i), dbias[i] += d;
    }
}

template <bool ADD>
__device__ __forceinline__ void forward(
    T *sum, T *y, A *means, A *rstd, const T *x, const T *delta, const T *weight, const T *bias, int rows, int width,
    A eps
) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    Row in(x + at, vectors);
    const Row add(delta + at, ADD ? vectors : 0);
    A total = 0, square = 0;
    each_vector(vectors, [&](int i, int v) {
        Vector p = in(i, v);
        if (ADD) {
            const Vector q = add(i, v);
#pragma unroll
            for (int j = 0; j < VEC; j++) narrow(widen(p.v[j]) + widen(q.v[j]), p.v[j]);
            in.put(sum + at, i, v, p);
        }
#pragma unroll
        for (int j = 0; j < VEC; j++) total += widen(p.v[j]);
    });
    if (ADD) in.moved(sum + at);  // each lane reads back what it wrote itself
    const A mean = warp_sum(total) / A(width);
    each_vector(vectors, [&](int i, int v) {
        const Vector p = in(i, v);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const A d = widen(p.v[j]) - mean;
            square += d * d;
        }
    });
    const A r = A(1) / sqrt(warp_sum(square) / A(width) + eps);
    if (threadIdx.x == 0) {
        means[row] = mean;
        rstd[row] = r;
    }
    each_vector(vectors, [&](int i, int v) {
        const Vector p = in(i, v), w = load<VEC>(weight + v * VEC), b = bias ? load<VEC>(bias + v * VEC) : Vector{};
        Vector out;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            narrow((widen(p.v[j]) - mean) * r * widen(w.v[j]) + widen(b.v[j]), out.v[j]);
        }
        store(y + at + v * VEC, out);
    });
}

// bias may be a null pointer.
extern "C" __global__ void layernorm_fwd(
    T *y, A *mean, A *rstd, const T *x, const T *weight, const T *bias, int rows, int width, A eps
) {
    forward<false>(nullptr, y, mean, rstd, x, x, weight, bias, rows, width, eps);
}

extern "C" __global__ void add_layernorm_fwd(
    T *x, T *y, A *mean, A *rstd, const T *residual, const T *delta, const T *weight, const T *bias,
    int rows, int width, A eps
) {
    forward<true>(x, y, mean, rstd, residual, delta, weight, bias, rows, width, eps);
}

// partial: (blocks, 2 width): dw, then db. With PER = 0 it is not touched, and layernorm_columns makes it.
template <int ARRAYS>
__device__ __forceinline__ void backward(
    T *dx, A *partial, const T *const (&arrays)[ARRAYS], const T *weight, const A *means, const A *rstd, int rows,
    int width
) {
    const int vectors = width / VEC;
    RowStream<ARRAYS> in(arrays, rows, width);  // dy, x and, if there is a third, the gradient of the residual stream
    const Row gain(weight, vectors);
#if PER
    Pack<A, VEC> dweight[PER] = {}, dbias[PER] = {};
#endif
    A coming = in.row < rows ? rstd[in.row] : A(0), coming_mean = in.row < rows ? means[in.row] : A(0);
    for (; in.ready(); in.next()) {
        const A r = coming, center = coming_mean;
        if (in.row + in.stride < rows) {  // as far ahead of their use as the row
            coming = rstd[in.row + in.stride];
            coming_mean = means[in.row + in.stride];
        }
        A sum = 0, along = 0;
        each_vector(vectors, [&](int i, int v) {
            const Vector up = in(0, i, v), x = in(1, i, v), w = gain(i, v);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const A d = widen(up.v[j]), h = (widen(x.v[j]) - center) * r, g = d * widen(w.v[j]);
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
            const Vector up = in(0, i, v), x = in(1, i, v), more = in(ARRAYS - 1, i, v), w = gain(i, v);
            Vector out;
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const A h = (widen(x.v[j]) - center) * r;
                A d = r * (widen(up.v[j]) * widen(w.v[j]) - mean - h * mean_along);
                if (ARRAYS == 3) d += widen(more.v[j]);
                narrow(d, out.v[j]);
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

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) layernorm_bwd(
    T *dx, A *partial, const T *dy, const T *weight, const T *x, const A *mean, const A *rstd, int rows, int width
) {
    backward(dx, partial, {dy, x}, weight, mean, rstd, rows, width);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) add_layernorm_bwd(
    T *dx, A *partial, const T *dy, const T *weight, const T *x, const A *mean, const A *rstd, const T *residual,
    int rows, int width
) {
    backward(dx, partial, {dy, x, residual}, weight, mean, rstd, rows, width);
}

// Grid: (columns / 32, partial rows). Block: 32 x 8; thread (c, y) adds every eighth row of its block's share.
extern "C" __global__ void layernorm_columns(
    A *partial, const T *dy, const T *x, const A *mean, const A *rstd, int rows, int width
) {
    __shared__ A sums[2][8][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    A dweight = 0, dbias = 0;
    if (column < width) {
        for (int row = blockIdx.y * 8 + threadIdx.y; row < rows; row += gridDim.y * 8) {
            const i64 at = i64(row) * width + column;
            const A d = widen(dy[at]);
            dweight += d * (widen(x[at]) - mean[row]) * rstd[row];
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
