// append: the keys and values of a prompt, as attention reads them in training, into a decoder's cache
//
// Kernel:  append     keys and values of a layer, both by one launch
//
// A thread copies a vector of a key and the one at the same place of the value. k and v are parts of packed rows,
// `stride` numbers apart; in the cache the positions of a head are adjacent.
// Grid: a thread for each vector. Block: 256 threads. Bound by its launch: 512 tokens of `base` are 0.5 MB a layer.

#include "ops/common.cuh"

typedef SCALAR T;

// keys, values: (heads, capacity, vectors * VEC), from the first new position on. k, v: (tokens, heads, vectors * VEC).
extern "C" __global__ void __launch_bounds__(256) append(
    T *keys, T *values, const T *k, const T *v, u32 total, u32 heads, u32 vectors, u32 stride, u32 capacity
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 j = i % vectors, head = i / vectors % heads, token = i / vectors / heads;
    const i64 from = i64(token) * stride + (head * vectors + j) * VEC;
    const i64 to = ((i64(head) * capacity + token) * vectors + j) * VEC;
    store(keys + to, load<VEC>(k + from));
    store(values + to, load<VEC>(v + from));
}
