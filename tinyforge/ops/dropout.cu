// dropout: y[i] = x[i] / (1 - p) where the i-th random word is at least p 2^32, else 0.
//
// Kernels:  dropout     forward, and backward with dy in place of x
//
// Idea. Philox is a function of a counter and a key, not a state that moves on: block b of four words is philox(b).
// A thread makes the words of its own elements, the same bits as tinyforge/rng.py, and nothing is stored.
// key: the address of the key's two words; null: they are key0 and key1. A captured graph reads them from memory, to
// draw a new mask at each launch.
// Grid: a thread for each vector of VEC elements. Block: 256 threads. No shared memory.
// Bound by memory for bf16 (ten rounds for four elements stay just below it).
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

#include "ops/common.cuh"
#include "ops/philox.cuh"

typedef SCALAR T;
typedef Wide<T> A;

extern "C" __global__ void __launch_bounds__(256) dropout(
    T *y, const T *x, const u32 *key, u32 total, u32 key0, u32 key1, u32 threshold, A scale
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    if (key) key0 = key[0], key1 = key[1];
    Pack<T, VEC> p = load<VEC>(x + i64(i) * VEC);
#pragma unroll
    for (int first = 0; first < VEC; first += 4) {
        const i64 element = i64(i) * VEC + first;
        const uint4 words = philox(u32(element / 4), 0, 0, 0, key0, key1);
        const u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int j = 0; j < (VEC < 4 ? VEC : 4); j++) {
            // With fewer than four elements a thread starts somewhere inside a block of words.
            const u32 bits = VEC < 4 ? (VEC == 2 ? (element % 4 ? word[2 + j] : word[j])
                                                 : (element % 4 < 2 ? (element % 2 ? word[1] : word[0])
                                                                    : (element % 2 ? word[3] : word[2])))
                                     : word[j];
            narrow(bits >= threshold ? widen(p.v[first + j]) * scale : A(0), p.v[first + j]);
        }
    }
    store(y + i64(i) * VEC, p);
}
