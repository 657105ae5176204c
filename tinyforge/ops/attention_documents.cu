// Rows of several documents: the bounds that the attention kernels with DOCS=1 take (attention.cuh).
//
// Kernels:  document_bounds     bounds[0][b, t], the first key that query t sees;
//                               bounds[1][b, s], one past the last query that sees key s
//
// Idea. `starts` ascend along a sequence, so the queries that see key s are s and those after it, up to the first whose
// document begins after s. Bisection finds it. A window of w keys moves both bounds: query t sees no key before
// t - w + 1, and no query from s + w on sees key s.
// Grid: a thread for each token. Block: THREADS threads. No shared memory. Runs once for each layer and pass, and takes
// microseconds.

#include "ops/common.cuh"

// starts: (batch, length); total: batch * length; window: `length` for none.
extern "C" __global__ void __launch_bounds__(THREADS) document_bounds(
    int *bounds, const int *starts, int total, int length, int window
) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= total) return;
    const int t = i % length;
    const int *const row = starts + (i - t);
    int low = t + 1, high = length; // query t sees key t; the first query that does not is in low .. high
    while (low < high) {
        const int middle = (low + high) / 2;
        if (row[middle] > t) high = middle;
        else low = middle + 1;
    }
    bounds[i] = max(row[t], t - window + 1);
    bounds[total + i] = min(low, t + window);
}
