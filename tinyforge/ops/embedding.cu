// embedding: y[n] = W[ids[n]]; dW[v] += sum of dy[n] over the n with ids[n] = v.
//
// Kernels:  embedding_fwd     a thread for each vector of y
//           embedding_bwd     a block for each row of W
//
// Idea of backward. Adding dy[n] to row ids[n] with atomics gives other bits in each run. Turned round, each row of W
// asks which tokens are its own: its block reads all ids (64 KB for 16,384 of them, from cache after the first block)
// and lists the matches in an order that depends on nothing but the ids. Most rows have none and end there. The eight
// warps then take every eighth match, columns side by side, and their eight sums are added in order.
// Grid: one block for each vocabulary row. Block: 32 x 8 threads.
// Shared memory: LIST matches at a time, 8 KB, and a tile of 8 x 32 VEC sums.
// Bound: rows x ids comparisons from L2; for 4,096 x 16,384 about the time of reading dy once or twice.
//
// Dropped: sorting the ids on the device (CuPy's sort waits for the stream, and a step has no other wait).
//
// compile: SCALAR=double VEC=1|2
// compile: SCALAR=float VEC=1|4
// compile: SCALAR=bf16 VEC=1|8
// spills: none

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

#define LIST 2048

extern "C" __global__ void __launch_bounds__(256) embedding_fwd(
    const int *ids, const T *table, T *y, u32 total, u32 vectors
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 n = i / vectors;
    store(y + i64(i) * VEC, load<VEC>(table + (i64(ids[n]) * vectors + (i - n * vectors)) * VEC));
}

extern "C" __global__ void __launch_bounds__(256, 1) embedding_bwd(
    const T *dy, const int *ids, A *dtable, int tokens, int width
) {
    __shared__ int list[LIST];
    __shared__ int counts[8];
    __shared__ A sums[8][VEC][32];
    const int row = blockIdx.x, lane = threadIdx.x, warp = threadIdx.y, thread = warp * 32 + lane;

    // Thread t looks at ids 4t .. 4t+3, then 1024 further on, and so on.
    int mine = 0;
    const int whole = tokens / 4;
    for (int i = thread; i < whole; i += 256) {
        const int4 id = reinterpret_cast<const int4 *>(ids)[i];
        mine += (id.x == row) + (id.y == row) + (id.z == row) + (id.w == row);
    }
    for (int n = whole * 4 + thread; n < tokens; n += 256) mine += ids[n] == row;

    // The place of this thread's first match in the block's list: a sum over the threads before it.
    int before = mine;
#pragma unroll
    for (int gap = 1; gap < 32; gap *= 2) {
        const int left = __shfl_up_sync(~0u, before, gap);
        if (lane >= gap) before += left;
    }
    if (lane == 31) counts[warp] = before;
    before -= mine;
    __syncthreads();
    int matches = 0;
    for (int w = 0; w < 8; w++) {
        if (w < warp) before += counts[w];
        matches += counts[w];
    }

    const int vectors = width / VEC;
    for (int start = 0; start < matches; start += LIST) {
        if (mine && before < start + LIST && before + mine > start) {
            int place = before - start;
            for (int i = thread; i < whole; i += 256) {
                const int4 id = reinterpret_cast<const int4 *>(ids)[i];
                const int found[4] = {id.x == row, id.y == row, id.z == row, id.w == row};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (found[j]) {
                        if (place >= 0 && place < LIST) list[place] = i * 4 + j;
                        place++;
                    }
                }
            }
            for (int n = whole * 4 + thread; n < tokens; n += 256) {
                if (ids[n] == row) {
                    if (place >= 0 && place < LIST) list[place] = n;
                    place++;
                }
            }
        }
        __syncthreads();
        const int listed = min(LIST, matches - start);
        for (int first = 0; first < vectors; first += 32) {
            const int v = first + lane;
            A sum[VEC];
#pragma unroll
            for (int j = 0; j < VEC; j++) sum[j] = 0;
            if (v < vectors) {
#pragma unroll 4
                for (int i = warp; i < listed; i += 8) {
                    const Pack<T, VEC> d = load<VEC>(dy + (i64(list[i]) * vectors + v) * VEC);
#pragma unroll
                    for (int j = 0; j < VEC; j++) sum[j] += widen(d.v[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < VEC; j++) sums[warp][j][lane] = sum[j];
            __syncthreads();
            if (warp < VEC && v < vectors) {
                A total = sums[0][warp][lane];
                for (int w = 1; w < 8; w++) total += sums[w][warp][lane];
                dtable[i64(row) * width + v * VEC + warp] += total;
            }
            __syncthreads();
        }
    }
}
