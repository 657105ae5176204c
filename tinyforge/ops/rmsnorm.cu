// rmsnorm: y = w * x * r, r = 1 / sqrt(mean(x^2) + eps), and the same after a residual add, or after a mix (mix.py).
//
// Kernels:  rmsnorm_fwd, add_rmsnorm_fwd      y and r (and x = residual + delta)
//           rmsnorm_bwd, add_rmsnorm_bwd      dx (plus the gradient of the residual stream), partial sums of dw
//           mix_rmsnorm_fwd, mix_rmsnorm_bwd    with x = a x + b x0 before it; in backward partial sums of da and db too
//           rmsnorm_scaled_fwd, rmsnorm_scaled_bwd, add_rmsnorm_scaled_bwd    the same, and y or dx in FP8 too (fp8.py)
//           rmsnorm_bwd_naive                 dx and dw: read it first; tests compare the two
//           rmsnorm_dweight                   partial sums of dw alone, for rows that do not fit in registers
//
// Idea. A warp takes a row and keeps it in registers (rows.cuh). Sums over the row are shuffles; there is no barrier.
//   dx = r (dy w - y / w mean(dy y))     dw = sum over rows of dy y / w
// Backward reads y, which the linear map after it keeps anyway, and not x: x r = y / w, and dy w x r = dy y. A gain
// nearer to 0 than LEAST_GAIN is replaced by LEAST_GAIN, in both directions: y is then negligible, and y / w is still
// x r. In backward a warp walks over many rows, so that dw stays in registers, while the next rows are copied to shared
// memory; a block then adds its warps' sums in order and writes one partial row, and add_columns (columns.cu) adds
// those. No atomics: the same bits every time.
// Grid: forward a warp for each row; backward a fixed number of blocks. Block: 32 x WARPS threads, a warp a row.
// Bound by memory: forward 2 (with add or mix 4), backward 3 (4, with mix 8) rows of traffic.
// What is normalised after an add or a mix is rounded to its storage type before: backward reads it rounded. The same
// holds for the gradient between the norm and the mix, so that the bits are those of two passes.
//
// Tried on an H200 (bf16, 16,384 x 768), us of rmsnorm_bwd and add_rmsnorm_bwd alone and, after +, with add_columns;
// copies of as many bytes take 20.9 and 26.8:
//   two rows in flight, two blocks of 8 warps, as here    23.4 + 3.8    28.9 + 3.7
//   one row / three rows                                  23.9 + 3.5    29.2 + 3.7  /  23.8 + 3.8    29.6 + 3.6
//   three blocks                                          23.2 + 4.6    28.9 + 4.6
//   four blocks, one row: 56 bytes spilled                28.4 + 4.6    34.8 + 4.8
//   one block of 16 warps / four of 4                     23.8 + 3.5    29.1 + 3.7  /  23.2 + 4.6    28.6 + 4.5
//   one block of 8 warps, two rows / four                 23.8 + 3.6    29.0 + 3.8  /  24.8 + 3.4    30.1 + 3.6
//   the gain read again in each row                       26.2 + 3.2    32.0 + 3.6
//   no branch around a lane's last vector, which is right at some widths only    23.2 + 3.8    28.6 + 4.0
//   no second launch: the blocks that come last wait for all and add the columns    26.9         33.6, fp32 5 % slower
// Forward: 16.1 and 28.6, where copies take 14.9 and 26.8; 4 or 16 rows a block are within 0.3 of that. Loads past L1:
// 17.1 and 31.3; together with streaming stores and without the branch 15.1 and 29.3: not taken, as y is read next, and
// that was not timed. Not taken either: a block for each row (two barriers a row, and three quarters of the threads
// idle at width 768 in bf16).

#include "ops/rows.cuh"
#include "ops/fp8.cuh"

#define LEAST_GAIN 0x1p-50

__device__ __forceinline__ A gain_of(const T &weight) {
#ifdef PLUS_ONE
    const A w = A(1) + widen(weight);
#else
    const A w = widen(weight);
#endif
    return fabs(w) < A(LEAST_GAIN) ? A(LEAST_GAIN) : w;
}

// A thread for each row of dx and for each column of dw.
extern "C" __global__ void rmsnorm_bwd_naive(
    T *dx, A *dweight, const T *dy, const T *weight, const T *y, const A *rstd, int rows, int width
) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < rows) {
        const i64 at = i64(i) * width;
        A along = 0;
        for (int c = 0; c < width; c++) along += widen(dy[at + c]) * widen(y[at + c]);
        for (int c = 0; c < width; c++) {
            const A w = gain_of(weight[c]);
            narrow(rstd[i] * (widen(dy[at + c]) * w - widen(y[at + c]) / w * along / A(width)), dx[at + c]);
        }
    }
    for (int n = 0; i < width && n < rows; n++) {
        dweight[i] += widen(dy[i64(n) * width + i]) * widen(y[i64(n) * width + i]) / gain_of(weight[i]);
    }
}

// Writes a row's codes and scale. most: its largest magnitude; row(i, v): this lane's vectors of it.
template <class R>
__device__ __forceinline__ void write_codes(byte *codes, A *scale, A most, int vectors, const R &row) {
    const A found = scale_of(most);
    if (threadIdx.x == 0) *scale = found;
    each_vector(vectors, [&](int i, int v) { store(codes + v * VEC, bytes_of<true>(row(i, v), 1 / found)); });
}

// codes, scale: where y goes quantised, with FP8. a, b: of the mix, with MIX; delta is x0 then.
template <bool ADD, bool FP8 = false, bool MIX = false>
__device__ __forceinline__ void forward(
    const T *x, const T *delta, const T *weight, T *sum, T *y, A *rstd, int rows, int width, A eps,
    byte *codes = nullptr, A *scale = nullptr, const T *a = nullptr, const T *b = nullptr
) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y, vectors = width / VEC;
    if (row >= rows) return;
    const i64 at = i64(row) * width;
    Row in(x + at, vectors);
    const Row add(delta + at, ADD ? vectors : 0);
    A square = 0, of_x = 1, of_delta = 1;
    if (MIX) of_x = widen(*a), of_delta = widen(*b);
    each_vector(vectors, [&](int i, int v) {
        Vector p = in(i, v);
        if (ADD) {
            const Vector q = add(i, v);
#pragma unroll
            for (int j = 0; j < VEC; j++) narrow(of_x * widen(p.v[j]) + of_delta * widen(q.v[j]), p.v[j]);
            in.put(sum + at, i, v, p);
        }
#pragma unroll
        for (int j = 0; j < VEC; j++) square += widen(p.v[j]) * widen(p.v[j]);
    });
    if (ADD) in.moved(sum + at);  // each lane reads back what it wrote itself
    const A r = A(1) / sqrt(warp_sum(square) / A(width) + eps);
    if (threadIdx.x == 0) rstd[row] = r;
    A most = 0;
    each_vector(vectors, [&](int i, int v) {
        Vector out = in(i, v);
        const Vector w = load<VEC>(weight + v * VEC);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            narrow(widen(out.v[j]) * r * gain_of(w.v[j]), out.v[j]);
            if constexpr (FP8) most = largest(fabs(widen(out.v[j])), most);
        }
        in.put(y + at, i, v, out);
    });
    if constexpr (FP8) {
        in.moved(y + at);
        write_codes(codes + at, scale + row, warp_max(most), vectors, in);
    }
}

extern "C" __global__ void rmsnorm_fwd(T *y, A *rstd, const T *x, const T *weight, int rows, int width, A eps) {
    forward<false>(x, x, weight, nullptr, y, rstd, rows, width, eps);
}

extern "C" __global__ void add_rmsnorm_fwd(
    T *x, T *y, A *rstd, const T *residual, const T *delta, const T *weight, int rows, int width, A eps
) {
    forward<true>(residual, delta, weight, x, y, rstd, rows, width, eps);
}

extern "C" __global__ void mix_rmsnorm_fwd(
    T *mixed, T *y, A *rstd, const T *x, const T *first, const T *weight, const T *a, const T *b, int rows, int width,
    A eps
) {
    forward<true, false, true>(x, first, weight, mixed, y, rstd, rows, width, eps, nullptr, nullptr, a, b);
}

#ifdef FP8_ROWS
extern "C" __global__ void rmsnorm_scaled_fwd(
    T *y, byte *codes, A *scale, A *rstd, const T *x, const T *weight, int rows, int width, A eps
) {
    forward<false, true>(x, x, weight, nullptr, y, rstd, rows, width, eps, codes, scale);
}
#endif

// The mix before the norm: x = a x + b x0. dfirst: the gradient of x0; add: whether it has numbers already.
struct Mix {
    T *dfirst;
    const T *a, *b;
    bool add;
};

// partial: a row of sums for each block. With PER = 0 it is not touched, and rmsnorm_dweight makes it. With six arrays
// dx goes through `mix`, and a row of sums has two more, of d x and d x0, d the gradient between the two.
template <int ARRAYS, bool FP8 = false>
__device__ __forceinline__ void backward(
    const T *const (&arrays)[ARRAYS], const A *rstd, const T *weight, T *dx, A *partial, int rows, int width,
    byte *codes = nullptr, A *scale = nullptr, const Mix &mix = {}
) {
    constexpr bool MIX = ARRAYS == 6;
    const int vectors = width / VEC;
    // dy, y and, if there is a third, the gradient of the residual stream; before a mix also x, x0, and dx0 so far
    RowStream<ARRAYS> in(arrays, rows, width);
    const Row gain(weight, vectors);
    A of_x = 0, of_first = 0, along_x = 0, along_first = 0;
    if constexpr (MIX) of_x = widen(*mix.a), of_first = widen(*mix.b);
#if PER
    Pack<A, VEC> dweight[PER] = {};
#endif
    A coming = in.row < rows ? rstd[in.row] : A(0);
    for (; in.ready(); in.next()) {
        const A r = coming;
        if (in.row + in.stride < rows) coming = rstd[in.row + in.stride];  // as far ahead of its use as the row
        A along = 0;
        each_vector(vectors, [&](int i, int v) {
            const Vector dy = in(0, i, v), y = in(1, i, v);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const A product = widen(dy.v[j]) * widen(y.v[j]);
#if PER
                dweight[i].v[j] += product;
#endif
                along += product;
            }
        });
        const A mean = warp_sum(along) / A(width);
        A most = 0;
#if PER
        Vector written[FP8 ? PER : 1];
#endif
        each_vector(vectors, [&](int i, int v) {
            const Vector dy = in(0, i, v), y = in(1, i, v), more = in(ARRAYS > 2 ? 2 : 0, i, v), weights = gain(i, v);
            Vector out;
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const A w = gain_of(weights.v[j]);
                A d = r * (widen(dy.v[j]) * w - widen(y.v[j]) * inverse_for<T>(w) * mean);
                if (ARRAYS > 2) d += widen(more.v[j]);
                narrow(d, out.v[j]);
                if constexpr (FP8) most = largest(fabs(widen(out.v[j])), most);
            }
            if constexpr (MIX) {
                const Vector x = in(3, i, v), first = in(4, i, v);
                Vector sum = in(5, i, v);
#pragma unroll
                for (int j = 0; j < VEC; j++) {
                    const A d = widen(out.v[j]);
                    along_x += d * widen(x.v[j]);
                    along_first += d * widen(first.v[j]);
                    narrow((mix.add ? widen(sum.v[j]) : A(0)) + of_first * d, sum.v[j]);
                    narrow(of_x * d, out.v[j]);
                }
                store(mix.dfirst + i64(in.row) * width + v * VEC, sum);
            }
            store(dx + i64(in.row) * width + v * VEC, out);
#if PER
            if constexpr (FP8) written[i] = out;
#endif
        });
        if constexpr (FP8) {
            const i64 at = i64(in.row) * width;
            write_codes(codes + at, scale + in.row, warp_max(most), vectors, [&](int i, int v) {
#if PER
                return written[i];
#else
                return load<VEC>(dx + at + v * VEC);  // written by this lane
#endif
            });
        }
    }
#if PER
    each_vector(vectors, [&](int i, int v) {
        const Vector w = gain(i, v);
#pragma unroll
        for (int j = 0; j < VEC; j++) dweight[i].v[j] /= gain_of(w.v[j]);
    });
    A *const sums = partial + i64(blockIdx.x) * (width + 2 * MIX);
    add_warps(dweight, sums, width);
    if constexpr (MIX) {
        __shared__ A both[2][WARPS];
        along_x = warp_sum(along_x), along_first = warp_sum(along_first);
        if (threadIdx.x == 0) both[0][threadIdx.y] = along_x, both[1][threadIdx.y] = along_first;
        __syncthreads();
        if (threadIdx.y == 0 && threadIdx.x < 2) {
            A sum = both[threadIdx.x][0];
            for (int w = 1; w < WARPS; w++) sum += both[threadIdx.x][w];
            sums[width + threadIdx.x] = sum;
        }
    }
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) rmsnorm_bwd(
    T *dx, A *partial, const T *dy, const T *weight, const T *y, const A *rstd, int rows, int width
) {
    backward({dy, y}, rstd, weight, dx, partial, rows, width);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) add_rmsnorm_bwd(
    T *dx, A *partial, const T *dy, const T *weight, const T *y, const A *rstd, const T *residual, int rows, int width
) {
    backward({dy, y, residual}, rstd, weight, dx, partial, rows, width);
}

#if PER
// One block: six arrays' rows fill the shared memory. partial: (blocks, width + 2).
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) mix_rmsnorm_bwd(
    T *dx, T *dfirst, A *partial, const T *dy, const T *weight, const T *y, const A *rstd, const T *residual, const T *x,
    const T *first, const T *a, const T *b, int rows, int width, u32 add
) {
    const Mix mix{dfirst, a, b, add != 0};
    const T *const so_far = add ? dfirst : first;  // not read, but copied
    backward<6>({dy, y, residual, x, first, so_far}, rstd, weight, dx, partial, rows, width, nullptr, nullptr, mix);
}
#endif

#ifdef FP8_ROWS
extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) rmsnorm_scaled_bwd(
    T *dx, byte *codes, A *scale, A *partial, const T *dy, const T *weight, const T *y, const A *rstd, int rows,
    int width
) {
    backward<2, true>({dy, y}, rstd, weight, dx, partial, rows, width, codes, scale);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) add_rmsnorm_scaled_bwd(
    T *dx, byte *codes, A *scale, A *partial, const T *dy, const T *weight, const T *y, const A *rstd,
    const T *residual, int rows, int width
) {
    backward<3, true>({dy, y, residual}, rstd, weight, dx, partial, rows, width, codes, scale);
}
#endif

// Grid: (columns / 32, partial rows). Block: 32 x 8; thread (c, y) adds every eighth row of its block's share.
extern "C" __global__ void rmsnorm_dweight(
    A *partial, const T *dy, const T *y, const T *weight, int rows, int width
) {
    __shared__ A sums[8][32];
    const int column = blockIdx.x * 32 + threadIdx.x;
    A sum = 0;
    if (column < width) {
        for (int row = blockIdx.y * 8 + threadIdx.y; row < rows; row += gridDim.y * 8) {
            const i64 at = i64(row) * width + column;
            sum += widen(dy[at]) * widen(y[at]);
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < width) {
        for (int y = 1; y < 8; y++) sum += sums[y][threadIdx.x];
        partial[i64(blockIdx.y) * width + column] = sum / gain_of(weight[column]);
    }
}
