// router_losses: balance = E sum_e f_e P_e and the mean of lse^2, from what the routers of all layers have summed.
//
// Kernels:  router_losses_fwd    terms (2), and slope (E + 1), their gradients in each layer's usage
//           router_losses_bwd    dusage_e = dterms_0 slope_e,  dusage_E = dterms_1 slope_E
//
// Idea. A few hundred numbers: one block, a thread for each expert. Bound by the launch.

#include "ops/common.cuh"

typedef SCALAR A;

// usage, starts: (layers, experts + 1). Called by one block of 256 threads.
extern "C" __global__ void __launch_bounds__(256) router_losses_fwd(
    A *terms, A *slope, const A *usage, const int *starts, int layers, int experts, int active
) {
    __shared__ A scratch[32];
    const int width = experts + 1;
    A rows = 0, balance = 0;  // rows: tokens, each counted once a layer
    for (int l = 0; l < layers; l++) rows += A(starts[l * width + experts]);
    rows = largest(rows, A(1)) / A(active);
    for (int e = threadIdx.x; e < width; e += 256) {
        A total = 0, count = 0;
        for (int l = 0; l < layers; l++) {
            total += usage[l * width + e];
            if (e < experts) count += A(starts[l * width + e + 1] - starts[l * width + e]);
        }
        slope[e] = (e < experts ? A(experts) * count / rows : A(1)) / rows;
        if (e < experts) balance += slope[e] * total;
        else terms[1] = slope[e] * total;
    }
    balance = block_sum(balance, scratch);
    if (threadIdx.x == 0) terms[0] = balance;
}

extern "C" __global__ void __launch_bounds__(256)
router_losses_bwd(A *dusage, const A *dterms, const A *slope, int experts) {
    const int e = blockIdx.x * 256 + threadIdx.x;
    if (e <= experts) dusage[e] = dterms[e == experts] * slope[e];
}
