// conv2d: what the convolution's matrix products need besides themselves.
//
// Kernels:  conv2d_windows    a part of the matrix of windows: row m is what output position m sees, (h, w, I)
//           conv2d_flip       the weight that the gradient of x is a convolution with: f[k, i, j, o] = W[o, h-1-i, w-1-j, k]
//           conv2d_pad        rows of `width` numbers as rows of `wide`, the rest 0
//
// Idea. A convolution is a product of the matrix of windows and the weight. In float32 and float64 the matrix is made in
// parts of 64 MiB and cuBLAS multiplies; in bf16 conv2d_mma.cu reads windows straight from the image. The gradient of x
// is a convolution of dy with stride 1, dy spread by the forward's stride (`spread`): a window's position that falls
// between two numbers of dy, or outside, reads 0.
// Grid: a thread for each number. Block: 256 threads. No shared memory. Bound by memory.

#include "ops/common.cuh"

typedef SCALAR T;

extern "C" __global__ void __launch_bounds__(256) conv2d_windows(
    T *out, const T *x, i64 first, u32 total, int high, int wide, int channels, int down, int across, int height,
    int width, int stride, int above, int before, int spread
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const int k = i % channels, tap = i / channels % (height * width);
    const i64 m = first + i / (channels * height * width);
    const int c = m % across, r = m / across % down;
    const i64 image = m / (i64(down) * across);
    const int p = r * stride - above + tap / width, q = c * stride - before + tap % width;
    const bool inside = p >= 0 && q >= 0 && p % spread == 0 && q % spread == 0 && p / spread < high && q / spread < wide;
    T zero;
    narrow(Wide<T>(0), zero);
    out[i] = inside ? x[((image * high + p / spread) * wide + q / spread) * channels + k] : zero;
}

extern "C" __global__ void __launch_bounds__(256) conv2d_flip(
    T *out, const T *weight, u32 total, int outs, int taps, int channels
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const int o = i % outs, tap = i / outs % taps, k = i / (outs * taps);
    out[i] = weight[(i64(o) * taps + taps - 1 - tap) * channels + k];
}

extern "C" __global__ void __launch_bounds__(256) conv2d_pad(T *out, const T *x, u32 total, int width, int wide) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    T zero;
    narrow(Wide<T>(0), zero);
    out[i] = int(i % wide) < width ? x[i64(i / wide) * width + i % wide] : zero;
}
