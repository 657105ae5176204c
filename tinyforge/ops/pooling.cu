// pooling: images (B, H, W, C) made smaller by windows, and larger by repeating pixels.
//
// Kernels:  average_pool_fwd, average_pool_bwd    the mean of a window; dx sums dy / size^2 over the windows of a pixel
//           max_pool_fwd, max_pool_bwd            the maximum, and its place in the window in a byte; dx sums dy over
//                                                 the windows whose maximum is at the pixel
//           upsample_fwd, upsample_bwd            the nearest pixel; dx sums the factor^2 copies
//
// Idea. A thread takes a vector of VEC channels of a position of the result. Backward a thread gathers from all windows
// that hold its pixel, in a fixed order: no atomics, the same bits every time.
// Grid: a thread for each vector of the result. Block: 256 threads. No shared memory. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, VEC> Vector;
typedef unsigned char byte;

// A position of an array (B, down, across, vectors) of vectors: its number, taken apart.
struct Position {
    int vector, c, r, image;
    __device__ __forceinline__ Position(u32 i, int down, int across, int vectors)
        : vector(i % vectors), c(i / vectors % across), r(i / (vectors * across) % down),
          image(i / (vectors * across * down)) {}
    // Where the same channels are at another position of an array (B, high, wide, vectors).
    __device__ __forceinline__ i64 at(int p, int q, int high, int wide, int vectors) const {
        return (((i64(image) * high + p) * wide + q) * vectors + vector) * VEC;
    }
};

extern "C" __global__ void __launch_bounds__(256) average_pool_fwd(
    T *y, const T *x, u32 total, int vectors, int high, int wide, int down, int across, int size, int stride
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const Position here(i, down, across, vectors);
    Pack<A, VEC> sum = {};
    for (int k = 0; k < size * size; k++) {
        const int p = here.r * stride + k / size, q = here.c * stride + k % size;
        const Vector v = load<VEC>(x + here.at(p, q, high, wide, vectors));
#pragma unroll
        for (int j = 0; j < VEC; j++) sum.v[j] += widen(v.v[j]);
    }
    Vector out;
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(sum.v[j] / A(size * size), out.v[j]);
    store(y + i64(i) * VEC, out);
}

// Calls use(r, c, k) for each window (r, c) that holds the pixel (p, q), at its place k.
template <class Use>
__device__ __forceinline__ void each_window(int p, int q, int down, int across, int size, int stride, Use use) {
    const int top = p < size ? 0 : (p - size) / stride + 1, left = q < size ? 0 : (q - size) / stride + 1;
    for (int r = top; r < down && r * stride <= p; r++) {
        for (int c = left; c < across && c * stride <= q; c++) {
            use(r, c, (p - r * stride) * size + q - c * stride);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) average_pool_bwd(
    T *dx, const T *dy, u32 total, int vectors, int high, int wide, int down, int across, int size, int stride
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const Position here(i, high, wide, vectors);
    Pack<A, VEC> sum = {};
    each_window(here.r, here.c, down, across, size, stride, [&](int r, int c, int) {
        const Vector v = load<VEC>(dy + here.at(r, c, down, across, vectors));
#pragma unroll
        for (int j = 0; j < VEC; j++) sum.v[j] += widen(v.v[j]);
    });
    Vector out;
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(sum.v[j] / A(size * size), out.v[j]);
    store(dx + i64(i) * VEC, out);
}

// Written so that a NaN is a maximum, as in NumPy.
extern "C" __global__ void __launch_bounds__(256) max_pool_fwd(
    T *y, byte *where, const T *x, u32 total, int vectors, int high, int wide, int down, int across, int size,
    int stride
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const Position here(i, down, across, vectors);
    Vector best = load<VEC>(x + here.at(here.r * stride, here.c * stride, high, wide, vectors));
    Pack<byte, VEC> place = {};
    for (int k = 1; k < size * size; k++) {
        const int p = here.r * stride + k / size, q = here.c * stride + k % size;
        const Vector v = load<VEC>(x + here.at(p, q, high, wide, vectors));
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const A mine = widen(v.v[j]), old = widen(best.v[j]);
            if (old == old && !(mine <= old)) best.v[j] = v.v[j], place.v[j] = byte(k);
        }
    }
    store(y + i64(i) * VEC, best);
    store(where + i64(i) * VEC, place);
}

extern "C" __global__ void __launch_bounds__(256) max_pool_bwd(
    T *dx, const T *dy, const byte *where, u32 total, int vectors, int high, int wide, int down, int across, int size,
    int stride
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const Position here(i, high, wide, vectors);
    Pack<A, VEC> sum = {};
    each_window(here.r, here.c, down, across, size, stride, [&](int r, int c, int k) {
        const i64 at = here.at(r, c, down, across, vectors);
        const Vector v = load<VEC>(dy + at);
        const Pack<byte, VEC> place = load<VEC>(where + at);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            if (place.v[j] == k) sum.v[j] += widen(v.v[j]);
        }
    });
    Vector out;
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(sum.v[j], out.v[j]);
    store(dx + i64(i) * VEC, out);
}

// high, wide: of the smaller array.
extern "C" __global__ void __launch_bounds__(256) upsample_fwd(
    T *y, const T *x, u32 total, int vectors, int high, int wide, int factor
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const Position here(i, high * factor, wide * factor, vectors);
    store(y + i64(i) * VEC, load<VEC>(x + here.at(here.r / factor, here.c / factor, high, wide, vectors)));
}

extern "C" __global__ void __launch_bounds__(256) upsample_bwd(
    T *dx, const T *dy, u32 total, int vectors, int high, int wide, int factor
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const Position here(i, high, wide, vectors);
    Pack<A, VEC> sum = {};
    for (int k = 0; k < factor * factor; k++) {
        const int p = here.r * factor + k / factor, q = here.c * factor + k % factor;
        const Vector v = load<VEC>(dy + here.at(p, q, high * factor, wide * factor, vectors));
#pragma unroll
        for (int j = 0; j < VEC; j++) sum.v[j] += widen(v.v[j]);
    }
    Vector out;
#pragma unroll
    for (int j = 0; j < VEC; j++) narrow(sum.v[j], out.v[j]);
    store(dx + i64(i) * VEC, out);
}
