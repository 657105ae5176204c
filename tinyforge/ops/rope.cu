// rope: rotate the pair (x[i], x[i + D/2]) of a head by the angle of its position.
//
// Kernels:  rope     y from x; in place where y is x
//
// Idea. A thread takes VEC pairs: one vector from the left half of a head and its partner from the right half. It reads
// both before it writes either, so working in place is safe. Heads that are not rotated are copied, or, in place, not
// visited at all. Backward is the same kernel with the sines negated.
// Grid: a thread for each vector of pairs. Block: 256 threads. No shared memory.
// Bound by memory: each rotated head is read and written once; the table of angles stays in cache.
//
// Tried on an H200 (bf16, 16 heads of 64, 16,384 tokens): all four loads ahead of the first use, 15.6 us, as fast as a
// copy; the angles loaded only after testing whether the head is rotated, 19.6 us; the angles loaded once for 2, 4 or 8
// heads, 17, 18 and 26 us (more registers, fewer threads).

#include "ops/common.cuh"
#include "ops/rope.cuh"

typedef SCALAR T;
typedef Wide<T> A;

// visited: of the `heads` of a token, those that are not skipped; the first `rotated` are rotated. half: vectors of
// half a head.
extern "C" __global__ void __launch_bounds__(256) rope(
    T *y, const T *x, const A *cosines, const A *sines, u32 total, u32 positions, u32 heads, u32 visited, u32 rotated,
    u32 half
) {
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= total) return;
    const u32 j = i % half, head = i / half % visited, token = i / half / visited;
    const i64 angle = (i64(token % positions) * half + j) * VEC;
    const Pack<A, VEC> c = load<VEC>(cosines + angle), s = load<VEC>(sines + angle);
    const i64 at = ((i64(token) * heads + head) * 2 * half + j) * VEC, beside = at + i64(half) * VEC;
    Pack<T, VEC> left = load<VEC>(x + at), right = load<VEC>(x + beside);
    if (head < rotated) rotate(left, right, c, s);
    store(y + at, left);
    store(y + beside, right);
}
