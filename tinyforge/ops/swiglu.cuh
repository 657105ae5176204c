// SwiGLU, y = silu(g) u with silu(g) = g s, s = 1 / (1 + exp(-g)), and its gradient, for N numbers of a row. Needs
// common.cuh, included before it. Used by swiglu.cu, and by gemm_hopper.cu as an epilogue. Both round the arguments to
// T first, so they give the same bits.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> swiglu(const Pack<T, N> &gate, const Pack<T, N> &up) {
    Pack<T, N> y;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const Wide<T> g = widen(gate.v[j]);
        narrow(g * sigmoid<T>(g) * widen(up.v[j]), y.v[j]);
    }
    return y;
}

// y is recomputed as well; where it is not read, the compiler leaves it out.
template <class T, int N>
__device__ __forceinline__ void swiglu_gradient(
    Pack<T, N> &dgate, Pack<T, N> &dup, Pack<T, N> &y, const Pack<T, N> &dy, const Pack<T, N> &gate, const Pack<T, N> &up
) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        const Wide<T> g = widen(gate.v[j]), s = sigmoid<T>(g), silu = g * s, upstream = widen(dy.v[j]);
        narrow(upstream * widen(up.v[j]) * silu_slope(g, s), dgate.v[j]);
        narrow(upstream * silu, dup.v[j]);
        narrow(silu * widen(up.v[j]), y.v[j]);
    }
}
