// muon: what surrounds the products of Muon, for the matrices of one shape that lie here and there in the flat buffers.
//
// Kernels:  muon_momentum   the momentum, what Nesterov's looks ahead to, and sums of its squares
//           muon_scale      x / |x|, for each matrix
//           normuon_rows    NorMuon's second moment of each row, one over its root, and the row's part of the norm
//           normuon_factors the factors of the rows, which bring the norm of an update to that of Muon's
//           muon_update     the weights
//
// Idea. A step is (rows x columns) matrices, and products of many of them are one launch where they lie one behind the
// other. They lie layer by layer among others; so the first pass, which reads the gradients anyway, packs what it
// writes, in the type that products are made of, and the last one reads it from there. `starts` says where in the flat
// buffers each matrix begins. In between are products of cuBLASLt (backends/cublaslt.py).
// As in adamw.cu, rates and the clipping factor are read from device memory, and a factor that is NaN changes nothing.
// So is the momentum, which a schedule may change from step to step.
// Sums: a block's threads stride over its part of a matrix, a fixed tree adds them, and every block that needs the norm
// adds up the parts by the same tree.
// Grid: muon_momentum PARTS blocks a matrix at most; normuon_rows a block for each row; the others a thread for each VEC
// elements. y: matrices. normuon_factors a block for each matrix. Block: 256.
// Bound by memory: bf16 30 bytes an element (14, 4 and 12), as much as AdamW.

#include "ops/common.cuh"

#define PARTS 64

typedef SCALAR T;
typedef Wide<T> A;

// x: (matrices, elements). squares: (matrices, gridDim.x). vectors: VEC elements each, of a matrix. rates: momentum,
// 1 - momentum, which is computed here, 0.
extern "C" __global__ void __launch_bounds__(256) muon_momentum(
    T *x, double *squares, A *m, const A *grads, const i64 *starts, const double *clip, const A *rates, int vectors
) {
    __shared__ double scratch[32];
    const double factor = *clip;
    if (isnan(factor)) return;
    const A scale = A(factor), momentum = rates[0];
    const i64 start = starts[blockIdx.y], packed = i64(blockIdx.y) * vectors * VEC;
    double sum = 0;
#pragma unroll 4
    for (int i = blockIdx.x * 256 + threadIdx.x; i < vectors; i += gridDim.x * 256) {
        const i64 at = start + i64(i) * VEC;
        const Pack<A, VEC> g = load<VEC>(grads + at);
        Pack<A, VEC> m1 = load<VEC>(m + at);
        Pack<T, VEC> ahead;
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const A d = (A(1) - momentum) * (g.v[j] * scale);
            m1.v[j] = momentum * m1.v[j] + d;
            const A next = momentum * m1.v[j] + d;
            sum += double(next) * double(next);
            narrow(next, ahead.v[j]);
        }
        store(m + at, m1);
        store(x + packed + i64(i) * VEC, ahead);
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) squares[i64(blockIdx.y) * gridDim.x + blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(256) muon_scale(
    T *x, const double *squares, int parts, int vectors, double eps
) {
    __shared__ double scratch[32];
    __shared__ double norm;
    double sum = threadIdx.x < parts ? squares[i64(blockIdx.y) * parts + threadIdx.x] : 0;
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) norm = fmax(sqrt(sum), eps);
    __syncthreads();
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= vectors) return;
    const A scale = A(1 / norm);
    T *const at = x + (i64(blockIdx.y) * vectors + i) * VEC;
    Pack<T, VEC> one = load<VEC>(at);
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(widen(one.v[j]) * scale, one.v[j]);
    store(at, one);
}

// v: flat, a matrix's rows from starts[matrix] on. factors, squares: (matrices, rows); squares: of the row's elements, each
// times the row's factor.
extern "C" __global__ void __launch_bounds__(256) normuon_rows(
    A *factors, double *squares, A *v, const T *x, const i64 *starts, const double *clip, int columns, A beta, A eps
) {
    __shared__ double scratch[32];
    if (isnan(*clip)) return;
    const i64 row = i64(blockIdx.y) * gridDim.x + blockIdx.x;
    const T *const mine = x + row * columns;
    double sum = 0;
    for (int i = threadIdx.x; i < columns; i += 256) {
        const double one = double(widen(mine[i]));
        sum += one * one;
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x) return;
    const i64 at = starts[blockIdx.y] + blockIdx.x;
    const A moment = beta * v[at] + (A(1) - beta) * A(sum / columns), factor = A(1) / (sqrt(moment) + eps);
    v[at] = moment;
    factors[row] = factor;
    squares[row] = sum * double(factor) * double(factor);
}

// norm: of an update, 0.2 sqrt(rows columns).
extern "C" __global__ void __launch_bounds__(256) normuon_factors(
    A *factors, const double *squares, const double *clip, int rows, double norm, double eps
) {
    __shared__ double scratch[32];
    __shared__ double scale;
    if (isnan(*clip)) return;
    const i64 first = i64(blockIdx.x) * rows;
    double sum = 0;
    for (int i = threadIdx.x; i < rows; i += 256) sum += squares[first + i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) scale = norm / fmax(sqrt(sum), eps);
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += 256) factors[first + i] *= A(scale);
}

// rates: lr, of no use here, 1 - lr decay. weights: null where it is the master. NORMUON: the factors of normuon_factors
// in place of scale. CAUTIOUS: decay only where the update moves the weight towards 0.
extern "C" __global__ void __launch_bounds__(256) muon_update(
    T *weights, A *master, const T *x, const i64 *starts, const A *rates, const double *clip, const A *factors,
    int vectors, int columns, A scale
) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= vectors || isnan(*clip)) return;
    const A rate = rates[0] * scale, shrink = rates[2];
    const i64 at = starts[blockIdx.y] + i64(i) * VEC;
    const Pack<T, VEC> change = load<VEC>(x + (i64(blockIdx.y) * vectors + i) * VEC);
    Pack<A, VEC> w = load<VEC>(master + at);
#pragma unroll
    for (int j = 0; j < VEC; j++) {
#if CAUTIOUS
        const A keep = widen(change.v[j]) * w.v[j] < 0 ? A(1) : shrink;
#else
        const A keep = shrink;
#endif
#if NORMUON
        const A each = rates[0] * factors[i64(blockIdx.y) * (vectors * VEC / columns) + (i * VEC + j) / columns];
#else
        const A each = rate;
#endif
        w.v[j] = w.v[j] * keep - each * widen(change.v[j]);
    }
    store(master + at, w);
    if (weights) {
        Pack<T, VEC> rounded_weights;
#pragma unroll
        for (int j = 0; j < VEC; j++) narrow(w.v[j], rounded_weights.v[j]);
        store(weights + at, rounded_weights);
    }
}
