// patches: y[b, n, (k, i, j)] = scale x[b, k, r P + i, c P + j] + shift, n = r W/P + c; and the way back.
//
// Kernels:  patches_fwd     y
//           patches_bwd     dx = scale dy, each number in its place
//
// Idea. A permutation: thread y of forward finds its pixel, and backward is the same map read the other way. The writes
// of a warp are adjacent, its reads are in rows of P pixels.
// Grid: a thread for each number. Block: 256 threads. No shared memory. Bound by memory: in a step of a vision
// transformer less than a percent of the time, so nothing faster is tried.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

__device__ inline A value_of(T x) { return widen(x); }
__device__ inline A value_of(int pixel) { return A(pixel); }

// Where in the images, (batch, channels, height, width), the element i of the patches is.
__device__ inline i64 place(u32 i, int channels, int height, int width, int size) {
    const int j = i % size, row = i / size % size, channel = i / (size * size) % channels;
    const u32 patch = i / (size * size * channels);
    const int across = width / size, down = height / size;
    const int c = patch % across, r = patch / across % down;
    return ((i64(patch / (across * down)) * channels + channel) * height + r * size + row) * width + c * size + j;
}

extern "C" __global__ void __launch_bounds__(256) patches_fwd(
    T *y, const IN *x, u32 total, int channels, int height, int width, int size, A scale, A shift
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    narrow(value_of(x[place(i, channels, height, width, size)]) * scale + shift, y[i]);
}

extern "C" __global__ void __launch_bounds__(256) patches_bwd(
    T *dx, const T *dy, u32 total, int channels, int height, int width, int size, A scale
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i < total) narrow(widen(dy[i]) * scale, dx[place(i, channels, height, width, size)]);
}
