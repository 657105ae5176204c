// GELU, y = x Phi(x), by the error function or by GPT-2's tanh formula (ERF), and its gradient. Needs common.cuh, pasted
// in before it. Who uses it: gelu.cu, and gemm_hopper.cu at the end of a product. Both round what they hand in to T, so
// they give the same bits.

template <class T, bool ERF>
__device__ __forceinline__ Wide<T> phi(Wide<T> x) {
    typedef Wide<T> A;
    if constexpr (ERF) {
        return A(0.5) * (A(1) + erf(x * A(0.7071067811865476)));
    } else {
        // (1 + tanh u) / 2 = 1 / (1 + exp(-2u)): an exponential and a quotient, which bf16 has from the hardware.
        return inverse_for<T>(A(1) + exp_for<T>(A(-2) * A(0.7978845608028654) * (x + A(0.044715) * x * x * x)));
    }
}

template <class T, bool ERF>
__device__ __forceinline__ Wide<T> slope_of_phi(Wide<T> x, Wide<T> p) {
    typedef Wide<T> A;
    if constexpr (ERF) {
        return exp(A(-0.5) * x * x) * (A(0.5) * A(0.7978845608028654));
    } else {
        // Phi = (1 + tanh u) / 2, and 1 - tanh^2 u = 4 Phi (1 - Phi)
        return A(2) * p * (A(1) - p) * A(0.7978845608028654) * (A(1) + A(3) * A(0.044715) * x * x);
    }
}

template <class T, bool ERF>
__device__ __forceinline__ void gelu(T &y, Wide<T> x) {
    narrow(x * phi<T, ERF>(x), y);
}

// dx, before it is rounded too, and y again.
template <class T, bool ERF>
__device__ __forceinline__ Wide<T> gelu_gradient(T &dx, T &y, Wide<T> dy, Wide<T> x) {
    const Wide<T> share = phi<T, ERF>(x), slope = dy * (share + x * slope_of_phi<T, ERF>(x, share));
    narrow(slope, dx);
    narrow(x * share, y);
    return slope;
}
