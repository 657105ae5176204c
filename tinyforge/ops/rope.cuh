// RoPE of VEC pairs: the left and the right half of a head, turned by the angle of their position. Needs common.cuh,
// pasted in before it. Who uses it: rope.cu, gemm_hopper.cu at the end of a product, and attention_hopper.cu, which turns
// gradients back. All round what they hand in to T, so they give the same bits.

template <class T, int N>
__device__ __forceinline__ void turn(
    Pack<T, N> &left, Pack<T, N> &right, const Pack<Wide<T>, N> &cosine, const Pack<Wide<T>, N> &sine
) {
#pragma unroll
    for (int k = 0; k < N; k++) {
        const Wide<T> l = widen(left.v[k]), r = widen(right.v[k]);
        narrow(l * cosine.v[k] - r * sine.v[k], left.v[k]);
        narrow(r * cosine.v[k] + l * sine.v[k], right.v[k]);
    }
}
