// router: of E logits z a token the `active` largest, their softmax, and what the router's losses need of all E.
//
// Kernels:  router_fwd    weights, chosen; and of each block's tokens the sums of p_e, then that of lse^2
//           router_bwd    dz_e = p_e (du_e - sum_i du_i p_i) + 2 du_E lse p_e, and w_j (dw_j - sum_i dw_i w_i) more
//                         where e is choice j
//
// Idea. A row is short, 8 numbers or a few dozen: a thread takes a token and reads its row again for each pass, from
// cache. Choices are found one after the other, each as the next in the order (z falling, number rising), which needs
// no list of earlier choices. Blocks sum over their tokens, one expert at a time; columns.cu adds the blocks up.
// Grid: a thread for each token. Block: 128, small, so that 16,384 tokens keep most of a GPU busy. Bound by latency.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

#define TOKENS 128  // of a block

#ifndef NORMALISED
#define NORMALISED 1  // 0: the weights are the probabilities among all experts
#endif

// log(sum exp(z)); NaN where a logit is.
__device__ __forceinline__ A log_sum_exp(const T *z, int experts) {
    A top = -INFINITY, sum = 0;
    for (int e = 0; e < experts; e++) top = largest(top, widen(z[e]));
    for (int e = 0; e < experts; e++) sum += exp(widen(z[e]) - top);
    return top + log(sum);
}

extern "C" __global__ void __launch_bounds__(TOKENS) router_fwd(
    A *weights, int *chosen, A *partial, const T *logits, int tokens, int experts, int active
) {
    __shared__ A scratch[32];
    const int n = blockIdx.x * TOKENS + threadIdx.x;
    const bool mine = n < tokens;
    const T *z = logits + i64(mine ? n : 0) * experts;
    const A lse = log_sum_exp(z, experts);
    if (mine) {
        A *w = weights + i64(n) * active;
        A first = 0, last = 0, sum = 0;
        for (int j = 0, before = 0; j < active; j++) {
            int best = -1;
            for (int e = 0; e < experts; e++) {
                const A x = widen(z[e]);
                const bool left = j == 0 || x < last || (x == last && e > before);
                if (left && (best < 0 || x > widen(z[best]))) best = e;
            }
            before = best < 0 ? 0 : best;  // -1 among NaN alone: a number all the same, since it will be an index
            last = widen(z[before]);
            if (j == 0) first = last;
            chosen[i64(n) * active + j] = before;
            w[j] = exp(last - (NORMALISED ? first : lse));
            sum += w[j];
        }
        for (int j = 0; NORMALISED && j < active; j++) w[j] /= sum;
    }
    A *sums = partial + i64(blockIdx.x) * (experts + 1);
    for (int e = 0; e < experts; e++) {
        const A sum = block_sum(mine ? exp(widen(z[e]) - lse) : A(0), scratch);
        if (threadIdx.x == 0) sums[e] = sum;
    }
    const A squares = block_sum(mine ? lse * lse : A(0), scratch);
    if (threadIdx.x == 0) sums[experts] = squares;
}

extern "C" __global__ void __launch_bounds__(TOKENS) router_bwd(
    T *dlogits, const A *dweights, const A *dusage, const T *logits, const A *weights, const int *chosen, int tokens,
    int experts, int active
) {
    const int n = blockIdx.x * TOKENS + threadIdx.x;
    if (n >= tokens) return;
    const T *z = logits + i64(n) * experts;
    const A *w = weights + i64(n) * active, *dw = dweights + i64(n) * active;
    const int *mine = chosen + i64(n) * active;
    const A lse = log_sum_exp(z, experts);
    A along_p = 0, along_w = 0;
    for (int e = 0; e < experts; e++) along_p += dusage[e] * exp(widen(z[e]) - lse);
    for (int j = 0; j < active; j++) along_w += dw[j] * w[j];
    for (int e = 0; e < experts; e++) {
        const A p = exp(widen(z[e]) - lse);
        // What comes through the weights is summed on its own: where p_e is near 1 its terms cancel.
        A through = 0;
        for (int j = 0; j < active; j++) {
            if (mine[j] == e) through += w[j] * (NORMALISED ? dw[j] - along_w : dw[j]);
        }
        if (!NORMALISED) through -= p * along_w;
        narrow(p * (dusage[e] - along_p + A(2) * dusage[experts] * lse) + through, dlogits[i64(n) * experts + e]);
    }
}
