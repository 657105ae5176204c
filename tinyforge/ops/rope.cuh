// RoPE of N pairs: the left and the right half of a head, rotated by the angle of their position. Needs common.cuh,
// included before it. Used by rope.cu, by gemm_hopper.cu as an epilogue, and by attention_hopper.cu for gradients. All
// of them round the arguments to T first, so they give the same bits.
template <class T, int N>
__device__ __forceinline__ void rotate(
    Pack<T, N> &left, Pack<T, N> &right, const Pack<Wide<T>, N> &cosine, const Pack<Wide<T>, N> &sine
) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        const Wide<T> l = widen(left.v[k]), r = widen(right.v[k]);
        narrow(l * cosine.v[k] - r * sine.v[k], left.v[k]);
        narrow(r * cosine.v[k] + l * sine.v[k], right.v[k]);
    }
}
