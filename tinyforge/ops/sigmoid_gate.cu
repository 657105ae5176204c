// sigmoid_gate: rows times the logistic function of one number each.
//
// Kernels:  sigmoid_gate_fwd    y_r = s(z_r) x_r
//           sigmoid_gate_bwd    dx_r = s dy_r     dz_r = s (1 - s) dy_r . x_r
//
// Grid: a warp for each row. Block: 32 x 8. No shared memory. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, VEC> Vector;

extern "C" __global__ void __launch_bounds__(256)
    sigmoid_gate_fwd(T *y, const T *x, const T *z, int rows, int width) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= rows) return;
    const A s = sigmoid<T>(widen(z[row]));
    const i64 at = i64(row) * width;
    for (int c = threadIdx.x * VEC; c < width; c += 32 * VEC) {
        Vector p = load<VEC>(x + at + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) narrow(s * widen(p.v[j]), p.v[j]);
        store(y + at + c, p);
    }
}

extern "C" __global__ void __launch_bounds__(256)
    sigmoid_gate_bwd(T *dx, T *dz, const T *dy, const T *x, const T *z, int rows, int width) {
    const int row = blockIdx.x * 8 + threadIdx.y;
    if (row >= rows) return;
    const A s = sigmoid<T>(widen(z[row]));
    const i64 at = i64(row) * width;
    A along = 0;
    for (int c = threadIdx.x * VEC; c < width; c += 32 * VEC) {
        Vector p = load<VEC>(dy + at + c);
        const Vector q = load<VEC>(x + at + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            along += widen(p.v[j]) * widen(q.v[j]);
            narrow(s * widen(p.v[j]), p.v[j]);
        }
        store(dx + at + c, p);
    }
    along = warp_sum(along);
    if (threadIdx.x == 0) narrow(s * (A(1) - s) * along, dz[row]);
}
