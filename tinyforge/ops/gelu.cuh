// Phi of GELU, y = x Phi(x), by the error function or by GPT-2's tanh formula (EXACT = 1 or 0), and its derivative. Needs
// common.cuh, and the types T and A, before it. Used by gelu.cu and geglu.cu.

#define SQRT_2_OVER_PI A(0.7978845608028654)
#define CUBIC A(0.044715)

__device__ __forceinline__ A phi(A x) {
#if EXACT
    if constexpr (sizeof(T) > 2) return A(0.5) * erfc(x * A(-0.7071067811865476));  // keeps the tail below 0
    return A(0.5) * (A(1) + erf(x * A(0.7071067811865476)));
#else
    // (1 + tanh u) / 2 = 1 / (1 + exp(-2u)): an exponential and a quotient, which bf16 has from the hardware.
    return inverse_for<T>(A(1) + exp_for<T>(A(-2) * SQRT_2_OVER_PI * (x + CUBIC * x * x * x)));
#endif
}

__device__ __forceinline__ A slope_of_phi(A x, A p) {
#if EXACT
    return exp(A(-0.5) * x * x) * (A(0.5) * SQRT_2_OVER_PI);
#else
    // Phi = (1 + tanh u) / 2, and 1 - tanh^2 u = 4 Phi (1 - Phi)
    return A(2) * p * (A(1) - p) * SQRT_2_OVER_PI * (A(1) + A(3) * CUBIC * x * x);
#endif
}
