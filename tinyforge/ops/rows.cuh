// What the kernels share that give each row to a warp, because they need a sum over the row before they can write its
// first element.
//
// Reading a row from memory a second time would cost half as much again. So a lane keeps its vectors of the row:
//   PER > 0  PER vectors of VEC elements a lane, vector v of the row in lane v % 32
//   PER = 0  rows of any width: read again for each pass, mostly from cache
// Lanes are threadIdx.x, the warps of a block threadIdx.y. Macros: SCALAR, VEC, PER.

#include "ops/common.cuh"

typedef SCALAR T;
typedef Wide<T> A;
typedef Pack<T, VEC> Vector;

// Calls use(i, v) for each vector v of a row that is this lane's; i counts them.
template <class Use>
__device__ __forceinline__ void each_vector(int vectors, Use use) {
#if PER
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int v = i * 32 + threadIdx.x;
        if (v < vectors) use(i, v);
    }
#else
    for (int v = threadIdx.x; v < vectors; v += 32) use(0, v);
#endif
}

// A row in registers. All its loads are in flight before the first is used.
struct Row {
#if PER
    Vector kept[PER];
    __device__ __forceinline__ Row(const T *from, int vectors) {
        each_vector(vectors, [&](int i, int v) { kept[i] = load<VEC>(from + v * VEC); });
    }
    __device__ __forceinline__ Vector operator()(int i, int) const { return kept[i]; }
    // The row is now what was stored at `to`, vector by vector.
    __device__ __forceinline__ void put(T *to, int i, int v, const Vector &p) {
        kept[i] = p;
        store(to + v * VEC, p);
    }
    __device__ __forceinline__ void moved(const T *) {}
#else
    const T *from;
    __device__ __forceinline__ Row(const T *from, int) : from(from) {}
    __device__ __forceinline__ Vector operator()(int, int v) const { return load<VEC>(from + v * VEC); }
    __device__ __forceinline__ void put(T *to, int, int v, const Vector &p) { store(to + v * VEC, p); }
    __device__ __forceinline__ void moved(const T *to) { from = to; }
#endif
};

// The rows that a warp of a backward kernel takes one after the other, of ARRAYS arrays at once. With PER > 0 the next
// rows are copied into shared memory while the warp works on one, STAGES of them in flight. Bytes in flight hide the
// latency of memory; registers are too few for them, as they hold the sums for the gain. A lane copies and reads back
// only its own vectors, so that no lane waits for another.
#define STAGES 2
#define BLOCKS 2                 // of a backward kernel, on each multiprocessor
#define WARPS (PER > 4 ? 4 : 8)  // of its blocks: fewer where rows are long, so that the rows of two blocks fit

#if PER
extern __shared__ uint4 room[];  // STAGES x ARRAYS x PER x threads
#endif

template <int ARRAYS>
struct RowStream {
    const T *from[ARRAYS];
    const int rows, width, stride;
    int row, stage = 0;

    __device__ __forceinline__ RowStream(const T *const (&arrays)[ARRAYS], int rows, int width)
        : rows(rows), width(width), stride(gridDim.x * WARPS), row(blockIdx.x * WARPS + threadIdx.y) {
#pragma unroll
        for (int a = 0; a < ARRAYS; a++) from[a] = arrays[a];
#if PER
#pragma unroll
        for (int s = 0; s < STAGES; s++) fetch(row + s * stride, s);
#endif
    }

    // Whether there is a row left; it can then be read.
    __device__ __forceinline__ bool ready() {
#if PER
        copy_wait<STAGES - 1>();
#endif
        return row < rows;
    }

    __device__ __forceinline__ Vector operator()(int array, int i, int v) const {
#if PER
        return *reinterpret_cast<const Vector *>(&slot(stage, array, i));
#else
        return load<VEC>(from[array] + i64(row) * width + v * VEC);
#endif
    }

    __device__ __forceinline__ void next() {
#if PER
        fetch(row + STAGES * stride, stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
#endif
        row += stride;
    }

#if PER
    __device__ __forceinline__ uint4 &slot(int stage, int array, int i) const {
        return room[((stage * ARRAYS + array) * PER + i) * WARPS * 32 + threadIdx.y * 32 + threadIdx.x];
    }

    // A group for each row, an empty one past the last, so that counting groups counts rows.
    __device__ __forceinline__ void fetch(int row, int stage) const {
        if (row < rows) {
#pragma unroll
            for (int a = 0; a < ARRAYS; a++) {
                each_vector(width / VEC, [&](int i, int v) {
                    copy_async(shared_address(&slot(stage, a, i)), from[a] + i64(row) * width + v * VEC);
                });
            }
        }
        copy_commit();
    }
#endif
};

#if PER
// partial[c] = the sum of a block's warps' sums for column c, warp after warp. Called by all threads, when their
// streams have ended: it uses the same room.
__device__ __forceinline__ void add_warps(const Pack<A, VEC> (&mine)[PER], A *partial, int width) {
    A *sums = reinterpret_cast<A *>(room);
    __syncthreads();
    each_vector(width / VEC, [&](int i, int v) { store(sums + threadIdx.y * width + v * VEC, mine[i]); });
    __syncthreads();
    for (int column = threadIdx.y * 32 + threadIdx.x; column < width; column += WARPS * 32) {
        A sum = sums[column];
#pragma unroll
        for (int w = 1; w < WARPS; w++) sum += sums[w * width + column];
        partial[column] = sum;
    }
}
#endif
