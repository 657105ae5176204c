// What the grouped products share: the expert, and the rows of it, that a block works on.

#include "ops/common.cuh"

// The rows of each expert are cut into tiles of `size`, the last one shorter. Finds tile number `tile`: its expert, its
// first row, and `stop`, where the expert's rows end. Returns false past the last tile: a launch does not know the
// starts, and allows for the most tiles that there can be. Called by whole warps of a one-dimensional block.
__device__ __forceinline__ bool find_tile(
    int tile, const int *starts, int experts, int size, int &expert, int &first, int &stop
) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int base = 0; base < experts; base += 32) {
        const int mine = base + lane;
        const int from = mine < experts ? starts[mine] : 0, to = mine < experts ? starts[mine + 1] : 0;
        const int tiles = ceil_div(to - from, size), left = before + sum_before(tiles);
        const u32 found = __ballot_sync(~0u, left <= tile && tile < left + tiles);
        if (found) {
            const int winner = __ffs(found) - 1;
            expert = base + winner;
            first = __shfl_sync(~0u, from + (tile - left) * size, winner);
            stop = __shfl_sync(~0u, to, winner);
            return true;
        }
        before = __shfl_sync(~0u, left + tiles, 31);
    }
    return false;
}
