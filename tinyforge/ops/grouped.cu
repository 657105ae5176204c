// grouped: rows times their expert's matrix, the plain way: for float64, float32, and widths that are no multiple of 8.
//
// Kernels:  grouped_fwd           y_r = W_e x_t(r)           W: (E, O, I)
//           grouped_bwd_input     dx_r = W_e^T dy_t(r)
//           grouped_bwd_weight    dW_e += sum over the rows r of expert e of dy_t(r) x_t(r)^T
//
// Idea. A block computes SIDE x SIDE numbers of a product, a thread one of them, from SIDE x SIDE pieces of the two
// factors in shared memory: the matrix product of a first course in CUDA. Two things are special to groups: find_tile
// (grouped.cuh), and that row r is loaded from row tokens[r], or from row r where tokens is null.
// grouped_mma.cu does the same on tensor cores; training uses that one, and tests compare it with this one.
// Grid: (columns / SIDE, tiles); grouped_bwd_weight (I / SIDE, O / SIDE, E). Block: SIDE x SIDE, in one dimension.

#include "ops/grouped.cuh"

typedef SCALAR T;
typedef Wide<T> A;

#define SIDE 16

// out (R, columns): row r is the row t(r) of x, (., depth), times the matrix of its expert, which has `depth` as its
// last axis, or, TRANSPOSED, as its middle one.
template <bool TRANSPOSED>
__device__ __forceinline__ void multiply(
    T *out, const T *x, const T *weight, const int *tokens, const int *starts, int columns, int depth, int experts
) {
    __shared__ A left[SIDE][SIDE + 1], right[SIDE][SIDE + 1];
    int expert, first, stop;
    if (!find_tile(blockIdx.y, starts, experts, SIDE, expert, first, stop)) return;
    const int i = threadIdx.x / SIDE, j = threadIdx.x % SIDE, row = first + i, column = blockIdx.x * SIDE + j;
    const T *w = weight + i64(expert) * columns * depth;
    const i64 from = row >= stop ? 0 : tokens ? tokens[row] : row;
    const int other = blockIdx.x * SIDE + i;  // the column that this thread loads where depth is the last axis
    A sum = 0;
    for (int k = 0; k < depth; k += SIDE) {
        left[i][j] = row < stop && k + j < depth ? widen(x[from * depth + k + j]) : A(0);
        if (TRANSPOSED) {
            right[j][i] = k + i < depth && column < columns ? widen(w[i64(k + i) * columns + column]) : A(0);
        } else {
            right[i][j] = other < columns && k + j < depth ? widen(w[i64(other) * depth + k + j]) : A(0);
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < SIDE; n++) sum += left[i][n] * right[j][n];
        __syncthreads();
    }
    if (row < stop && column < columns) narrow(sum, out[i64(row) * columns + column]);
}

extern "C" __global__ void __launch_bounds__(SIDE *SIDE) grouped_fwd(
    T *y, const T *x, const T *weight, const int *tokens, const int *starts, int columns, int depth, int experts
) {
    multiply<false>(y, x, weight, tokens, starts, columns, depth, experts);
}

extern "C" __global__ void __launch_bounds__(SIDE *SIDE) grouped_bwd_input(
    T *dx, const T *dy, const T *weight, const int *tokens, const int *starts, int columns, int depth, int experts
) {
    multiply<true>(dx, dy, weight, tokens, starts, columns, depth, experts);
}

extern "C" __global__ void __launch_bounds__(SIDE *SIDE) grouped_bwd_weight(
    A *dweight, const T *dy, const T *x, const int *dy_tokens, const int *x_tokens, const int *starts, int outs, int ins
) {
    __shared__ A left[SIDE][SIDE + 1], right[SIDE][SIDE + 1];
    const int i = threadIdx.x / SIDE, j = threadIdx.x % SIDE, expert = blockIdx.z;
    const int out = blockIdx.y * SIDE + j, in = blockIdx.x * SIDE + j, stop = starts[expert + 1];
    A sum = 0;
    for (int first = starts[expert]; first < stop; first += SIDE) {
        const int row = first + i;
        const i64 up = row >= stop ? 0 : dy_tokens ? dy_tokens[row] : row;
        const i64 down = row >= stop ? 0 : x_tokens ? x_tokens[row] : row;
        left[i][j] = row < stop && out < outs ? widen(dy[up * outs + out]) : A(0);
        right[i][j] = row < stop && in < ins ? widen(x[down * ins + in]) : A(0);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < SIDE; n++) sum += left[n][i] * right[n][j];
        __syncthreads();
    }
    const int mine = blockIdx.y * SIDE + i;
    if (mine < outs && in < ins) dweight[(i64(expert) * outs + mine) * ins + in] += sum;
}
