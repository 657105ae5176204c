// embedding: y[n] = W[ids[n]]; dW[v] += sum of dy[n] over the n with ids[n] = v.
//
// Kernels:  embedding_fwd     a thread for each vector of y
//           embedding_order   the tokens in the order of their ids
//           embedding_bwd     dW, from the tokens in that order
//           embedding_bwd_naive   dW: read it first; tests compare the two
//
// Idea of backward. Adding dy[n] to row ids[n] with atomics gives other bits in each run. So the tokens are first
// sorted by id, by a stable counting sort; then dy is read once, row by row of W.
//   embedding_order   A block sorts the tokens of SHELF rows of W. It reads all ids (64 KB for 16,384 of them, from
//                     cache after the first block) and counts those of its own rows, one count for each warp's share of
//                     the tokens, and those of earlier rows, which is where its part of the order begins. In a second
//                     pass it puts the tokens there. No block waits for another, and the host reads nothing back.
//   embedding_bwd     A block takes a row of W and adds up that row's tokens. A row of more than PIECE tokens (in text
//                     the commonest have hundreds) is cut where the order's index is a multiple of PIECE. Each piece is
//                     summed by a block of its own, and the block that ends last adds the pieces, in order, to dW:
//                     which block that is differs from run to run, what it adds does not. One order serves the token
//                     embedding and all value embeddings of a step.
// Grid: embedding_order a block for SHELF rows; embedding_bwd a block for each possible piece, then one for each row,
// and in y as many as a row's vectors need. Block: 32 x 32 threads; embedding_bwd a thread for each vector.
// Bound by memory: dy, and dW read and written.
//
// Tried on an H200 (bf16, 16,384 tokens, 4,096 x 768), us of embedding_bwd for ids that are equally frequent, by Zipf's
// law, 30 % one id, and all the same; embedding_order takes 7.1, 14.7, 9.1 and 8.8 before it; a copy of 50 MB, 14.9:
//   PIECE 64, BATCH 8, as here                     14.2  18.0  23.3  32.2
//   PIECE 32 / 128                                 14.2  17.8  25.3  48.8  /  14.2  23.9  27.3  29.7
//   BATCH 4                                        14.4  20.7  26.2  35.3
//   five blocks of 256 in the launch bound         17.2  23.9  31.7  46.0, 16 bytes spilled; with BATCH 4, none, 14.3
//                                                  22.4  29.7  46.8
// Dropped: CuPy's sort (it waits for the stream, and a step has no other wait); one kernel in which each row's block
// looks through all ids itself, 4,096 x 64 KB from L2: 55 us.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;

#define SHELF 32  // as many as warps: each has the counts of one row
#define SCAN 16   // ids of a lane in flight at a time
#define PIECE 64
#define BATCH 8  // rows of dy of a thread in flight at a time

extern "C" __global__ void __launch_bounds__(256) embedding_fwd(
    T *y, const int *ids, const T *table, u32 total, u32 vectors
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 n = i / vectors;
    store(y + i64(i) * VEC, load<VEC>(table + (i64(ids[n]) * vectors + (i - n * vectors)) * VEC));
}

// A thread for each number of dW, which looks through all ids.
extern "C" __global__ void embedding_bwd_naive(
    A *dtable, const T *dy, const int *ids, int tokens, int rows, int width
) {
    const i64 i = i64(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= i64(rows) * width) return;
    for (int n = 0; n < tokens; n++) {
        if (ids[n] == i / width) dtable[i] += widen(dy[i64(n) * width + i % width]);
    }
}

// Calls use(row, n, equal, all) for each token n of this warp's share whose id is first + row, row < SHELF, in the
// order of tokens; equal: the lanes that hold the same id, all: those that hold one at all. Returns how many of the
// lane's ids are less than first.
template <class Use>
__device__ __forceinline__ int each_match(const int *ids, int tokens, int first, Use use) {
    const int share = (tokens + 1023) / 1024 * 32, begin = threadIdx.y * share, end = min(tokens, begin + share);
    int below = 0;
    for (int n = begin + threadIdx.x; n < begin + share; n += 32 * SCAN) {
        int row[SCAN];
#pragma unroll
        for (int k = 0; k < SCAN; k++) row[k] = n + 32 * k < end ? ids[n + 32 * k] - first : SHELF;
#pragma unroll
        for (int k = 0; k < SCAN; k++) {
            below += row[k] < 0;
            const bool found = row[k] >= 0 && row[k] < SHELF;
            const u32 all = __ballot_sync(~0u, found);
            if (all) {
                if (found) use(row[k], n + 32 * k, __match_any_sync(all, row[k]), all);
                __syncwarp();  // another lane continues from what one lane counts here
            }
        }
    }
    return below;
}

// order: the tokens; those of row r are order[starts[r]] up to order[starts[r + 1] - 1]. done: (rows), set to 0.
extern "C" __global__ void __launch_bounds__(1024) embedding_order(
    int *order, int *starts, int *done, const int *ids, int tokens, int rows
) {
    __shared__ int place[SHELF][33];  // for each row and each warp's share: how many, then where the next one goes
    __shared__ int scratch[32];
    const int lane = threadIdx.x, warp = threadIdx.y, first = blockIdx.x * SHELF;
    place[warp][lane] = 0;
    __syncthreads();
    int below = each_match(ids, tokens, first, [&](int row, int, u32 equal, u32) {
        if (lane == __ffs(equal) - 1) place[row][warp] += __popc(equal);
    });
    below = warp_sum(below);
    if (lane == 0) scratch[warp] = below;
    __syncthreads();
    below = warp_sum(scratch[lane]);

    // Now warp and lane stand for a row and a share. Counts become places by a sum over all rows and shares before.
    const int count = place[warp][lane];
    const int before = sum_before(count);
    __syncthreads();
    if (lane == 31) scratch[warp] = before + count;
    __syncthreads();
    const int start = below + __shfl_sync(~0u, sum_before(scratch[lane]), warp);
    place[warp][lane] = start + before;
    const int row = first + warp;
    if (lane == 0 && row < rows) {
        starts[row] = start;
        done[row] = 0;
    }
    if (row == 0 && lane == 0) starts[rows] = tokens;
    __syncthreads();

    each_match(ids, tokens, first, [&](int row, int n, u32 equal, u32 all) {
        const int at = place[row][warp];
        __syncwarp(all);
        if (lane == __ffs(equal) - 1) place[row][warp] = at + __popc(equal);
        order[at + __popc(equal & ((1u << lane) - 1))] = n;
    });
}

// partial: a row for each piece, two for each multiple of PIECE: 2 k for the piece that begins there in the middle of a
// row of W, 2 k + 1 for the one in which a row of W begins. done: 0 before and after: one order serves several tables.
extern "C" __global__ void __launch_bounds__(256, 4) embedding_bwd(
    A *dtable, A *partial, int *done, const T *dy, const int *ids, const int *order, const int *starts, int pieces,
    int vectors
) {
    __shared__ bool last;
    const int v = blockIdx.y * blockDim.x + threadIdx.x;
    const bool inside = blockIdx.x < pieces;
    int from = (blockIdx.x + 1) * PIECE;
    const int row = inside ? ids[order[from]] : blockIdx.x - pieces;
    const int start = starts[row], end = starts[row + 1];
    const bool whole = end - start <= PIECE;
    if (start == end || (inside && (whole || from == start))) return;
    if (!inside) from = start;
    const int to = whole ? end : min(end, (from / PIECE + 1) * PIECE);

    Pack<A, VEC> *const target = reinterpret_cast<Pack<A, VEC> *>(dtable) + i64(row) * vectors;
    Pack<A, VEC> sum = {}, total = {};
    if (v < vectors) {
        if (whole) total = target[v];  // ahead of its use
        for (int i = from; i < to; i += BATCH) {
            Pack<T, VEC> d[BATCH];
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
                // Past the end, the last row again, from cache: without a branch all loads are in flight together.
                d[k] = load<VEC>(dy + (i64(order[min(i + k, to - 1)]) * vectors + v) * VEC);
            }
#pragma unroll
            for (int k = 0; k < BATCH; k++) {
#pragma unroll
                for (int j = 0; j < VEC; j++) sum.v[j] += i + k < to ? widen(d[k].v[j]) : A(0);
            }
        }
    }
    const int head = start / PIECE, tail = (end - 1) / PIECE;
    if (!whole) {
        const int slot = inside ? 2 * (from / PIECE) : 2 * head + 1;
        Pack<A, VEC> *const slots = reinterpret_cast<Pack<A, VEC> *>(partial);
        if (v < vectors) slots[i64(slot) * vectors + v] = sum;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            last = atomicAdd(done + row, 1) == (tail - head + 1) * int(gridDim.y) - 1;
            if (last) done[row] = 0;
        }
        __syncthreads();
        if (!last) return;
        __threadfence();
        for (int u = threadIdx.x; u < vectors; u += blockDim.x) {
            sum = load_from_l2(slots + i64(2 * head + 1) * vectors + u);
#pragma unroll 4
            for (int k = head + 1; k <= tail; k++) {
                const Pack<A, VEC> piece = load_from_l2(slots + i64(2 * k) * vectors + u);
#pragma unroll
                for (int j = 0; j < VEC; j++) sum.v[j] += piece.v[j];
            }
            total = target[u];
#pragma unroll
            for (int j = 0; j < VEC; j++) total.v[j] += sum.v[j];
            target[u] = total;
        }
    } else if (v < vectors) {
#pragma unroll
        for (int j = 0; j < VEC; j++) total.v[j] += sum.v[j];
        target[v] = total;
    }
}
