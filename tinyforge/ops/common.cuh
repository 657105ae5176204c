// What the kernels share: number types, accesses of up to 16 bytes, sums and maxima in a fixed order.
//
// A file is compiled for one storage type, SCALAR: double, float or bf16. Arithmetic is done in Wide<SCALAR>: the same
// type, but float for bf16, whose 8 bits of mantissa are for keeping numbers and not for adding them up.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// NVRTC has no <math.h> macros.
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

// The upper half of a float. Not CUDA's own type: its header takes longer to compile than a kernel.
struct bf16 {
    unsigned short bits;
};

template <class T>
struct WideOf {
    typedef T type;
};
template <>
struct WideOf<bf16> {
    typedef float type;
};
template <class T>
using Wide = typename WideOf<T>::type;

__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

__device__ __forceinline__ void narrow(double x, double &to) { to = x; }
__device__ __forceinline__ void narrow(float x, float &to) { to = x; }
__device__ __forceinline__ void narrow(float x, bf16 &to) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));  // to nearest, ties to even
}

// x as it will be read back after being stored as a T.
template <class T>
__device__ __forceinline__ Wide<T> rounded(Wide<T> x) {
    T stored;
    narrow(x, stored);
    return widen(stored);
}

// N elements that are loaded or stored in one access, or in several if they have more than 16 bytes. The caller must
// pass aligned addresses.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    T v[N];
};

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T *from) {
    return *reinterpret_cast<const Pack<T, N> *>(from);
}
template <int N, class T>
__device__ __forceinline__ void store(T *to, const Pack<T, N> &pack) {
    *reinterpret_cast<Pack<T, N> *>(to) = pack;
}

// The same for data that is not read again soon: its lines are evicted from the L2 cache first.
template <class T, int N>
__device__ __forceinline__ void store_streaming(T *to, const Pack<T, N> &pack) {
    if constexpr (sizeof(pack) == 16) {
        __stcs(reinterpret_cast<uint4 *>(to), *reinterpret_cast<const uint4 *>(&pack));
    } else {
        store(to, pack);
    }
}

// Loads what another block of the same kernel has written: from the L2 cache, as the L1 cache may be stale.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_from_l2(const Pack<T, N> *from) {
    Pack<T, N> pack;
    if constexpr (sizeof(pack) % 16 == 0) {
#pragma unroll
        for (int i = 0; i < sizeof(pack) / 16; i++) {
            reinterpret_cast<uint4 *>(&pack)[i] = __ldcg(reinterpret_cast<const uint4 *>(from) + i);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) pack.v[i] = __ldcg(from->v + i);
    }
    return pack;
}

__device__ __forceinline__ u32 shared_address(const void *p) { return u32(__cvta_generic_to_shared(p)); }
// Starts an asynchronous copy of 16 bytes from global to shared memory. `copy_commit` closes a group of such copies.
__device__ __forceinline__ void copy_async(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same, but writes zeros where `valid` is false; nothing is read then.
__device__ __forceinline__ void copy_async(u32 to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void copy_async_8(u32 to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the last `pending` groups of this thread are still in flight.
template <int pending>
__device__ __forceinline__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// sum += a b^T on tensor cores, in bf16: mma.m16n8k16. With g = lane / 4 and c = 2 (lane % 4), a lane holds two
// adjacent columns of a row in each register:
//   a (16 x 16): a0 = (g, c..c+1), a1 = (g + 8, c..c+1), a2 = (g, c+8..c+9), a3 = (g + 8, c+8..c+9)
//   b (8 x 16):  b0 = (g, c..c+1), b1 = (g, c+8..c+9)
//   sum (16 x 8): sum[0..1] = (g, c..c+1), sum[2..3] = (g + 8, c..c+1)
__device__ __forceinline__ void multiply_add(float (&sum)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit numbers from shared memory, as fragments of a product (ldmatrix). A lane passes the
// address of row lane % 8 of matrix lane / 8.
__device__ __forceinline__ void load_matrix(u32 (&x)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}
__device__ __forceinline__ void load_matrix_transposed(u32 (&x)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(from)
                 : "memory");
}

// exp(x) and 1 / x for results that are stored as a T: for bf16 by the hardware's approximations, whose error is about
// a hundredth of that of the rounding.
template <class T>
__device__ __forceinline__ Wide<T> exp_for(Wide<T> x) {
    return exp(x);
}
template <>
__device__ __forceinline__ float exp_for<bf16>(float x) {
    return __expf(x);
}
template <class T>
__device__ __forceinline__ Wide<T> inverse_for(Wide<T> x) {
    return Wide<T>(1) / x;
}
template <>
__device__ __forceinline__ float inverse_for<bf16>(float x) {
    return __fdividef(1.0f, x);
}

// 1 / (1 + exp(-x)), for x far below 0 as well: exp(-x) overflows to infinity, and 1 / infinity is 0.
template <class T>
__device__ __forceinline__ Wide<T> sigmoid(Wide<T> x) {
    return inverse_for<T>(Wide<T>(1) + exp_for<T>(-x));
}

// The derivative of silu(x) = x s, s = sigmoid(x). It equals s (1 + x (1 - s)), which loses its digits near its zero at
// x = -1.28.
template <class A>
__device__ __forceinline__ A silu_slope(A x, A s) {
    return s * (s + (A(1) - s) * (A(1) + x));
}

template <class A>
__device__ __forceinline__ A largest(A a, A b) {
    return a > b ? a : b;
}

// Over the 32 lanes of a warp; every lane gets the result, with the same bits: partners add the same two numbers.
template <class A>
__device__ __forceinline__ A warp_sum(A x) {
#pragma unroll
    for (int gap = 16; gap; gap /= 2) x += __shfl_xor_sync(~0u, x, gap);
    return x;
}
template <class A>
__device__ __forceinline__ A warp_max(A x) {
#pragma unroll
    for (int gap = 16; gap; gap /= 2) x = largest(x, __shfl_xor_sync(~0u, x, gap));
    return x;
}

// The sum of x over the lanes before this one.
__device__ __forceinline__ int sum_before(int x) {
    int sum = x;
#pragma unroll
    for (int gap = 1; gap < 32; gap *= 2) {
        const int left = __shfl_up_sync(~0u, sum, gap);
        if (threadIdx.x % 32 >= gap) sum += left;
    }
    return sum - x;
}

// Over a block of up to 32 full warps, one-dimensional; every thread gets the result. `scratch` holds 32 numbers and is
// free again when the function returns.
template <class A>
__device__ __forceinline__ A block_sum(A x, A *scratch) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? scratch[lane] : A(0));
    __syncthreads();
    return x;
}

// The end of a sum over rows by a block of 32 x 8 threads, where lane c of each warp has added up vector c of the
// block's 32 vectors of columns: adds the sums of the eight warps, in order. partial: (gridDim.y, width).
template <int N, class A>
__device__ __forceinline__ void store_column_sums(A *partial, A (&sums)[8][32 * N], const Pack<A, N> &sum, int width) {
#pragma unroll
    for (int j = 0; j < N; j++) sums[threadIdx.y][threadIdx.x * N + j] = sum.v[j];
    __syncthreads();
    for (int c = threadIdx.y * 32 + threadIdx.x; c < 32 * N; c += 256) {
        const int column = blockIdx.x * 32 * N + c;
        A total = sums[0][c];
#pragma unroll
        for (int w = 1; w < 8; w++) total += sums[w][c];
        if (column < width) partial[i64(blockIdx.y) * width + column] = total;
    }
}
