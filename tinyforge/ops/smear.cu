// smear: y_t = x_t + a s(w . x_t) x_{t-1}, but nothing where a document begins.
//
// Kernels:  smear_fwd        y and s
//           smear_bwd        dx, and of each row dz and c s
//           smear_dweight    partial[part] = the sums over a part's rows of dz x, in the channels that w reads, and of c s
//
// Grid: a warp for each row, (b, t); smear_dweight a block for each part. Block: 256, 8 warps. Shared memory: the last
// one's sums. Bound by memory: forward reads and writes a row, backward reads two and writes one; neighbours come from
// cache.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, VEC> Vector;

// The row before row r of `length`, or null. starts: null for a document a row; previous: null, or what comes before.
__device__ __forceinline__ const T *row_before(
    const T *x, const int *starts, const T *previous, int r, int length, int width
) {
    const int t = r % length;
    if (starts && starts[r] == t) return nullptr;
    if (t) return x + i64(r - 1) * width;
    return previous ? previous + i64(r / length) * width : nullptr;
}

extern "C" __global__ void __launch_bounds__(256) smear_fwd(
    T *y, A *shares, const T *x, const T *gate, const T *scale, const int *starts, const T *previous, int rows,
    int length, int width, int reads
) {
    const int r = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (r >= rows) return;  // a whole warp
    const T *const mine = x + i64(r) * width, *const last = row_before(x, starts, previous, r, length, width);
    A z = 0;
    for (int c = lane; c < reads; c += 32) z += widen(mine[c]) * widen(gate[c]);
    const A share = sigmoid<T>(warp_sum(z)), factor = widen(*scale) * share;
    if (lane == 0) shares[r] = share;
    for (int c = lane * VEC; c < width; c += 32 * VEC) {
        Vector p = load<VEC>(mine + c);
        if (last) {
            const Vector q = load<VEC>(last + c);
#pragma unroll
            for (int j = 0; j < VEC; j++) narrow(widen(p.v[j]) + factor * widen(q.v[j]), p.v[j]);
        }
        store(y + i64(r) * width + c, p);
    }
}

// slopes: (2, rows), dz and c s.
extern "C" __global__ void __launch_bounds__(256) smear_bwd(
    T *dx, A *slopes, const T *dy, const T *x, const A *shares, const T *gate, const T *scale, const int *starts,
    int rows, int length, int width, int reads
) {
    const int r = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (r >= rows) return;
    const T *const mine = dy + i64(r) * width, *const last = row_before(x, starts, nullptr, r, length, width);
    A along = 0;
    if (last) {
        for (int c = lane * VEC; c < width; c += 32 * VEC) {
            const Vector p = load<VEC>(mine + c), q = load<VEC>(last + c);
#pragma unroll
            for (int j = 0; j < VEC; j++) along += widen(p.v[j]) * widen(q.v[j]);
        }
        along = warp_sum(along);
    }
    const A share = shares[r], factor = widen(*scale), slope = along * factor * share * (A(1) - share);
    if (lane == 0) {
        slopes[r] = slope;
        slopes[rows + r] = along * share;
    }
    const int t = r % length;
    const bool read = t + 1 < length && !(starts && starts[r + 1] == t + 1);  // by the row after it
    const A passed = read ? factor * shares[r + 1] : A(0);
    for (int c = lane * VEC; c < width; c += 32 * VEC) {
        Vector p = load<VEC>(mine + c), next = {};
        if (read) next = load<VEC>(mine + width + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const A by_gate = c + j < reads ? slope * widen(gate[c + j]) : A(0);
            narrow(widen(p.v[j]) + passed * widen(next.v[j]) + by_gate, p.v[j]);
        }
        store(dx + i64(r) * width + c, p);
    }
}

// partial: (parts, reads + 1).
extern "C" __global__ void __launch_bounds__(256) smear_dweight(
    A *partial, const A *slopes, const T *x, int rows, int width, int reads
) {
    __shared__ A sums[8][32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int first = 0; first <= reads; first += 32) {
        const int c = first + lane;
        A sum = 0;
        for (int r = blockIdx.x * 8 + warp; r < rows; r += gridDim.x * 8) {
            if (c < reads) sum += slopes[r] * widen(x[i64(r) * width + c]);
            else if (c == reads) sum += slopes[rows + r];
        }
        sums[warp][lane] = sum;
        __syncthreads();
        if (warp == 0 && c <= reads) {
            for (int w = 1; w < 8; w++) sum += sums[w][lane];
            partial[blockIdx.x * (reads + 1) + c] = sum;
        }
        __syncthreads();
    }
}
