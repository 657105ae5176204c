// A row for each warp: what the kernels that need a sum over a row before they can write its first element share.
//
// Reading a row from memory a second time would cost half as much again. So a lane keeps its vectors of the row:
//   PER > 0    PER vectors of VEC elements a lane, vector v of the row in lane v % 32
//   PER = 0    rows of any width: read again for each pass, mostly from cache
// Lanes are threadIdx.x, a block's warps threadIdx.y. Macros: SCALAR, VEC, PER.

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

// A row in registers. All its loads are under way before the first is used.
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

// The rows that a warp of a backward takes one after the other, of ARRAYS arrays at once. With PER > 0 the rows to come
// are copied into shared memory while the warp works on one, STAGES of them under way: bytes in flight hide the latency
// of memory, and registers, which hold the sums for the gain, are too few for them. A lane copies and reads back its
// own vectors alone, so that no lane waits for another.
#define STAGES 2
#define BLOCKS 2                 // of a backward, on each multiprocessor
#define WARPS (PER > 4 ? 4 : 8)  // of its blocks: fewer where a row is long, so that two blocks' rows fit

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
        asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
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
                    const u32 to = u32(__cvta_generic_to_shared(&slot(stage, a, i)));
                    const T *address = from[a] + i64(row) * width + v * VEC;
                    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(address) : "memory");
                });
            }
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
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

#define SPAN 32  // columns that a block adds at a time
#define BATCH 9  // partial rows of a thread under way at a time

// Adds the partial rows of all blocks to `out`, the columns from `width` on to `second`. Called by all threads of all
// blocks, behind add_warps. A block takes a ticket when its row is written. Those with the last tickets, `adders` of
// them, wait until all are taken, and then add, each its columns, over all rows in order. Which block has which columns
// differs from run to run; what is added, and in which order, does not.
//
// Nothing says that all blocks of a grid run at the same time, and yet no wait is for ever. A block waits while another
// has no ticket; then less than `adders` wait, at most half as many as there are multiprocessors (a grid is at most
// BLOCKS times those). Each has room for a block at least, so there is room for the blocks that have not begun.
//
// tickets: 0 before and after. It counts a ticket for each block, and each adder when it has stopped waiting; atomicInc
// goes back to 0 from the last of these. Launches share it, as those of a process follow one another on one stream.
__device__ __forceinline__ void add_blocks(
    const A *partial, A *out, A *second, int columns, int width, u32 *tickets
) {
    constexpr int LANES = SPAN / 4, SLOTS = WARPS * 32 / LANES;  // a thread: four columns of every SLOTS-th row
    static_assert(VEC % 4 == 0, "columns come by four");
    __shared__ u32 ticket;
    A *const sums = reinterpret_cast<A *>(room);
    const int thread = threadIdx.y * 32 + threadIdx.x, spans = (columns + SPAN - 1) / SPAN;
    const u32 rows = gridDim.x, adders = max(1, min(spans, gridDim.x / (2 * BLOCKS)));
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        ticket = atomicInc(tickets, rows + adders - 1);
        if (ticket >= rows - adders) {
            while (*static_cast<volatile u32 *>(tickets) < rows) {
            }
            atomicInc(tickets, rows + adders - 1);
        }
    }
    __syncthreads();
    if (ticket < rows - adders) return;
    __threadfence();
    for (int span = ticket - (rows - adders); span < spans; span += adders) {
        const int column = span * SPAN + thread, four = span * SPAN + thread % LANES * 4;
        const bool ours = thread < SPAN && column < columns;
        A *const to = column < width ? out + column : second + (column - width);
        const A before = ours ? *to : A(0);  // ahead of its use
        Pack<A, 4> sum = {};
        if (four < columns) {
            const A *const from = partial + four;
            for (int first = thread / LANES; first < rows; first += SLOTS * BATCH) {
                Pack<A, 4> some[BATCH] = {};
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
                    const i64 i = first + SLOTS * k;
                    if (i < rows) some[k] = load_from_l2(reinterpret_cast<const Pack<A, 4> *>(from + i * columns));
                }
#pragma unroll
                for (int k = 0; k < BATCH; k++) {
#pragma unroll
                    for (int j = 0; j < 4; j++) sum.v[j] += some[k].v[j];
                }
            }
        }
        store(sums + thread * 4, sum);  // SLOTS rows of SPAN
        __syncthreads();
        if (ours) {
            A total = sums[thread];
#pragma unroll
            for (int slot = 1; slot < SLOTS; slot++) total += sums[slot * SPAN + thread];
            *to = before + total;
        }
        __syncthreads();  // the sums have been read
    }
}
#endif
